import { expect, test } from 'vitest';
import type { FromKernel, FromView } from './protocol';
import { meshRow, snapshotOf } from './testing';
import widget from './widget';

class TestModel {
  sent: FromView[] = [];
  handlers = new Map<string, Set<(message: unknown) => void>>();
  constructor(readonly ranks: number[] = []) {}
  state = '';
  get(name: string) {
    return name === 'state' ? this.state : this.ranks;
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

const place = () => document.body.appendChild(document.createElement('div'));

test('views of one model share a conversation, which ends with the last', () => {
  const model = new TestModel();
  const ends = [place(), place()].map(el => widget.render({ model, el }));
  expect(model.sent.map(message => message.kind)).toEqual(['open']);
  ends[0]();
  expect(model.sent.length).toBe(1);
  ends[1]();
  expect(model.sent.map(message => message.kind)).toEqual(['open', 'close']);
  expect([...model.handlers.values()].every(handlers => handlers.size === 0)).toBe(true);
});

test('a page that the kernel cannot hear yet shows the state of the model', () => {
  const model = new TestModel();
  model.state = JSON.stringify(snapshotOf(2, { mesh: meshRow(2, { name: 'first' }) }));
  const el = place();
  const end = widget.render({ model, el });
  expect(el.textContent).toContain('first');
  expect(model.sent.map(message => message.kind)).toEqual(['open']);
  end();
});

test('the static picture is hidden while the live one shows the mesh', () => {
  const model = new TestModel();
  const hides = () =>
    [...document.head.querySelectorAll('style')].some(sheet => sheet.textContent?.startsWith('.monarch-mesh-a-b{'));
  const end = widget.render({ model, el: place() });
  expect(hides()).toBe(false);
  model.tell(snapshotOf(2, { mesh: meshRow(2, { uid: 'a:b' }) }));
  expect(hides()).toBe(true);
  end();
  expect(hides()).toBe(false);
});
