import { expect, test } from 'vitest';
import { rangeOf, stepOf } from './timeline';

test('the timeline covers what there is, from 10 s to a minute', () => {
  expect([995, 980, 940, 500, Number.POSITIVE_INFINITY].map(first => rangeOf(first, 1000))).toEqual([
    10, 20, 60, 60, 10
  ]);
});

test('the axis has a few marks at round times', () => {
  expect([10, 11, 25, 26, 60].map(range => stepOf(range))).toEqual([2, 5, 5, 10, 15]);
});

test('the texts of the axis stay apart in a narrow view', () => {
  expect([250, 170, 90].map(room => stepOf(10, room))).toEqual([2, 5, 10]);
});
