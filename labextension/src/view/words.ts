/** Figures and ranks as text. */

import { LOOKS, type RankRow } from '../protocol';
import type { Trans } from './trans';

/** Return a duration, as in "0.4 s", "12 s", "3 min 5 s" or "2 h 10 min". */
export function duration(seconds: number, trans: Trans): string {
  const whole = Math.max(0, Math.round(seconds));
  if (seconds < 0.95) {
    return trans.__('%1 s', Math.max(0, seconds).toFixed(1));
  }
  if (whole < 60) {
    return trans.__('%1 s', whole);
  }
  if (whole < 3600) {
    return trans.__('%1 min %2 s', Math.floor(whole / 60), whole % 60);
  }
  return trans.__('%1 h %2 min', Math.floor(whole / 3600), Math.floor((whole % 3600) / 60));
}

/** Return a size, as in "1.5 GiB". */
export function bytes(count: number): string {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let at = 0;
  let size = count;
  while (size >= 1000 && at < units.length - 1) {
    size /= 1024;
    at += 1;
  }
  return `${at && size < 99.5 ? size.toFixed(1) : Math.round(size)} ${units[at]}`;
}

/** Return a number with four significant digits, as in "0.01234" or "1.2e-9". */
export function figure(value: number | null | undefined): string {
  if (value === null || value === undefined) {
    return '–';
  }
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) {
    return value.toExponential(2).replace('e+', 'e');
  }
  return String(Number(value.toPrecision(4)));
}

/** Return ranks in short, as in "0-3,7". */
export function rankSet(ranks: Iterable<number>): string {
  const sorted = [...ranks].sort((one, other) => one - other);
  const parts: string[] = [];
  for (let from = 0; from < sorted.length; ) {
    let to = from;
    while (sorted[to + 1] === sorted[to] + 1) {
      to += 1;
    }
    parts.push(to === from ? `${sorted[from]}` : `${sorted[from]}-${sorted[to]}`);
    from = to + 1;
  }
  return parts.join(',');
}

/** Return "rank 3" or "ranks 0-3". */
export function namedRanks(ranks: number[], trans: Trans): string {
  return ranks.length === 1 ? trans.__('rank %1', ranks[0]) : trans.__('ranks %1', rankSet(ranks));
}

/** Return the word for a state. */
export function stateWord(state: RankRow['state'], trans: Trans): string {
  return trans.__(LOOKS[state].word);
}

/** Return what a rank does, as in "running cell [4] line 7". */
export function doing(row: Required<RankRow>, trans: Trans): string {
  const where = row.place || row.call;
  const word = stateWord(row.state, trans);
  switch (row.state) {
    case 'running':
      return where ? trans.__('running %1', where) : word;
    case 'collective':
      return row.collective ? trans.__('waiting in %1, %2', row.collective, where) : trans.__('%1, %2', word, where);
    case 'failed':
    case 'unresponsive':
      return row.reason ? `${word}: ${row.reason}` : word;
    case 'idle':
    case 'stopped':
    case 'starting':
      return word;
    default:
      return where ? trans.__('%1, %2', word, where) : word;
  }
}

/** Return a rank as a sentence: "rank 3: running cell [4] line 7 for 12 s, load 95 %". */
export function sentence(row: Required<RankRow>, now: number, trans: Trans): string {
  const since = duration(now - row.since, trans);
  const first =
    row.state === 'failed' && row.reason
      ? trans.__('rank %1 died %2 ago (%3)', row.rank, since, row.reason)
      : trans.__('rank %1: %2 for %3', row.rank, doing(row, trans), since);
  const parts = [first];
  if (row.load > 0.005) {
    parts.push(trans.__('load %1 %', Math.round(row.load * 100)));
  }
  if (row.restarts) {
    parts.push(trans._n('restarted once', 'restarted %1 times', row.restarts));
  }
  return parts.join(', ');
}
