/** The filter of the log, and the lines that match. */

import type { LogLine } from '../../protocol';
import type { MeshSession } from '../../session';

/** How often the lines follow, in ms. */
const EVERY = 1000;

export class LogsModel {
  ranks = '';
  text = '';
  stream = '';
  lines: LogLine[] = [];
  more = false;
  /** Whether the kernel has answered. */
  ready = false;
  private readonly stop: () => void;
  private readonly timer: ReturnType<typeof setInterval>;

  constructor(
    private readonly session: MeshSession,
    public most: number,
    private readonly changed: () => void
  ) {
    this.stop = session.channel.listen(message => {
      if (message.kind === 'logs' && message.uid === session.uid) {
        this.lines = message.lines;
        this.more = message.more;
        this.ready = true;
        changed();
      }
    });
    this.timer = setInterval(() => this.read(), EVERY);
    this.read();
  }

  /** Change the filter. */
  filter(change: Partial<Pick<LogsModel, 'ranks' | 'text' | 'stream' | 'most'>>): void {
    Object.assign(this, change);
    this.changed();
    this.read();
  }

  /** Return the ranks that the filter names; null if it is not written as in "0-3,7". */
  get wanted(): number[] | null {
    return parseRanks(this.ranks);
  }

  close(): void {
    clearInterval(this.timer);
    this.stop();
  }

  private read(): void {
    const { wanted, session, text, stream, most } = this;
    if (wanted && session.link === 'live') {
      session.channel.send({ kind: 'read_logs', ranks: wanted, text, stream, most, uid: session.uid });
    }
  }
}

/** Return the ranks of "0-3,7"; none for an empty text, null if it is written otherwise. */
export function parseRanks(text: string): number[] | null {
  const ranks = new Set<number>();
  for (const part of text.split(/[\s,]+/).filter(Boolean)) {
    const [, from, to] = part.match(/^(\d{1,6})(?:[-–](\d{1,6}))?$/) ?? [];
    if (from === undefined || Number(to ?? from) - Number(from) > 100_000) {
      return null;
    }
    for (let rank = Number(from); rank <= Number(to ?? from); rank++) {
      ranks.add(rank);
    }
  }
  return [...ranks].sort((one, other) => one - other);
}
