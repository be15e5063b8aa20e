/** Figures of a chart: the ranks' lines, their mean and spread by step, and the scale. */

import type { Series } from '../model';
import { NOTEBOOK } from '../model';

/** Steps by which a rank may be behind and still be waited for. */
const NEAR = 3;

/** The values of one step over the ranks. */
export interface Point {
  step: number;
  mean: number;
  low: number;
  high: number;
  lowRank: number;
  highRank: number;
}

/** Return mean and spread for each step that at least half of the ranks have reached. */
export function summarize(ranks: ReadonlyMap<number, Series>): Point[] {
  const sums = new Map<number, Point & { count: number }>();
  for (const [rank, { steps, values }] of ranks) {
    if (rank === NOTEBOOK) {
      continue;
    }
    for (let at = 0; at < steps.length; at++) {
      const value = values[at];
      if (value === null) {
        continue;
      }
      const step = steps[at];
      const sum = sums.get(step);
      if (!sum) {
        sums.set(step, { step, mean: value, low: value, high: value, lowRank: rank, highRank: rank, count: 1 });
        continue;
      }
      sum.mean += value;
      sum.count += 1;
      if (value < sum.low) {
        sum.low = value;
        sum.lowRank = rank;
      }
      if (value > sum.high) {
        sum.high = value;
        sum.highRank = rank;
      }
    }
  }
  const least = (ranks.size - (ranks.has(NOTEBOOK) ? 1 : 0)) / 2;
  const points = [...sums.values()]
    .filter(sum => sum.count >= least)
    .map(({ count, ...sum }) => ({ ...sum, mean: sum.mean / count }))
    .sort((one, other) => one.step - other.step);
  return points.slice(0, complete(points, ranks));
}

/**
 * Return how many points to show: not the last steps while some ranks are just behind, since the mean of the others
 * would differ. A rank that is far behind holds back none.
 */
function complete(points: Point[], ranks: ReadonlyMap<number, Series>): number {
  const ends = [...ranks].filter(([rank, { steps }]) => rank !== NOTEBOOK && steps.length);
  const slowest = (step: number) => ends.map(([, { steps }]) => steps[steps.length - 1]).filter(end => end < step);
  let count = points.length;
  while (count > 1) {
    const behind = slowest(points[count - 1].step);
    const near = points[Math.max(0, count - 1 - NEAR)].step;
    if (!behind.length || behind.some(end => end < near)) {
      break;
    }
    count -= 1;
  }
  return count;
}

/** Return the lowest and highest finite value of some series; positive ones only for a logarithmic scale. */
export function range(ranks: ReadonlyMap<number, Series>, log: boolean): [number, number] | null {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (const { values } of ranks.values()) {
    for (const value of values) {
      if (value !== null && (!log || value > 0)) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
  }
  if (low > high) {
    return null;
  }
  if (low === high) {
    return log ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  }
  return [low, high];
}

/** Return about `count` round numbers in a range. */
export function ticks(low: number, high: number, count: number): number[] {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find(each => each * power >= raw)! * power;
  const marks: number[] = [];
  for (let at = Math.ceil(low / unit); at * unit <= high * (1 + 1e-12) + unit * 1e-9; at++) {
    marks.push(at * unit);
  }
  return marks;
}

/** Return powers of ten in a range, and 2 and 5 times those if they are few. */
export function logTicks(low: number, high: number): number[] {
  const from = Math.floor(Math.log10(low));
  const to = Math.ceil(Math.log10(high));
  const factors = to - from <= 2 ? [1, 2, 5] : [1];
  const marks: number[] = [];
  const every = Math.max(1, Math.ceil((to - from) / 5));
  for (let power = from; power <= to; power += every) {
    marks.push(...factors.map(factor => factor * 10 ** power));
  }
  return marks.filter(mark => mark >= low * 0.999 && mark <= high * 1.001);
}
