import type { MeshModel } from '../model';
import type { BarRow } from '../protocol';
import type { Trans } from './trans';
import { duration, figure } from './words';

/** Time for which a bar stays after its end, in seconds. */
const STAYS = 6;

/** Progress of the ranks: one bar for each piece of work, with its slowest and fastest rank. */
export function Bars({ model, trans }: { model: MeshModel; trans: Trans }) {
  const now = model.now();
  const bars = [...model.bars.values()]
    .map(bar => stopped(bar, model))
    .filter(bar => !bar.ended || (!model.isStopped && now < bar.ended + STAYS));
  if (!bars.length || model.mesh?.ended) {
    return null;
  }
  return (
    <section class="mk-bars" aria-label={trans.__('Progress')}>
      {bars.map(bar => (
        <Bar key={bar.bar} row={bar} now={now} trans={trans} />
      ))}
    </section>
  );
}

/** Return a bar as ended if nothing runs that could continue with it, as after the death of its rank. */
function stopped(bar: Required<BarRow>, model: MeshModel): Required<BarRow> {
  const calls = [...model.calls.values()];
  if (bar.ended || bar.together || !calls.length || calls.some(call => !call.ended)) {
    return bar;
  }
  return { ...bar, ended: Math.max(bar.started, ...calls.map(call => call.ended)) };
}

/** A bar of which a view shows the slowest and the fastest rank. */
interface Extremes extends Pick<BarRow, 'bar' | 'unit' | 'started'> {
  /** Of the slowest rank. */
  done: number;
  total: number;
  /** Of the fastest rank. */
  most: number;
  slowest: number;
  fastest: number;
  ended: number;
}

/** Return a bar with its slowest and its fastest rank; of equal ones, those of the lowest number. */
export function extremes(row: Required<BarRow>): Extremes {
  const total = (at: number) => (row.total.length > 1 ? row.total[at] : row.total[0]);
  const share = (at: number) => (total(at) > 0 ? row.done[at] / total(at) : row.done[at]);
  let slowest = 0;
  let fastest = 0;
  for (let at = 1; at < row.done.length; at++) {
    slowest = share(at) < share(slowest) ? at : slowest;
    fastest = share(at) > share(fastest) ? at : fastest;
  }
  const rank = (at: number) => (row.together ? -1 : row.ranks[at]);
  return {
    ...row,
    done: row.done[slowest],
    total: total(slowest),
    most: row.done[fastest],
    slowest: rank(slowest),
    fastest: rank(fastest)
  };
}

function Bar({ row, now, trans }: { row: Required<BarRow>; now: number; trans: Trans }) {
  const bar = extremes(row);
  const known = bar.total > 0;
  const share = (done: number) => Math.max(0, Math.min(100, known ? (100 * done) / bar.total : 0));
  const amount = known ? `${figure(bar.done)} / ${figure(bar.total)} ${bar.unit}` : `${figure(bar.done)} ${bar.unit}`;
  const spread =
    bar.slowest >= 0 && bar.slowest !== bar.fastest && bar.most > bar.done
      ? trans.__('slowest: rank %1, fastest: rank %2 at %3', bar.slowest, bar.fastest, figure(bar.most))
      : '';
  const text = [amount.trim(), bar.ended ? end(bar, trans) : left(bar, now, trans), spread].filter(Boolean).join(' · ');
  return (
    <div class={`mk-bar${bar.ended ? ' mk-ended' : ''}`}>
      <span class="mk-bar-name">{bar.bar}</span>
      <div
        class={`mk-track${known ? '' : ' mk-unknown'}`}
        role="progressbar"
        aria-label={bar.bar}
        aria-valuemin={0}
        aria-valuemax={known ? bar.total : undefined}
        aria-valuenow={known ? bar.done : undefined}
        aria-valuetext={text}
      >
        <div class="mk-fast" style={{ width: `${share(bar.most)}%` }} />
        <div class="mk-slow" style={{ width: `${known ? share(bar.done) : bar.ended ? 100 : 30}%` }} />
      </div>
      <span class="mk-bar-text">{text}</span>
    </div>
  );
}

/** Return how a bar has ended: an error or a Stop ends it early. */
function end(bar: Extremes, trans: Trans): string {
  const spent = duration(bar.ended - bar.started, trans);
  return bar.total > 0 && bar.done < bar.total ? trans.__('stopped after %1', spent) : trans.__('done in %1', spent);
}

function left(bar: Extremes, now: number, trans: Trans): string {
  const spent = now - bar.started;
  if (bar.total <= 0 || bar.done <= 0 || spent < 1) {
    return '';
  }
  return trans.__('%1 left', duration((spent * (bar.total - bar.done)) / bar.done, trans));
}
