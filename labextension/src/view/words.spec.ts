import { describe, expect, test } from 'vitest';
import { DEFAULTS, type RankRow } from '../protocol';
import { rankRow } from '../testing';
import { ENGLISH } from './trans';
import { bytes, duration, figure, rankSet, sentence } from './words';

const row = (change: Partial<RankRow>) => ({ ...DEFAULTS.RankRow, ...rankRow(3, change) }) as Required<RankRow>;

describe('words', () => {
  test.each([
    [0.04, '0.0 s'],
    [0.5, '0.5 s'],
    [0.97, '1 s'],
    [12.4, '12 s'],
    [59.8, '1 min 0 s'],
    [185, '3 min 5 s'],
    [7860, '2 h 11 min'],
    [-3, '0.0 s']
  ])('%d seconds are %s', (seconds, text) => {
    expect(duration(seconds, ENGLISH)).toBe(text);
  });

  test.each([
    [0, '0 B'],
    [999, '999 B'],
    [1536, '1.5 KiB'],
    [3.62e10, '33.7 GiB'],
    [1.5e11, '140 GiB']
  ])('%d bytes are %s', (count, text) => {
    expect(bytes(count)).toBe(text);
  });

  test.each([
    [null, '–'],
    [0, '0'],
    [0.123456, '0.1235'],
    [1e-7, '1.00e-7'],
    [12345678, '1.23e7']
  ])('%d is written %s', (value, text) => {
    expect(figure(value)).toBe(text);
  });

  test('ranks are written as spans', () => {
    expect(rankSet([7, 0, 1, 2, 3, 9, 10])).toBe('0-3,7,9-10');
  });

  test('a running rank is a sentence with line, time and load', () => {
    const running = row({ state: 'running', place: 'cell [4] line 7', since: 1000, load: 0.95 });
    expect(sentence(running, 1012, ENGLISH)).toBe('rank 3: running cell [4] line 7 for 12 s, load 95 %');
  });

  test('a dead rank says when and why', () => {
    const failed = row({ state: 'failed', reason: 'out of memory', since: 1000, restarts: 1 });
    expect(sentence(failed, 1031, ENGLISH)).toBe('rank 3 died 31 s ago (out of memory), restarted once');
  });

  test('a rank in a collective names it', () => {
    const waits = row({ state: 'collective', collective: 'all_reduce #12', place: 'cell [4] line 7' });
    expect(sentence(waits, 1002, ENGLISH)).toContain('waiting in all_reduce #12, cell [4] line 7');
  });
});
