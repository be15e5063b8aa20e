import { describe, expect, test } from 'vitest';
import { NOTEBOOK, type Series } from '../model';
import { logTicks, range, summarize, ticks } from './series';

const ranks = (...rows: (number | null)[][]) =>
  new Map<number, Series>(rows.map((values, rank) => [rank, { steps: values.map((_, at) => at), values }]));

describe('series', () => {
  test('mean and spread are those of the ranks that have a value', () => {
    const [first, second] = summarize(ranks([1, 2], [3, null], [5, 4]));
    expect(first).toMatchObject({ step: 0, mean: 3, low: 1, high: 5, lowRank: 0, highRank: 2 });
    expect(second).toMatchObject({ step: 1, mean: 3, low: 2, high: 4 });
  });

  test('a step that few ranks have reached has no mean yet', () => {
    expect(summarize(ranks([1, 2, 3], [1, 2], [1, 2])).map(point => point.step)).toEqual([0, 1]);
  });

  test('the last steps have no mean while a rank is just behind', () => {
    expect(summarize(ranks([1, 2, 3, 4], [1, 2])).map(point => point.step)).toEqual([0, 1]);
    // One that has stopped holds back none.
    expect(summarize(ranks([1, 2, 3, 4, 5, 6], [1])).map(point => point.step)).toEqual([0, 1, 2, 3, 4, 5]);
    expect(summarize(ranks([1], [])).map(point => point.step)).toEqual([0]);
  });

  test('values of the notebook are no rank', () => {
    const all = ranks([1], [3]);
    all.set(NOTEBOOK, { steps: [0], values: [100] });
    expect(summarize(all)[0].high).toBe(3);
  });

  test('the range leaves out NaN, and what a logarithm has not', () => {
    expect(range(ranks([null, -1, 4], [2, null, null]), false)).toEqual([-1, 4]);
    expect(range(ranks([null, -1, 4], [2, null, null]), true)).toEqual([2, 4]);
    expect(range(ranks([null]), false)).toBeNull();
    expect(range(ranks([3, 3]), false)).toEqual([1.5, 4.5]);
  });

  test('ticks are round and inside', () => {
    expect(ticks(0.13, 2.34, 4)).toEqual([1, 2]);
    expect(ticks(0, 100, 4)).toEqual([0, 50, 100]);
    expect(logTicks(0.5, 60)).toEqual([1, 10]);
    expect(logTicks(2, 60)).toEqual([2, 5, 10, 20, 50]);
  });
});
