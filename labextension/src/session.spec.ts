import { afterEach, describe, expect, test, vi } from 'vitest';
import { ALIVE_SECONDS, VERSION } from './protocol';
import { FAILURE_STAYS, LATE, MeshSession, NOT_HEARD, NOTE_STAYS, SILENT, TAKEN } from './session';
import { patchOf, rankRow, snapshotOf, TestChannel } from './testing';

function live(uid = ''): [MeshSession, TestChannel] {
  const channel = new TestChannel();
  const session = new MeshSession(channel, uid);
  channel.tell(snapshotOf(4));
  return [session, channel];
}

afterEach(() => vi.useRealTimers());

describe('MeshSession', () => {
  test('differs from others behind the same comm', () => {
    const channel = new TestChannel();
    const views = [new MeshSession(channel), new MeshSession(channel)];
    expect(new Set(channel.sent.map(message => (message as { view?: string }).view)).size).toBe(views.length);
  });

  test('says that an action waits which the kernel has not taken', () => {
    vi.useFakeTimers();
    const [session, channel] = live();
    session.act('interrupt', []);
    const { id } = channel.sent.at(-1) as { id: number };
    vi.advanceTimersByTime(TAKEN - 1);
    expect(session.waits).toBe(null);
    vi.advanceTimersByTime(1);
    expect(session.waits).toBe('cell');
    channel.tell({ kind: 'heard', uid: '' });
    expect(session.waits).toBe('kernel');
    channel.tell({ kind: 'taken', id });
    expect([session.waits, session.pending.size]).toEqual([null, 1]);
    channel.tell({ kind: 'done', id, ok: true, text: 'stopped' });
    expect(session.pending.size).toBe(0);
  });

  test('opens at once and is live with the snapshot', () => {
    const channel = new TestChannel();
    const session = new MeshSession(channel, 'mesh-1');
    expect(channel.sent).toEqual([{ kind: 'open', version: VERSION, uid: 'mesh-1', view: expect.any(String) }]);
    expect(session.link).toBe('connecting');
    channel.tell(snapshotOf(4));
    expect([session.link, session.model.ranks.length]).toEqual(['live', 4]);
  });

  test('asks again once after a gap, and continues with the new snapshot', () => {
    const [session, channel] = live();
    channel.tell(patchOf(7), patchOf(8), patchOf(9));
    expect(channel.kinds).toEqual(['open', 'open']);
    channel.tell(snapshotOf(4, { number: 10 }), patchOf(10), patchOf(11));
    expect(session.model.number).toBe(12);
    expect(channel.kinds).toEqual(['open', 'open']);
  });

  test('ignores messages about other meshes', () => {
    const [session, channel] = live('mesh-1');
    channel.tell(patchOf(1, { uid: 'mesh-2' }), { kind: 'gone', uid: 'mesh-2', reason: 'x' });
    expect([session.link, channel.kinds.length]).toEqual(['live', 1]);
  });

  test('pins one rank, and ignores details of another', () => {
    const [session, channel] = live();
    session.pin(2);
    expect(channel.sent.at(-1)).toMatchObject({ kind: 'pin', rank: 2, norms: false });
    const details = (rank: number) => ({
      kind: 'details' as const,
      uid: 'mesh-1',
      rank,
      stack: [],
      lines: [],
      tensors: []
    });
    channel.tell(details(1));
    expect(session.details).toBeNull();
    channel.tell(details(2));
    expect(session.details?.rank).toBe(2);
    session.askNorms();
    expect(channel.sent.at(-1)).toMatchObject({ kind: 'pin', rank: 2, norms: true });
  });

  test('pins again after the connection was lost', () => {
    const [session, channel] = live();
    session.pin(1);
    session.reopen();
    expect(channel.kinds).toEqual(['open', 'pin', 'open', 'pin']);
  });

  test('shows the result of its own actions only', () => {
    const [session, channel] = live();
    session.act('interrupt', [1]);
    const { id } = channel.sent.at(-1) as { id: number };
    channel.tell({ kind: 'done', id: id + 1, ok: true, text: 'not ours' });
    expect([session.note, session.pending.size]).toEqual([null, 1]);
    channel.tell({ kind: 'done', id, ok: false, text: 'rank 1 has ended' });
    expect([session.note, session.pending.size]).toEqual([{ ok: false, text: 'rank 1 has ended' }, 0]);
  });

  test('lets the result of an action go after a while, and with the next action; stacks stay', () => {
    vi.useFakeTimers();
    const [session, channel] = live();
    const act = (action: 'pause' | 'stacks', ok: boolean, text: string) => {
      session.act(action, []);
      const { id } = channel.sent.at(-1) as { id: number };
      channel.tell({ kind: 'done', id, ok, text });
    };
    act('pause', true, 'paused ranks 0-3');
    vi.advanceTimersByTime(NOTE_STAYS - 1);
    expect(session.note?.text).toBe('paused ranks 0-3');
    vi.advanceTimersByTime(1);
    expect(session.note).toBeNull();
    act('pause', false, 'rank 1 does not answer');
    vi.advanceTimersByTime(FAILURE_STAYS - 1);
    expect(session.note?.ok).toBe(false);
    session.act('pause', []);
    expect(session.note).toBeNull();
    act('stacks', true, 'ranks 0-3:\n  cell [2] line 3');
    vi.advanceTimersByTime(10 * FAILURE_STAYS);
    expect(session.note?.ok).toBe(true);
    session.dismiss();
    expect(session.note).toBeNull();
  });

  test('forgets a pause, and what it said of it, once no rank is paused any more', () => {
    const [session, channel] = live();
    const say = (number: number, state: 'running' | 'paused') =>
      channel.tell(snapshotOf(4, { number, ranks: [rankRow(0, { state })] }));
    session.act('pause', []);
    const { id } = channel.sent.at(-1) as { id: number };
    channel.tell({ kind: 'done', id, ok: true, text: 'paused rank 0; the Resume button lets it continue' });
    say(2, 'running');
    // It is in C code, and pauses later.
    expect([session.holds, session.note?.ok]).toEqual([true, true]);
    say(3, 'paused');
    expect([session.holds, session.note?.ok]).toEqual([true, true]);
    say(4, 'running');
    expect([session.holds, session.note]).toEqual([false, null]);
    session.close();
  });

  test('gives up an action whose answer was lost with the connection', () => {
    vi.useFakeTimers();
    const [session] = live();
    session.act('interrupt', []);
    session.reopen();
    session.act('stacks', []);
    vi.advanceTimersByTime(LATE);
    expect([...session.pending.values()]).toEqual(['stacks']);
    expect(session.note).toEqual({ ok: false, text: NOT_HEARD });
    session.close();
  });

  test('says that it is there while it is live, and nothing once closed', () => {
    vi.useFakeTimers();
    const [session, channel] = live();
    vi.advanceTimersByTime(2 * ALIVE_SECONDS * 1000);
    expect(channel.kinds).toEqual(['open', 'alive', 'alive']);
    session.close();
    vi.advanceTimersByTime(ALIVE_SECONDS * 1000);
    expect(channel.kinds).toEqual(['open', 'alive', 'alive', 'close']);
    expect(channel.listeners).toBe(0);
  });

  test('says that the kernel is silent once it does not answer any more, and is live again when it does', () => {
    vi.useFakeTimers();
    const [session, channel] = live();
    const turn = ALIVE_SECONDS * 1000;
    // Some kernels answer when the running cell has ended.
    vi.advanceTimersByTime(turn + LATE);
    expect(session.link).toBe('live');
    channel.tell({ kind: 'heard', uid: 'mesh-1' });
    vi.advanceTimersByTime(turn - LATE);
    channel.tell({ kind: 'heard', uid: 'mesh-1' });
    vi.advanceTimersByTime(turn - 1);
    expect(session.link).toBe('live');
    vi.advanceTimersByTime(1 + LATE);
    expect([session.link, session.reason, session.model.ranks.length]).toEqual(['lost', SILENT, 4]);
    channel.tell({ kind: 'heard', uid: 'mesh-1' }, snapshotOf(5));
    expect([session.link, session.model.ranks.length, channel.kinds.at(-1)]).toEqual(['live', 5, 'open']);
    session.close();
  });

  test('says that the first answer has not come, as in a file with saved widgets', () => {
    vi.useFakeTimers();
    const channel = new TestChannel();
    const session = new MeshSession(channel);
    vi.advanceTimersByTime(LATE);
    expect([session.link, session.slow]).toEqual(['connecting', true]);
    channel.tell(snapshotOf(4));
    expect([session.link, session.slow]).toEqual(['live', false]);
    session.close();
  });

  test('is silent at once where the comm refuses messages', () => {
    const [session, channel] = live();
    channel.send = () => {
      throw new Error('Cannot send');
    };
    session.act('interrupt', []);
    expect([session.link, session.pending.size]).toEqual(['lost', 0]);
    session.close();
  });

  test('keeps the last state when the kernel is gone', () => {
    const [session] = live();
    session.lose('the kernel has ended');
    expect([session.link, session.reason, session.model.ranks.length]).toEqual(['lost', 'the kernel has ended', 4]);
  });
});
