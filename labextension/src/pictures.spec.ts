import { Signal } from '@lumino/signaling';
import { beforeEach, expect, test } from 'vitest';
import { updatePicture, updatePictures } from './pictures';
import { DISPLAY } from './protocol';
import type { IKernelLink } from './tokens';

type Output = { type: string; data: Record<string, unknown>; metadata?: unknown };

/** As an output area's model keeps outputs. */
class Outputs {
  sets = 0;
  constructor(readonly list: Output[]) {}
  get length() {
    return this.list.length;
  }
  get(at: number) {
    return this.list[at];
  }
  set(at: number, { output_type, ...rest }: { output_type: string } & Omit<Output, 'type'>) {
    this.sets += 1;
    this.list[at] = { type: output_type, ...rest };
  }
}

const picture = (name: string, text: string) => `<div class="monarch-static" ${DISPLAY}="${name}">${text}</div>`;
const shown = (html: unknown): Output => ({ type: 'display_data', data: { 'text/html': html } });
const update = (name: string, text: string) => ({
  data: { 'text/html': picture(name, text), 'text/plain': text },
  metadata: {},
  transient: { display_id: name }
});

let outputs: Outputs;

beforeEach(() => {
  outputs = new Outputs([
    { type: 'stream', data: {} },
    shown(picture('a', 'old a')),
    // As a notebook file has it.
    shown(['<div class="monarch-static" ', `${DISPLAY}="b">old b</div>`])
  ]);
});

test('a picture of a saved notebook is found by its display id and updated', () => {
  expect(updatePicture(outputs as never, update('b', 'new b'))).toBe(true);
  expect(outputs.list[2]).toMatchObject({ type: 'display_data', data: { 'text/plain': 'new b' } });
  expect(outputs.list[1].data['text/html']).toContain('old a');
});

test('a picture that JupyterLab has updated is left alone, and so are displays of others', () => {
  outputs.list[1] = shown(picture('a', 'new a'));
  expect(updatePicture(outputs as never, update('a', 'new a'))).toBe(false);
  expect(updatePicture(outputs as never, update('c', 'new c'))).toBe(false);
  expect(outputs.sets).toBe(0);
});

test('each update of the kernel is looked for in the code cells of the notebook', () => {
  const iopubMessage = new Signal<object, unknown>({});
  const cells = [{ type: 'markdown' }, { type: 'code', outputs }];
  updatePictures({
    panel: { sessionContext: { iopubMessage }, content: { model: { cells } } }
  } as unknown as IKernelLink);
  const tell = (kind: string, content: object) => iopubMessage.emit({ header: { msg_type: kind }, content });
  tell('display_data', update('a', 'new a'));
  tell('update_display_data', { ...update('a', 'new a'), transient: {} });
  tell('update_display_data', { data: { 'text/html': '<b>of the user</b>' }, transient: { display_id: 'a' } });
  expect(outputs.sets).toBe(0);
  tell('update_display_data', update('a', 'new a'));
  tell('update_display_data', update('a', 'new a'));
  expect([outputs.sets, outputs.list[1].data['text/plain']]).toEqual([1, 'new a']);
});
