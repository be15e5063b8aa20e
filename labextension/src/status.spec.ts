import { expect, test } from 'vitest';
import { summary } from './status';
import { ENGLISH } from './view/trans';

const mesh = (ranks: number, failed: number) => ({ uid: 'a', name: 'a', ranks, failed, running: 0 });

test('the status bar counts ranks, and those that are dead or paused', () => {
  expect(summary([mesh(8, 1)], ENGLISH)).toBe('8 ranks, 1 dead');
  expect(summary([mesh(8, 0), mesh(4, 0)], ENGLISH)).toBe('12 ranks');
  expect(summary([mesh(1, 0)], ENGLISH)).toBe('1 rank');
  expect(summary([{ ...mesh(8, 1), paused: 3 }, mesh(4, 0)], ENGLISH)).toBe('12 ranks, 1 dead, 3 paused');
});
