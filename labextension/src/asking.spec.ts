import { Signal } from '@lumino/signaling';
import { afterEach, expect, test, vi } from 'vitest';
import { ask } from './asking';
import { LATE, NOT_HEARD } from './session';
import { TestChannel } from './testing';
import type { IKernelLink, LinkState } from './tokens';
import { ENGLISH } from './view/trans';

class TestLink extends TestChannel {
  state: LinkState = 'live';
  changed = new Signal<this, void>(this);
  reconnected = new Signal<this, void>(this);
}

function asked(): [TestLink, ReturnType<typeof ask>, number] {
  const link = new TestLink();
  const outcome = ask(link as unknown as IKernelLink, 'mesh-1', 'interrupt', ENGLISH);
  return [link, outcome, (link.sent[0] as { id: number }).id];
}

afterEach(() => vi.useRealTimers());

test('an action without a view returns its own outcome', async () => {
  const [link, outcome, id] = asked();
  expect(link.sent).toMatchObject([{ kind: 'act', action: 'interrupt', ranks: [], uid: 'mesh-1' }]);
  link.tell(
    { kind: 'done', id: id + 1, ok: false, text: 'of another' },
    { kind: 'done', id, ok: true, text: 'stopped' }
  );
  expect(await outcome).toMatchObject({ ok: true, text: 'stopped' });
  expect(link.listeners).toBe(0);
});

test('an action ends with its kernel', async () => {
  const [link, outcome] = asked();
  link.changed.emit();
  link.state = 'dead';
  link.changed.emit();
  expect(await outcome).toMatchObject({ ok: false, text: 'The kernel has ended.' });
  expect(link.listeners).toBe(0);
});

test('an action whose answer was lost with the connection ends, and one whose answer was only late has it', async () => {
  vi.useFakeTimers();
  const [link, outcome] = asked();
  link.reconnected.emit();
  vi.advanceTimersByTime(LATE);
  expect(await outcome).toMatchObject({ ok: false, text: NOT_HEARD });
  const [other, late, id] = asked();
  other.reconnected.emit();
  vi.advanceTimersByTime(LATE - 1);
  other.tell({ kind: 'done', id, ok: true, text: 'stopped' });
  expect(await late).toMatchObject({ ok: true });
  expect([link.listeners, other.listeners]).toEqual([0, 0]);
});
