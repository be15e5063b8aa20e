import { expect, test } from 'vitest';
import { contrast, parse, SHADES, STATES, shade, tile, tileRules } from './palette';

test('text on every tile has the contrast that WCAG AA asks for', () => {
  for (const theme of ['light', 'dark'] as const) {
    for (const state of STATES) {
      for (let level = 0; level < SHADES; level++) {
        const { back, ink } = tile(state, level, theme);
        expect(contrast(parse(back), parse(ink)), `${state} ${level} ${theme}`).toBeGreaterThanOrEqual(4.5);
      }
    }
  }
});

test('a higher load is further from the page', () => {
  const shades = Array.from({ length: SHADES }, (_, level) =>
    contrast(parse(tile('running', level, 'light').back), [255, 255, 255])
  );
  expect([...shades].sort((one, other) => one - other)).toEqual(shades);
});

test('loads beyond the ends have the last shade', () => {
  expect([shade(-1), shade(0), shade(1), shade(7)]).toEqual([0, 0, SHADES - 1, SHADES - 1]);
});

test('every state and shade has a rule in both themes', () => {
  expect(tileRules().match(/background-color/g)!.length).toBe(2 * STATES.length * SHADES);
});
