import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { MeshSession } from '../../session';
import { snapshotOf, TestChannel } from '../../testing';
import { LogsModel, parseRanks } from './model';

let channel: TestChannel;
let session: MeshSession;

beforeEach(() => {
  vi.useFakeTimers();
  channel = new TestChannel();
  session = new MeshSession(channel, 'mesh-1');
  channel.tell(snapshotOf(4));
});

afterEach(() => {
  session.close();
  vi.useRealTimers();
});

test.each([
  ['', []],
  ['3', [3]],
  ['0-2, 7', [0, 1, 2, 7]],
  ['2 1', [1, 2]],
  ['all', null],
  ['0-9999999', null],
  ['1-', null]
])('ranks %j are %j', (text, ranks) => {
  expect(parseRanks(text)).toEqual(ranks);
});

test('reads the newest lines that match, again each second', () => {
  const model = new LogsModel(session, 100, () => {});
  model.filter({ ranks: '1-2', text: 'loss', stream: 'stdout' });
  const last = channel.sent.at(-1);
  expect(last).toEqual({ kind: 'read_logs', ranks: [1, 2], text: 'loss', stream: 'stdout', most: 100, uid: 'mesh-1' });
  const count = channel.sent.length;
  vi.advanceTimersByTime(2000);
  expect(channel.sent.length).toBe(count + 2);
  model.close();
  vi.advanceTimersByTime(2000);
  expect(channel.sent.length).toBe(count + 2);
});

test('takes the lines of its mesh only', () => {
  const model = new LogsModel(session, 100, () => {});
  const lines = [{ ranks: [1], stream: 'stdout', text: 'hello' }];
  channel.tell({ kind: 'logs', uid: 'mesh-2', lines, more: true });
  expect([model.ready, model.lines]).toEqual([false, []]);
  channel.tell({ kind: 'logs', uid: 'mesh-1', lines, more: true });
  expect([model.ready, model.more, model.lines]).toEqual([true, true, lines]);
  model.close();
});

test('asks for nothing while the ranks are written wrongly', () => {
  const model = new LogsModel(session, 100, () => {});
  const count = channel.sent.length;
  model.filter({ ranks: 'x' });
  expect(channel.sent.length).toBe(count);
  model.close();
});
