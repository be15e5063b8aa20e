import type { MeshModel } from '../model';
import type { CallRow } from '../protocol';
import type { Trans } from './trans';
import { duration, namedRanks } from './words';

/** Rows of calls that have failed or were stopped, until a later one has ended well. */
const RECENT = 2;

/** What each running cell or call does, and on which ranks. */
export function Calls({ model, trans }: { model: MeshModel; trans: Trans }) {
  const calls = [...model.calls.values()].sort((one, other) => one.started - other.started);
  const running = calls.filter(call => !call.ended);
  const over = calls.filter(call => call.ended && (Object.keys(call.errors).length || call.stopped.length));
  const well = calls.filter(call => call.ended && !over.includes(call)).at(-1)?.started ?? 0;
  const rows = [...over.filter(call => call.started >= well).slice(-RECENT), ...running];
  if (!rows.length) {
    return null;
  }
  return (
    <section class="mk-calls" aria-label={trans.__('Calls')}>
      <ul>
        {rows.map(call => (
          <li key={call.call}>
            <Call call={call} model={model} trans={trans} />
          </li>
        ))}
      </ul>
    </section>
  );
}

function Call({ call, model, trans }: { call: Required<CallRow>; model: MeshModel; trans: Trans }) {
  const errors = Object.entries(call.errors);
  const spent = duration((call.ended || model.now()) - call.started, trans);
  const finished = call.ranks.length - call.left.length;
  const waits = finished
    ? trans.__('running on %1; %2 of %3 finished', namedRanks(call.left, trans), finished, call.ranks.length)
    : trans.__('on %1', namedRanks(call.ranks, trans));
  const end =
    errors.length || !call.stopped.length ? trans.__('ended after %1', spent) : trans.__('stopped after %1', spent);
  return (
    <>
      <b>{call.title}</b> {call.ended ? end : `${spent} · ${waits}`}
      {call.waits && !call.ended && (
        <>
          {' · '}
          <b class="mk-waits">{call.waits}</b>
        </>
      )}
      {errors.slice(0, 1).map(([rank, text]) => (
        <span class="mk-bad" key={rank}>
          {' · '}
          {errors.length > 1
            ? trans.__(
                'failed on %1: %2',
                namedRanks(
                  errors.map(([each]) => Number(each)),
                  trans
                ),
                text
              )
            : trans.__('failed on rank %1: %2', rank, text)}
        </span>
      ))}
    </>
  );
}
