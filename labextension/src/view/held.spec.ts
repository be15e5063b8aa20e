import { expect, test } from 'vitest';
import type { LogLine } from '../protocol';
import { hold } from './held';

function lines(...texts: (string | number)[]): LogLine[] {
  return texts.map(text => ({ ranks: [0], stream: 'stdout', text: `${text}` }));
}

test('keeps the lines when newer ones push the first out of the window', () => {
  expect(hold(lines(1, 2, 3), lines(2, 3, 4))).toEqual({ lines: lines(1, 2, 3), newer: true });
  expect(hold(lines(1, 2, 3), lines(7, 8, 9))).toEqual({ lines: lines(1, 2, 3), newer: true });
});

test('leaves out newer lines while the window grows', () => {
  expect(hold(lines(1, 2), lines(1, 2, 3))).toEqual({ lines: lines(1, 2), newer: true });
  expect(hold(lines(1, 2), lines(1, 2))).toEqual({ lines: lines(1, 2), newer: false });
});

test('takes older lines, in front', () => {
  expect(hold(lines(3, 4), lines(1, 2, 3, 4, 5))).toEqual({ lines: lines(1, 2, 3, 4), newer: true });
});

test('knows a line again to which more ranks have come', () => {
  const latest = lines(1, 2).map(line => ({ ...line, ranks: [0, 1] }));
  expect(hold(lines(1, 2), latest)).toEqual({ lines: latest, newer: false });
});

test('takes older lines also if the last ones are folded otherwise', () => {
  const shown = Array.from({ length: 30 }, (_, at) => at + 10);
  const folded = [...shown.slice(0, 28), 38, 39, 40];
  const held = hold(lines(...shown, 39), lines(8, 9, ...folded));
  expect(held).toEqual({ lines: lines(8, 9, ...shown, 39), newer: true });
});
