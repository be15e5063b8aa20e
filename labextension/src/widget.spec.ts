import { afterEach, expect, test, vi } from 'vitest';
import { tellEnded } from './ended';
import type { FromKernel, FromView } from './protocol';
import { meshRow, snapshotOf } from './testing';
import makeWidget, { RESTS } from './widget';

/** As anywidget's: each view has an object of its own, whose handlers end with the view. */
class TestModel {
  sent: FromView[] = [];
  handlers = new Map<string, Set<(message: unknown) => void>>();
  constructor(
    readonly ranks: number[] = [],
    readonly picture = ''
  ) {}
  state = '';
  get(name: string) {
    return { state: this.state, picture: this.picture, ranks: this.ranks }[name];
  }
  send(message: unknown) {
    this.sent.push(message as FromView);
  }
  on(event: string, handler: (message: unknown) => void) {
    this.handlers.set(event, (this.handlers.get(event) ?? new Set()).add(handler));
  }
  off(event: string, handler: (message: unknown) => void) {
    this.handlers.get(event)?.delete(handler);
  }
  tell(message: FromKernel) {
    for (const handler of this.handlers.get('msg:custom') ?? []) {
      handler(message);
    }
  }
}

interface Made {
  model: TestModel;
  show(el?: HTMLElement): () => void;
  end(): void;
}

function make(model = new TestModel()): Made {
  const widget = makeWidget();
  const proxy = (own: [string, (message: unknown) => void][]) => ({
    get: model.get.bind(model),
    send: model.send.bind(model),
    on: (event: string, handler: (message: unknown) => void) => {
      own.push([event, handler]);
      model.on(event, handler);
    },
    off: model.off.bind(model)
  });
  const end = widget.initialize({ model: proxy([]) });
  const show = (el = place()) => {
    const own: [string, (message: unknown) => void][] = [];
    const hide = widget.render({ model: proxy(own), el });
    return () => {
      for (const [event, handler] of own) {
        model.off(event, handler);
      }
      hide();
    };
  };
  return { model, show, end };
}

/** Tells of elements that leave the page and come back. */
const observers: (() => void)[] = [];
vi.stubGlobal(
  'ResizeObserver',
  class {
    constructor(private readonly handler: () => void) {}
    observe() {
      observers.push(this.handler);
    }
    disconnect() {}
  }
);
const resize = () => {
  for (const handler of observers) {
    handler();
  }
};

afterEach(() => vi.useRealTimers());

const place = () => document.body.appendChild(document.createElement('div'));

test('views of one model share a conversation, which ends with the last', () => {
  const { model, show } = make();
  const ends = [show(), show()];
  expect(model.sent.map(message => message.kind)).toEqual(['open']);
  // The first one has begun it.
  ends[0]();
  expect(model.sent.length).toBe(1);
  expect(model.handlers.get('msg:custom')?.size).toBe(1);
  ends[1]();
  expect(model.sent.map(message => message.kind)).toEqual(['open', 'close']);
  expect([...model.handlers.values()].every(handlers => handlers.size === 0)).toBe(true);
});

test('a view that is shown again after the last has ended has a new conversation', () => {
  const { model, show, end } = make();
  show()();
  show();
  expect(model.sent.map(message => message.kind)).toEqual(['open', 'close', 'open']);
  end();
  expect([...model.handlers.values()].every(handlers => handlers.size === 0)).toBe(true);
});

test('a conversation rests while no view is on the page, and continues when one is', async () => {
  vi.useFakeTimers();
  const { model, show } = make();
  const els = [place(), place()];
  els.forEach(show);
  model.tell(snapshotOf(2));
  model.tell({ kind: 'heard', uid: '' });
  const kinds = () => model.sent.map(message => message.kind);
  const sent = kinds().length;
  els[0].remove();
  resize();
  vi.advanceTimersByTime(RESTS);
  expect(kinds().length).toBe(sent);
  els[1].remove();
  resize();
  vi.advanceTimersByTime(RESTS);
  expect(kinds().slice(sent)).toEqual(['close']);
  // It says nothing more, and takes nothing.
  vi.advanceTimersByTime(120_000);
  model.tell(snapshotOf(3));
  expect(kinds().slice(sent)).toEqual(['close']);
  document.body.append(els[0]);
  resize();
  expect(kinds().slice(sent)).toEqual(['close', 'open']);
  model.tell(snapshotOf(4));
  vi.useRealTimers();
  els.push(place());
  show(els[2]);
  await vi.waitFor(() => expect(els[2].textContent).toContain('4 ranks'));
});

test('a conversation continues where the kernel may answer late', () => {
  vi.useFakeTimers();
  const { model, show } = make();
  const el = place();
  show(el);
  model.tell(snapshotOf(2));
  el.remove();
  resize();
  vi.advanceTimersByTime(RESTS);
  expect(model.sent.map(message => message.kind)).toEqual(['open']);
});

test('a page that the kernel cannot hear yet shows the state of the model', () => {
  const { model, show } = make();
  model.state = JSON.stringify(snapshotOf(2, { mesh: meshRow(2, { name: 'first' }) }));
  const el = place();
  const end = show(el);
  expect(el.textContent).toContain('first');
  expect(model.sent.map(message => message.kind)).toEqual(['open']);
  end();
});

test('the static pictures of the widget are hidden while it shows the mesh', () => {
  const { model, show } = make(new TestModel([], 'monarch-live-1'));
  const hides = () =>
    [...document.head.querySelectorAll('style')].some(sheet => sheet.textContent?.startsWith('.monarch-live-1{'));
  const end = show();
  expect(hides()).toBe(false);
  model.tell(snapshotOf(2));
  expect(hides()).toBe(true);
  end();
  expect(hides()).toBe(false);
});

test('a view whose kernel has ended says so, and its clock stops', async () => {
  const { model, show } = make();
  const el = place();
  show(el);
  model.tell(snapshotOf(2, { mesh: meshRow(2, { uid: 'mine' }) }));
  await vi.waitFor(() => expect(el.textContent).toContain('up for'));
  tellEnded(['another']);
  tellEnded(['mine']);
  await vi.waitFor(() => expect(el.textContent).toContain('The kernel has ended or was restarted'));
  expect(el.textContent).not.toContain('up for');
});
