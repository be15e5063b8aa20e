import type { MeshModel } from '../model';
import { LOOKS, type State } from '../protocol';
import { STATES } from './palette';
import type { Trans } from './trans';

/** Return how many ranks are in each state that occurs. */
export function countStates(model: MeshModel): Map<State, number> {
  const counts = new Map<State, number>();
  for (const row of model.ranks) {
    if (row) {
      counts.set(row.state, (counts.get(row.state) ?? 0) + 1);
    }
  }
  return new Map(STATES.filter(state => counts.has(state)).map(state => [state, counts.get(state)!]));
}

interface Props {
  model: MeshModel;
  only: State | null;
  trans: Trans;
  choose(state: State | null): void;
}

/** The states that occur, with their counts; a click makes the ranks of one stand out. */
export function Legend({ model, only, trans, choose }: Props) {
  const counts = countStates(model);
  if (only && !counts.has(only)) {
    counts.set(only, 0);
  }
  return (
    <div class="mk-legend" role="group" aria-label={trans.__('States')}>
      {[...counts].map(([state, count]) => (
        <button
          type="button"
          key={state}
          class="mk-chip"
          aria-pressed={only === state}
          onClick={() => choose(only === state ? null : state)}
        >
          <span class={`mk-swatch mk-${state} mk-load4`} aria-hidden="true">
            {LOOKS[state].sign}
          </span>
          {trans.__(LOOKS[state].word)} <b>{count}</b>
        </button>
      ))}
    </div>
  );
}
