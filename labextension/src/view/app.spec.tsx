import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { MeshSession } from '../session';
import { meshRow, patchOf, rankRow, snapshotOf, TestChannel } from '../testing';
import { mountMesh } from './mount';

let channel: TestChannel;
let session: MeshSession;
let place: HTMLElement;
let unmount: () => void;

beforeEach(() => {
  // happy-dom lays nothing out.
  vi.spyOn(HTMLElement.prototype, 'clientWidth', 'get').mockReturnValue(800);
  channel = new TestChannel();
  session = new MeshSession(channel);
  place = document.body.appendChild(document.createElement('div'));
  unmount = mountMesh(place, session);
});

afterEach(() => {
  unmount();
  session.close();
  place.remove();
  vi.restoreAllMocks();
});

const tile = (rank: number) => place.querySelector<HTMLElement>(`.mk-tile[data-rank="${rank}"]`)!;
const button = (text: string) => [...place.querySelectorAll('button')].find(each => each.textContent === text)!;
const isOff = (each: Element) => each.getAttribute('aria-disabled') === 'true';
const press = (target: Element, key: string) =>
  target.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
const seen = async (check: () => void) => vi.waitFor(check, { timeout: 3000 });
const shows = async (text: string) => seen(() => expect(place.textContent).toContain(text));

async function start(count = 4, change = {}): Promise<void> {
  channel.tell(snapshotOf(count, change));
  await seen(() => expect(tile(count - 1)).toBeTruthy());
}

const running = (count: number) =>
  Array.from({ length: count }, (_, rank) => rankRow(rank, { state: 'running', call: 'cell [4]', load: 0.05 }));

describe('the view of a mesh', () => {
  test('says that it waits until the kernel answers', async () => {
    await shows('Waiting for the kernel…');
  });

  test('has a tile for each rank, which follows its state', async () => {
    await start();
    channel.tell(patchOf(1, { ranks: [rankRow(2, { state: 'running', load: 1, place: 'cell [4] line 7' })] }));
    await seen(() => expect(tile(2).className).toContain('mk-running mk-load4'));
    expect(tile(2).textContent).toContain('cell [4] line 7');
    expect(tile(1).className).toContain('mk-idle');
  });

  test('is a grid with one tab stop and arrow keys', async () => {
    await start(8);
    expect(place.querySelector('[role=grid]')).toBeTruthy();
    expect(place.querySelectorAll('.mk-tile[tabindex="0"]').length).toBe(1);
    tile(0).focus();
    press(tile(0), 'ArrowRight');
    expect(document.activeElement).toBe(tile(1));
    press(tile(1), 'ArrowDown');
    const below = Number((document.activeElement as HTMLElement).dataset.rank);
    expect(below).toBeGreaterThan(2);
    press(tile(below), 'Home');
    press(document.activeElement!, 'End');
    expect(place.querySelectorAll('.mk-tile[tabindex="0"]').length).toBe(1);
  });

  test('Enter pins a rank, Escape unpins it', async () => {
    await start();
    press(tile(3), 'Enter');
    expect(channel.sent.at(-1)).toMatchObject({ kind: 'pin', rank: 3 });
    await seen(() => expect(place.querySelector('.mk-details h4')?.textContent).toBe('Rank 3'));
    await seen(() => expect(tile(3).getAttribute('aria-selected')).toBe('true'));
    press(tile(3), 'Escape');
    await seen(() => expect(place.querySelector('.mk-details')).toBeNull());
  });

  test('details have figures, stack, output and tensors', async () => {
    await start();
    session.pin(1);
    channel.tell({
      kind: 'details',
      uid: 'mesh-1',
      rank: 1,
      stack: ['File "cell [4]", line 7'],
      lines: [{ ranks: [1], stream: 'stderr', text: 'a warning' }],
      tensors: [{ name: 'weight', shape: [2, 3], dtype: 'torch.float32', device: 'cpu', norm: null, nans: 4 }]
    });
    await shows('Waiting for a call.');
    channel.tell(patchOf(1, { ranks: [rankRow(1, { state: 'running', call: 'cell [4]' })] }));
    for (const text of ['File "cell [4]", line 7', 'a warning', 'weight', '2 × 3', 'float32']) {
      await shows(text);
    }
    expect(place.querySelector('td.mk-bad')?.textContent).toBe('4');
    button('Compute all norms').click();
    expect(channel.sent.at(-1)).toMatchObject({ kind: 'pin', norms: true });
  });

  test('buttons act on all ranks, or on the pinned one, and show the result', async () => {
    await start(4, { ranks: running(4) });
    await seen(() => button('Interrupt').click());
    expect(channel.sent.at(-1)).toMatchObject({ kind: 'act', action: 'interrupt', ranks: [] });
    const { id } = channel.sent.at(-1) as { id: number };
    channel.tell({ kind: 'done', id, ok: true, text: 'interrupted 4 ranks' });
    await shows('interrupted 4 ranks');
    session.pin(2);
    await seen(() => expect(button('Dump stacks').getAttribute('aria-label')).toContain('rank 2'));
    button('Dump stacks').click();
    expect(channel.sent.at(-1)).toMatchObject({ action: 'stacks', ranks: [2] });
  });

  test('buttons are off while they would do nothing, and say why', async () => {
    await start();
    const off = () => [...place.querySelectorAll<HTMLButtonElement>('.mk-actions > button')].filter(isOff);
    await seen(() => expect(off().map(each => each.textContent)).toEqual(['Interrupt', 'Resume', 'Heal']));
    expect(off().map(each => each.title)).toEqual([
      'Nothing is running on these ranks',
      'None of these ranks is paused',
      'No rank is dead'
    ]);
    const paused = [rankRow(0, { state: 'failed' }), rankRow(1, { state: 'paused', call: 'cell [4]' })];
    channel.tell(patchOf(1, { ranks: paused }));
    await seen(() => expect(off()).toEqual([]));
    session.pin(0);
    await seen(() =>
      expect(off().map(each => each.textContent)).toEqual(['Interrupt', 'Pause', 'Resume', 'Kill', 'Dump stacks'])
    );
    session.pin(1);
    await seen(() => expect(off().map(each => each.textContent)).toEqual(['Pause']));
  });

  test('a button that is off does nothing and keeps the focus', async () => {
    await start();
    await seen(() => expect(isOff(button('Heal'))).toBe(true));
    const sent = channel.sent.length;
    button('Heal').focus();
    button('Heal').click();
    expect(channel.sent.length).toBe(sent);
    button('Dump stacks').focus();
    button('Dump stacks').click();
    await seen(() => expect(isOff(button('Dump stacks'))).toBe(true));
    expect(document.activeElement).toBe(button('Dump stacks'));
    button('Dump stacks').click();
    expect(channel.sent.length).toBe(sent + 1);
  });

  test('the focus stays in the view when what had it goes', async () => {
    await start();
    button('Kill').focus();
    button('Kill').click();
    await seen(() => expect(document.activeElement).toBe(button('Cancel')));
    press(document.activeElement!, 'Escape');
    await seen(() => expect(document.activeElement).toBe(button('Kill')));
    tile(2).click();
    await shows('Asking the rank');
    const close = place.querySelector<HTMLElement>('.mk-details .mk-close')!;
    close.focus();
    press(close, 'Escape');
    await seen(() => expect(place.querySelector('.mk-details')).toBe(null));
    expect(document.activeElement).toBe(tile(2));
    session.act('stacks', []);
    const { id } = channel.sent.at(-1) as { id: number };
    channel.tell({ kind: 'done', id, ok: true, text: 'rank 0:\n  file.py:1 in f' });
    await seen(() => expect(place.querySelector('.mk-note .mk-close')).toBeTruthy());
    place.querySelector<HTMLElement>('.mk-note .mk-close')!.click();
    await seen(() => expect(place.querySelector('.mk-note')).toBe(null));
    expect(document.activeElement).toBe(tile(2));
  });

  test('an action that waits for the running cell says so', async () => {
    await start();
    vi.useFakeTimers();
    session.act('stacks', []);
    vi.advanceTimersByTime(2000);
    vi.useRealTimers();
    await shows('waiting for the running cell to end');
  });

  test('a pause that begins later can be taken back', async () => {
    await start();
    await seen(() => expect(isOff(button('Resume'))).toBe(true));
    button('Pause').click();
    const { id } = channel.sent.at(-1) as { id: number };
    channel.tell({ kind: 'done', id, ok: true, text: 'no rank is paused yet' });
    await seen(() => expect(isOff(button('Resume'))).toBe(false));
    button('Resume').click();
    expect(channel.sent.at(-1)).toMatchObject({ action: 'resume', ranks: [] });
    await seen(() => expect(isOff(button('Resume'))).toBe(true));
  });

  test('a tile says that its figure is the load', async () => {
    await start(2, { ranks: running(2) });
    await seen(() => expect(tile(0).querySelector('.mk-more')?.textContent).toMatch(/ · load 5 %$/));
  });

  test('output keeps to its end, and stays where a person has scrolled up to', async () => {
    vi.spyOn(HTMLElement.prototype, 'clientHeight', 'get').mockReturnValue(100);
    const height = vi.spyOn(HTMLElement.prototype, 'scrollHeight', 'get').mockReturnValue(500);
    await start();
    session.pin(1);
    const tell = (text: string) =>
      channel.tell({
        kind: 'details',
        uid: 'mesh-1',
        rank: 1,
        stack: [],
        lines: [{ ranks: [1], stream: 'stdout', text }],
        tensors: []
      });
    tell('one');
    await shows('one');
    const box = () => place.querySelector<HTMLElement>('.mk-code')!;
    expect(box().scrollTop).toBe(500);
    // The number of lines is the same.
    height.mockReturnValue(600);
    tell('two');
    await shows('two');
    expect(box().scrollTop).toBe(600);
    box().scrollTop = 200;
    box().dispatchEvent(new Event('scroll'));
    tell('three');
    await shows('Show newer lines');
    expect([box().textContent, box().scrollTop]).toEqual(['two', 200]);
    height.mockReturnValue(700);
    button('Show newer lines').click();
    await shows('three');
    expect(box().scrollTop).toBe(700);
    box().scrollTop = 200;
    box().dispatchEvent(new Event('scroll'));
    tell('four');
    await shows('Show newer lines');
    box().scrollTop = 590;
    box().dispatchEvent(new Event('scroll'));
    await shows('four');
    expect(place.textContent).not.toContain('Show newer lines');
  });

  test('only actions that the kernel offers have a button', async () => {
    await start(2, { mesh: meshRow(2, { actions: ['interrupt'] }) });
    await seen(() => expect(button('Interrupt')).toBeTruthy());
    expect(button('Kill')).toBeUndefined();
  });

  test('killing asks first, names the cost, and can be left', async () => {
    await start();
    await seen(() => button('Kill').click());
    await shows('Kill all 4 ranks?');
    expect(place.textContent).toContain('their variables and their GPU memory are lost');
    expect(channel.kinds).not.toContain('act');
    button('Cancel').click();
    await seen(() => expect(place.querySelector('[role=alertdialog]')).toBeNull());
    button('Kill').click();
    await seen(() => button('Kill all 4 ranks').click());
    expect(channel.sent.at(-1)).toMatchObject({ kind: 'act', action: 'kill', ranks: [] });
  });

  test('Shift-click selects several ranks for an action', async () => {
    await start(4, { ranks: running(4) });
    for (const rank of [1, 3]) {
      tile(rank).dispatchEvent(new MouseEvent('click', { bubbles: true, shiftKey: true }));
    }
    await seen(() => expect(button('Interrupt').getAttribute('aria-label')).toBe('Interrupt: ranks 1,3'));
    button('Interrupt').click();
    expect(channel.sent.at(-1)).toMatchObject({ ranks: [1, 3] });
  });

  test('the legend counts states, and makes one stand out', async () => {
    await start(4, { ranks: [0, 1, 2, 3].map(rank => rankRow(rank, { state: rank ? 'idle' : 'failed' })) });
    await seen(() => expect(place.querySelector('.mk-legend')?.textContent).toContain('idle 3'));
    const chip = [...place.querySelectorAll<HTMLElement>('.mk-chip')].find(each => each.textContent?.includes('dead'))!;
    chip.click();
    await seen(() => expect(place.querySelector<HTMLElement>('.mk-grid')?.dataset.only).toBe('failed'));
    expect(chip.getAttribute('aria-pressed')).toBe('true');
    channel.tell(patchOf(1, { ranks: [rankRow(0, { state: 'idle' })] }));
    await seen(() => expect(place.querySelector<HTMLElement>('.mk-grid')?.dataset.only).toBe(''));
    expect(chip.getAttribute('aria-pressed')).toBe('true');
  });

  test('tells screen readers of a failure, once', async () => {
    await start();
    channel.tell(patchOf(1, { ranks: [rankRow(2, { state: 'failed', reason: 'out of memory' })] }));
    await seen(() =>
      expect(place.querySelector('[aria-live=polite]')?.textContent).toBe('rank 2: dead. out of memory')
    );
  });

  test('shows progress with the slowest and the fastest rank', async () => {
    const bar = {
      bar: 'epoch 2',
      unit: 'batches',
      ranks: [0, 1, 2, 3],
      done: [50, 55, 45, 40],
      total: [100],
      left: [0, 1, 2, 3],
      started: 1000
    };
    await start(4, { bars: [bar] });
    await shows('slowest: rank 3, fastest: rank 1 at 55');
    expect(place.querySelector('[role=progressbar]')?.getAttribute('aria-valuenow')).toBe('40');
  });

  test('drops the bar of work that ended some seconds ago', async () => {
    const bar = { unit: 'ranks', ranks: [], done: [4], total: [4], left: [], started: 990, together: true };
    const bars = [
      { ...bar, bar: 'start', ended: 1000 },
      { ...bar, bar: 'heal', ended: 1009 },
      { ...bar, bar: 'epoch', done: [3], ended: 1009 }
    ];
    await start(4, { bars });
    await shows('done in 19 s');
    await shows('stopped after 19 s');
    expect([...place.querySelectorAll('.mk-bar-name')].map(each => each.textContent)).toEqual(['heal', 'epoch']);
    // Its clock stops, so that it would stay.
    session.lose('The kernel has ended.');
    await seen(() => expect(place.textContent).not.toContain('done in 19 s'));
  });

  test('says which ranks a call still runs on, and where it failed', async () => {
    const call = { call: 1, title: 'cell [4]', cell: 4, ranks: [0, 1, 2, 3], left: [2, 3], started: 1000 };
    await start(4, {
      calls: [call, { ...call, call: 2, ended: 1004, left: [], errors: { 1: 'ValueError: x' } }]
    });
    await shows('running on ranks 2-3; 2 of 4 finished');
    await shows('failed on rank 1: ValueError: x');
    channel.tell(patchOf(1, { calls: [{ ...call, waits: 'stuck: rank 2 waits for rank 0' }] }));
    await shows('2 of 4 finished · stuck: rank 2 waits for rank 0');
    channel.tell(patchOf(2, { calls: [{ ...call, left: [], ended: 1004, stopped: [2] }] }));
    await seen(() => expect(place.textContent).not.toContain('stuck'));
  });

  test('a call that was stopped has not failed, and ranks that were freed are no cause', async () => {
    const call = { title: 'cell [4]', cell: 4, ranks: [0, 1, 2, 3], left: [], started: 1000, ended: 1004 };
    const stopped = { ...call, call: 1, stopped: [0, 1, 2, 3] };
    const failed = { ...call, call: 2, started: 1005, ended: 1008, errors: { 1: 'ValueError: x' }, stopped: [0, 2, 3] };
    await start(4, { calls: [stopped] });
    await shows('cell [4] stopped after 4 s');
    expect(place.querySelector('.mk-calls .mk-bad')).toBeNull();
    channel.tell(patchOf(1, { calls: [failed] }));
    await shows('ended after 3 s · failed on rank 1: ValueError: x');
    // A later one has ended well.
    channel.tell(patchOf(2, { calls: [{ ...call, call: 3, started: 1010, ended: 1011 }] }));
    await seen(() => expect(place.querySelector('.mk-calls')).toBeNull());
  });

  test('has a chart for each metric and a timeline', async () => {
    const points = [0, 1].map(rank => ({ name: 'loss', rank, steps: [1, 2], values: [0.5, 0.25 + rank] }));
    await start(2, { points, spans: [{ rank: 0, state: 'running', begin: 1005 }] });
    await shows('step 2: mean 0.75 (rank 0: 0.25, rank 1: 1.25)');
    expect(place.querySelectorAll('canvas[role=img][aria-label]').length).toBe(2);
  });

  test('a failed rank has no stack to show', async () => {
    await start(4, { ranks: [0, 1, 2, 3].map(rank => rankRow(rank, { state: rank === 1 ? 'failed' : 'idle' })) });
    session.pin(1);
    const empty = { uid: 'mesh-1', stack: [], lines: [], tensors: [] };
    channel.tell({ kind: 'details', rank: 1, note: 'rank 1 is dead; heal replaces it', ...empty });
    await shows('rank 1 is dead');
    expect(place.textContent).not.toContain('Stack of the main thread');
  });

  test('says why when the mesh has ended, and offers no action', async () => {
    await start();
    channel.tell(patchOf(1, { mesh: meshRow(4, { ended: 1010, reason: 'rank 2 died' }) }));
    await shows('The mesh has ended: rank 2 died');
    expect(button('Interrupt')).toBeUndefined();
  });

  test('says that the kernel is gone, and keeps the last state', async () => {
    await start();
    session.lose('');
    await shows('The kernel is not running.');
    expect(tile(3)).toBeTruthy();
  });

  test('a pinned rank stays marked and focused when tiles are made again', async () => {
    await start(4);
    tile(0).focus();
    press(tile(0), 'ArrowRight');
    press(tile(1), 'ArrowRight');
    press(tile(2), 'Enter');
    await seen(() => expect(tile(2).className).toContain('mk-pinned'));
    const before = tile(2);
    channel.tell(snapshotOf(4, { number: 5 }));
    // At once: texts and marks that follow later would make the view flicker.
    await new Promise<void>(made => {
      const look = () => (tile(2) === before ? setTimeout(look, 0) : made());
      look();
    });
    expect(tile(2).className).toContain('mk-pinned');
    expect(document.activeElement).toBe(tile(2));
  });

  test('a new shape of the mesh makes new tiles', async () => {
    await start(4);
    channel.tell(snapshotOf(6, { number: 2 }));
    await seen(() => expect(tile(5)).toBeTruthy());
  });
});

test('the bar of a rank that died in the middle has no time left', async () => {
  const bar = { bar: 'train', unit: 'it', ranks: [0, 1], done: [31, 29], total: [100], left: [0, 1], started: 1000 };
  const call = { call: 1, title: 'cell [5]', cell: 5, ranks: [0, 1], left: [0], started: 1000 };
  await start(2, { bars: [bar], calls: [call] });
  await shows('left');
  channel.tell(patchOf(1, { calls: [{ ...call, left: [], ended: 1009, errors: { 1: 'was killed' } }] }));
  await shows('stopped after 9 s');
  expect(place.querySelector('.mk-bar-text')!.textContent).not.toContain('left');
});

describe('the view of a slice', () => {
  beforeEach(async () => {
    unmount();
    session.close();
    session = new MeshSession(channel, '', [1, 3]);
    unmount = mountMesh(place, session);
    channel.tell(
      snapshotOf(4, {
        ranks: [0, 1, 2, 3].map(rank => rankRow(rank, { state: rank < 2 ? 'idle' : 'failed' })),
        calls: [
          { call: 1, title: 'cell [5]', cell: 5, ranks: [0, 2], left: [0, 2], started: 1000 },
          { call: 2, title: 'cell [6]', cell: 6, ranks: [0, 1, 2], left: [0, 1], started: 1000 }
        ]
      })
    );
    await seen(() => expect(tile(3)).toBeTruthy());
  });

  test('shows its ranks, and what runs on them', async () => {
    await shows('ranks 1,3 of 4');
    await shows('cell [6]');
    expect([...place.querySelectorAll<HTMLElement>('.mk-tile')].map(each => each.dataset.rank)).toEqual(['1', '3']);
    expect(place.querySelector('.mk-legend')!.textContent).toMatch(/idle 1.*dead 1/);
    expect(place.textContent).not.toContain('cell [5]');
    channel.tell(
      patchOf(1, {
        ranks: [rankRow(2, { state: 'running' }), rankRow(3, { state: 'running' })],
        calls: [{ call: 2, title: 'cell [6]', cell: 6, ranks: [0, 1, 2], left: [0], started: 1000 }]
      })
    );
    await seen(() => expect(place.querySelector('.mk-legend')!.textContent).toMatch(/running 1/));
    expect(place.textContent).not.toContain('cell [6]');
  });

  test('moves between its ranks by keys, and acts on them alone', async () => {
    tile(1).focus();
    press(tile(1), 'ArrowRight');
    expect(document.activeElement).toBe(tile(3));
    await seen(() => expect(button('Dump stacks')).toBeTruthy());
    button('Dump stacks').click();
    expect(channel.sent.at(-1)).toMatchObject({ kind: 'act', action: 'stacks', ranks: [1, 3] });
  });
});
