import { beforeEach, describe, expect, test } from 'vitest';
import { Follower, isMissing, runs } from './outputs';

/** As an output area's model keeps outputs. */
class Outputs {
  list: Record<string, unknown>[] = [];
  fromJSON(values: Record<string, unknown>[]) {
    this.list = [...values];
  }
  add(value: Record<string, unknown>) {
    return this.list.push(value);
  }
  set(at: number, value: Record<string, unknown>) {
    this.list[at] = value;
  }
  clear() {
    this.list = [];
  }
}

let outputs: Outputs;
let model: { outputs: Outputs; executionCount: number | null; executionState: string };

beforeEach(() => {
  outputs = new Outputs();
  model = { outputs, executionCount: null, executionState: 'idle' };
});

const message = (kind: string, content: object) => ({ header: { msg_type: kind }, content }) as never;
const start = (change = {}) => ({
  cell: 'c',
  request: 'r',
  number: 4,
  outputs: [{ output_type: 'stream', name: 'stdout', text: 'one\n' }],
  ...change
});
const follow = (change = {}) => new Follower({ model } as never, start(change));

describe('the output of a cell that runs when the page opens', () => {
  test('is that of the kernel, and continues', () => {
    const follower = follow();
    expect([model.executionCount, model.executionState, outputs.list.length]).toEqual([4, 'running', 1]);
    expect(follower.take(message('stream', { name: 'stdout', text: 'two\n' }))).toBe(true);
    expect(outputs.list.at(-1)).toEqual({ output_type: 'stream', name: 'stdout', text: 'two\n' });
    expect(follower.take(message('status', { execution_state: 'busy' }))).toBe(true);
    expect(follower.take(message('status', { execution_state: 'idle' }))).toBe(false);
    expect(model.executionState).toBe('idle');
  });

  test('updates displays in their place, those from before too', () => {
    const shown = {
      output_type: 'display_data',
      data: { 'text/plain': 'old' },
      metadata: {},
      transient: { display_id: 'x' }
    };
    const follower = follow({ outputs: [shown] });
    follower.take(
      message('display_data', { data: { 'text/plain': 'b' }, metadata: {}, transient: { display_id: 'y' } })
    );
    follower.take(
      message('update_display_data', { data: { 'text/plain': 'new' }, metadata: {}, transient: { display_id: 'x' } })
    );
    expect(outputs.list.map(each => (each.data as Record<string, string>)['text/plain'])).toEqual(['new', 'b']);
    expect(outputs.list[1]).not.toHaveProperty('transient');
  });

  test('is cleared at once, or with the next output', () => {
    const follower = follow();
    follower.take(message('clear_output', { wait: true }));
    expect(outputs.list.length).toBe(1);
    follower.take(message('stream', { name: 'stdout', text: 'new' }));
    expect(outputs.list).toEqual([{ output_type: 'stream', name: 'stdout', text: 'new' }]);
    follower.take(message('clear_output', {}));
    expect(outputs.list).toEqual([]);
  });

  test('is left alone if this page runs the cell, or shows its result', () => {
    const cell = (id: string, count: number | null) =>
      ({
        model: { executionCount: count },
        outputArea: { future: !id ? null : { msg: { header: { msg_id: id } } } }
      }) as never;
    expect(isMissing(cell('r', null), start())).toBe(false);
    expect(isMissing(cell('', null), start())).toBe(true);
    expect(isMissing(cell('', 4), start())).toBe(true);
    expect(isMissing(cell('', 4), start({ ended: true }))).toBe(false);
    expect(isMissing(cell('', 3), start({ ended: true }))).toBe(true);
  });

  test('is asked for if no cell of this page has sent the request', () => {
    const cells = [
      {},
      { outputArea: { future: null } },
      { outputArea: { future: { msg: { header: { msg_id: 'r' } } } } }
    ];
    expect(runs(cells, 'r')).toBe(true);
    expect(runs(cells, 'q')).toBe(false);
  });
});
