import { describe, expect, test, vi } from 'vitest';
import { MeshModel } from './model';
import { MOST_SPANS, SPAN_SECONDS } from './protocol';
import { meshRow, patchOf, rankRow, snapshotOf } from './testing';

function modelOf(count: number): MeshModel {
  const model = new MeshModel();
  model.take(snapshotOf(count));
  return model;
}

describe('MeshModel', () => {
  test('has a clock that stops when nothing can be known, until the next message', () => {
    vi.useFakeTimers();
    const model = modelOf(2);
    const before = model.now();
    vi.advanceTimersByTime(1000);
    expect(model.now() - before).toBeCloseTo(1);
    model.freeze();
    vi.advanceTimersByTime(5000);
    expect(model.now() - before).toBeCloseTo(1);
    model.patch(patchOf(1, { now: 1020 }));
    expect(model.now()).toBeCloseTo(1020);
    vi.useRealTimers();
  });

  test('fills in the defaults of fields that a message leaves out', () => {
    const model = modelOf(2);
    expect(model.ranks[1]).toMatchObject({ rank: 1, state: 'idle', load: 0, reason: '', tensors: {}, restarts: 0 });
    expect(model.mesh).toMatchObject({ ended: 0, reason: '' });
  });

  test('replaces the rows that a patch names, and keeps the identity of others', () => {
    const model = modelOf(3);
    const before = [...model.ranks];
    expect(model.patch(patchOf(1, { ranks: [rankRow(1, { state: 'running', load: 0.5 })] }))).toBe(true);
    expect(model.ranks[1]).toMatchObject({ state: 'running', load: 0.5 });
    expect(model.ranks[0]).toBe(before[0]);
    expect(model.ranks[2]).toBe(before[2]);
    expect(model.number).toBe(2);
  });

  test('a missing field of a replaced row has its default again', () => {
    const model = modelOf(1);
    model.patch(patchOf(1, { ranks: [rankRow(0, { state: 'failed', reason: 'died' })] }));
    model.patch(patchOf(2, { ranks: [rankRow(0)] }));
    expect(model.ranks[0].reason).toBe('');
  });

  test.each([
    ['after a gap', patchOf(5)],
    ['of a past event', patchOf(0)],
    ['of another mesh', patchOf(1, { uid: 'mesh-2' })]
  ])('refuses a patch %s and stays as it is', (_, patch) => {
    const model = modelOf(2);
    expect(model.patch({ ...patch, ranks: [rankRow(0, { state: 'failed' })] })).toBe(false);
    expect(model.number).toBe(1);
    expect(model.ranks[0].state).toBe('idle');
  });

  test('a patch before the first snapshot is refused', () => {
    expect(new MeshModel().patch(patchOf(-1))).toBe(false);
  });

  test('a snapshot forgets all that was', () => {
    const model = modelOf(3);
    const call = { call: 4, title: 'cell [1]', cell: 1, ranks: [0], left: [0], started: 1 };
    model.patch(patchOf(1, { calls: [call], spans: [{ rank: 0, state: 'running', begin: 1009 }] }));
    model.take(snapshotOf(2, { number: 40 }));
    expect([model.ranks.length, model.calls.size, model.spans.size, model.number]).toEqual([2, 0, 0, 40]);
  });

  test('spans are replaced by their rank and begin, and stay in order', () => {
    const model = modelOf(1);
    model.patch(patchOf(1, { spans: [{ rank: 0, state: 'running', begin: 1005 }] }));
    model.patch(
      patchOf(2, {
        spans: [
          { rank: 0, state: 'idle', begin: 1008 },
          { rank: 0, state: 'running', begin: 1005, end: 1008 }
        ]
      })
    );
    model.patch(patchOf(3, { spans: [{ rank: 0, state: 'starting', begin: 1001, end: 1005 }] }));
    expect(model.spans.get(0)!.map(span => [span.state, span.begin, span.end])).toEqual([
      ['starting', 1001, 1005],
      ['running', 1005, 1008],
      ['idle', 1008, 0]
    ]);
  });

  test('forgets spans that ended longer ago than a view shows', () => {
    const model = modelOf(1);
    model.patch(
      patchOf(1, {
        spans: [
          { rank: 0, state: 'running', begin: 1000, end: 1010 },
          { rank: 0, state: 'idle', begin: 1010 }
        ]
      })
    );
    model.patch(patchOf(2, { now: 1010 + SPAN_SECONDS }));
    expect(model.spans.get(0)!.length).toBe(2);
    model.patch(patchOf(3, { now: 1010.5 + SPAN_SECONDS }));
    expect(model.spans.get(0)!.map(span => span.state)).toEqual(['idle']);
  });

  test('keeps the newest of the spans that have ended, and all that last', () => {
    const model = modelOf(2);
    const ended = Array.from({ length: MOST_SPANS + 10 }, (_, at) => ({
      rank: at % 2,
      state: 'running' as const,
      begin: 1000 + at / 1000,
      end: 1000 + (at + 1) / 1000
    }));
    model.patch(patchOf(1, { spans: [...ended, { rank: 1, state: 'idle', begin: 1000.0001 }] }));
    const spans = [...model.spans.values()].flat();
    expect(spans.filter(span => span.end).length).toBe(MOST_SPANS);
    expect(Math.min(...spans.filter(span => span.end).map(span => span.end))).toBeCloseTo(1000.011);
    expect(spans.filter(span => !span.end).length).toBe(1);
  });

  test('points go to their place: appended, or instead of what is there', () => {
    const model = modelOf(1);
    const loss = (at: number, steps: number[]) => ({
      name: 'loss',
      rank: 0,
      at,
      steps,
      values: steps.map(step => step / 10)
    });
    model.patch(patchOf(1, { points: [loss(0, [1, 2])] }));
    model.patch(patchOf(2, { points: [loss(2, [3])] }));
    expect(model.metrics.get('loss')!.get(0)!.steps).toEqual([1, 2, 3]);
    model.patch(patchOf(3, { points: [loss(0, [1, 3]), loss(2, [4])] }));
    expect(model.metrics.get('loss')!.get(0)).toEqual({ steps: [1, 3, 4], values: [0.1, 0.3, 0.4] });
  });

  test('drops calls and bars that the kernel drops', () => {
    const model = modelOf(1);
    const call = { call: 4, title: 'cell [1]', cell: 1, ranks: [0], left: [], started: 1 };
    const bar = { bar: 'epoch', unit: '', ranks: [0], done: [1], total: [2], left: [0], started: 1 };
    model.patch(patchOf(1, { calls: [call], bars: [bar] }));
    expect([model.calls.size, model.bars.size]).toEqual([1, 1]);
    model.patch(patchOf(2, { dropped_calls: [4], dropped_bars: ['epoch'] }));
    expect([model.calls.size, model.bars.size]).toEqual([0, 0]);
  });

  test('a view of some ranks has the bars of these, as far as they have come', () => {
    const model = new MeshModel([1, 3]);
    const bar = { unit: 'it', total: [9], started: 1 };
    const epoch = { ...bar, bar: 'epoch', ranks: [0, 1, 3], done: [1, 5, 9], left: [0, 1] };
    const whole = { ...bar, done: [1], left: [], together: true };
    model.take(
      snapshotOf(4, {
        bars: [
          epoch,
          { ...bar, bar: 'other', ranks: [0, 2], done: [1, 1], left: [0, 2] },
          { ...whole, bar: 'start', ranks: [] },
          { ...whole, bar: 'heal', ranks: [2] },
          { ...whole, bar: 'copy', ranks: [2, 3] }
        ]
      })
    );
    expect([...model.bars.keys()]).toEqual(['epoch', 'start', 'copy']);
    expect(model.bars.get('epoch')).toMatchObject({ ranks: [1, 3], done: [5, 9], total: [9], left: [1], ended: 0 });
    model.patch(patchOf(1, { now: 1005, bars: [{ ...epoch, done: [2, 9, 9], left: [0] }] }));
    expect(model.bars.get('epoch')!.ended).toBe(1005);
    model.patch(patchOf(2, { now: 1006, bars: [{ ...epoch, done: [3, 9, 9], left: [0] }] }));
    expect(model.bars.get('epoch')!.ended).toBe(1005);
  });

  test("the clock is the kernel's, and stands when the mesh has ended", () => {
    const model = modelOf(1);
    expect(model.now()).toBeCloseTo(1010, 0);
    model.patch(patchOf(1, { mesh: meshRow(1, { ended: 1005, reason: 'down' }) }));
    expect(model.now()).toBe(1005);
  });
});
