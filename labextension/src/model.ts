/** A mesh as its view knows it: a Snapshot, with the Patches since then. */

import {
  type BarRow,
  type CallRow,
  DEFAULTS,
  type MeshRow,
  MOST_SPANS,
  type Patch,
  type Points,
  type RankRow,
  type Snapshot,
  SPAN_SECONDS,
  type SpanRow
} from './protocol';

/** Values of a metric on a rank. */
export interface Series {
  steps: number[];
  values: (number | null)[];
}

/** Rank of values that the notebook itself has logged. */
export const NOTEBOOK = -1;

export class MeshModel {
  mesh: Required<MeshRow> | null = null;
  /** Number of the newest event. */
  number = -1;
  /** By rank. A row is replaced when it changes, so that a view can compare identities. */
  ranks: Required<RankRow>[] = [];
  calls = new Map<number, Required<CallRow>>();
  /** By rank, in order of their begin. */
  spans = new Map<number, Required<SpanRow>[]>();
  /** By name of the metric and rank. */
  metrics = new Map<string, Map<number, Series>>();
  bars = new Map<string, Required<BarRow>>();
  /** When the first span began that the view has known; Infinity for none. */
  firstSpan = Number.POSITIVE_INFINITY;
  /** Raised when values of a metric change. */
  metricsVersion = 0;
  /** Raised by each snapshot: ranks may have other places. */
  snapshots = 0;
  private readonly members: ReadonlySet<number>;
  /** How far the kernel's clock is ahead of this one, in seconds. */
  private ahead = 0;
  private stopped = 0;

  /**
   * @param members the ranks that the view is of; none for all.
   */
  constructor(members: readonly number[] = []) {
    this.members = new Set(members);
  }

  /** Whether the view is of some ranks only. */
  get isPart(): boolean {
    return this.members.size > 0;
  }

  /** Return the ranks that the view shows, in order. */
  shown(): number[] {
    const found: number[] = [];
    // It skips the places of ranks that the view is not of.
    this.ranks.forEach((_, rank) => {
      found.push(rank);
    });
    return found;
  }

  private has(rank: number): boolean {
    return !this.isPart || rank === NOTEBOOK || this.members.has(rank);
  }

  /** Return the time on the kernel's clock; that of its end for an ended mesh, and that at which its clock stopped. */
  now(): number {
    return this.mesh?.ended || this.stopped || Date.now() / 1000 + this.ahead;
  }

  get isStopped(): boolean {
    return this.stopped > 0;
  }

  /** Stop the clock until the next message: nothing is known of the time since then. */
  freeze(): void {
    this.stopped = this.now();
  }

  /** Replace everything. */
  take(snapshot: Snapshot): void {
    this.setClock(snapshot.now);
    this.number = snapshot.number;
    this.snapshots += 1;
    this.mesh = { ...DEFAULTS.MeshRow, ...snapshot.mesh };
    this.ranks = [];
    this.calls.clear();
    this.spans.clear();
    this.metrics.clear();
    this.bars.clear();
    this.firstSpan = Number.POSITIVE_INFINITY;
    this.metricsVersion += 1;
    this.apply(snapshot);
  }

  /** Apply the changes since `patch.after`; return false if this is not where the model stands. */
  patch(patch: Patch): boolean {
    if (!this.mesh || patch.after !== this.number || patch.uid !== this.mesh.uid) {
      return false;
    }
    this.setClock(patch.now);
    this.number = patch.number;
    if (patch.mesh) {
      this.mesh = { ...DEFAULTS.MeshRow, ...patch.mesh };
    }
    for (const call of patch.dropped_calls ?? []) {
      this.calls.delete(call);
    }
    for (const bar of patch.dropped_bars ?? []) {
      this.bars.delete(bar);
    }
    this.apply(patch);
    return true;
  }

  private setClock(now: number): void {
    this.stopped = 0;
    this.ahead = now - Date.now() / 1000;
  }

  private apply(rows: Snapshot | Patch): void {
    for (const row of rows.ranks ?? []) {
      if (this.has(row.rank)) {
        this.ranks[row.rank] = { ...DEFAULTS.RankRow, ...row } as Required<RankRow>;
      }
    }
    for (const row of rows.calls ?? []) {
      const call = this.part({ ...DEFAULTS.CallRow, ...row });
      // A call that all of them have answered is over for these ranks.
      if (call.ranks.length && (call.ended || call.left.length || !this.isPart)) {
        this.calls.set(row.call, call);
      } else {
        this.calls.delete(row.call);
      }
    }
    for (const row of rows.bars ?? []) {
      const bar = this.ofBar({ ...DEFAULTS.BarRow, ...row }, rows.now);
      if (bar) {
        this.bars.set(row.bar, bar);
      } else {
        this.bars.delete(row.bar);
      }
    }
    for (const row of rows.spans ?? []) {
      if (this.has(row.rank)) {
        this.addSpan({ ...DEFAULTS.SpanRow, ...row });
      }
    }
    for (const points of rows.points ?? []) {
      if (this.has(points.rank)) {
        this.addPoints(points);
      }
    }
    this.forgetSpans(rows.now - SPAN_SECONDS);
  }

  /** Return a call as the ranks of the view take part in it. */
  private part(call: Required<CallRow>): Required<CallRow> {
    if (!this.isPart) {
      return call;
    }
    const ours = (ranks: number[]) => ranks.filter(rank => this.members.has(rank));
    const errors = Object.fromEntries(Object.entries(call.errors).filter(([rank]) => this.members.has(Number(rank))));
    return { ...call, ranks: ours(call.ranks), left: ours(call.left), stopped: ours(call.stopped), errors };
  }

  /** Return a bar as the ranks of the view take part in it; null if none does. */
  private ofBar(bar: Required<BarRow>, now: number): Required<BarRow> | null {
    const places = bar.ranks.flatMap((rank, at) => (this.has(rank) ? [at] : []));
    if (!this.isPart || (bar.together && (places.length || !bar.ranks.length))) {
      return bar;
    }
    if (!places.length) {
      return null;
    }
    const left = bar.left.filter(rank => this.has(rank));
    const known = this.bars.get(bar.bar);
    // Others may continue after these ranks have ended.
    const ended = bar.ended || (left.length ? 0 : (known?.started === bar.started && known.ended) || now);
    const ours = (values: number[]) => (values.length > 1 ? places.map(at => values[at]) : values);
    return { ...bar, ranks: ours(bar.ranks), done: ours(bar.done), total: ours(bar.total), left, ended };
  }

  private addSpan(span: Required<SpanRow>): void {
    this.firstSpan = Math.min(this.firstSpan, span.begin);
    let row = this.spans.get(span.rank);
    if (!row) {
      row = [];
      this.spans.set(span.rank, row);
    }
    // Nearly always the last one, or a new one after it.
    let at = row.length;
    while (at > 0 && row[at - 1].begin >= span.begin) {
      at -= 1;
    }
    const known = at < row.length && row[at].begin === span.begin;
    row.splice(at, known ? 1 : 0, span);
  }

  private addPoints(points: Points): void {
    let ranks = this.metrics.get(points.name);
    if (!ranks) {
      ranks = new Map();
      this.metrics.set(points.name, ranks);
    }
    const kept = ranks.get(points.rank) ?? { steps: [], values: [] };
    const at = points.at ?? DEFAULTS.Points.at;
    kept.steps.length = Math.min(kept.steps.length, at);
    kept.values.length = kept.steps.length;
    for (let i = 0; i < points.steps.length; i++) {
      kept.steps.push(points.steps[i]);
      kept.values.push(points.values[i]);
    }
    ranks.set(points.rank, kept);
    this.metricsVersion += 1;
  }

  /** Forget the spans that ended before a time, and all but the newest of those that have ended. */
  private forgetSpans(before: number): void {
    const ends: number[] = [];
    for (const [rank, row] of this.spans) {
      if (row.length && row[0].end && row[0].end < before) {
        this.spans.set(
          rank,
          row.filter(span => !span.end || span.end >= before)
        );
      }
      for (const span of this.spans.get(rank)!) {
        if (span.end) {
          ends.push(span.end);
        }
      }
    }
    if (ends.length > MOST_SPANS) {
      ends.sort((one, other) => other - one);
      this.dropSpans(ends[MOST_SPANS - 1], ends.filter(end => end > ends[MOST_SPANS - 1]).length);
    }
  }

  /** Keep the ended spans after a time, and as many of those that end just then as there is room for. */
  private dropSpans(limit: number, later: number): void {
    let room = MOST_SPANS - later;
    for (const [rank, row] of this.spans) {
      this.spans.set(
        rank,
        row.filter(span => !span.end || span.end > limit || (span.end === limit && room-- > 0))
      );
    }
  }
}
