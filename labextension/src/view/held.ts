/** Lines that stay where a person reads them while newer ones come. */

import type { LogLine } from '../protocol';

/** Lines by which the place of others is found. */
const FIRST = 20;

export interface Held {
  lines: LogLine[];
  /** Whether there are newer lines than these. */
  newer: boolean;
}

/**
 * Return the lines to show while a person reads older ones: no newer ones, and older ones if they were asked for.
 *
 * A window over a log slides: its first lines go as new ones come.
 */
export function hold(shown: LogLine[], latest: LogLine[]): Held {
  const start = placeOf(shown, latest);
  if (start >= 0) {
    const end = start + shown.length;
    return { lines: latest.slice(0, end), newer: end < latest.length };
  }
  // The last lines may be folded otherwise by now, if ranks printed them one after the other.
  const older = placeOf(shown.slice(0, FIRST), latest);
  return { lines: older > 0 ? [...latest.slice(0, older), ...shown] : shown, newer: true };
}

/** Return where all lines are in others; -1 for nowhere. The last such place, since equal lines may repeat. */
function placeOf(shown: LogLine[], latest: LogLine[]): number {
  for (let start = latest.length - shown.length; start >= 0; start--) {
    if (shown.every((line, at) => isSame(line, latest[start + at]))) {
      return start;
    }
  }
  return -1;
}

/** Whether two lines are the same one. Others of its ranks may come later. */
function isSame(one: LogLine, other: LogLine): boolean {
  return one.text === other.text && one.stream === other.stream && one.cell === other.cell;
}
