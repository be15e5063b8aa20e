import { useRef } from 'preact/hooks';
import type { MeshSession } from '../session';
import type { Trans } from './trans';
import { rankSet, stateWord } from './words';

/** Tells screen readers, in their own time, which ranks have just died, or fallen silent. */
export function Failures({ session, trans }: { session: MeshSession; trans: Trans }) {
  const known = useRef(new Set<number>());
  const text = useRef('');
  const failed = session.model.ranks.filter(row => row?.state === 'failed' || row?.state === 'unresponsive');
  const fresh = failed.filter(row => !known.current.has(row.rank));
  known.current = new Set(failed.map(row => row.rank));
  if (fresh.length) {
    const [first] = fresh;
    const what = stateWord(first.state, trans);
    text.current =
      fresh.length === 1
        ? trans.__('rank %1: %2. %3', first.rank, what, first.reason)
        : trans.__('%1 ranks: %2: %3', fresh.length, what, rankSet(fresh.map(row => row.rank)));
  }
  return (
    <div class="mk-hidden" aria-live="polite">
      {text.current}
    </div>
  );
}
