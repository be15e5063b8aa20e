import { useEffect, useReducer, useState } from 'preact/hooks';
import type { MeshSession } from '../../session';
import { Lines } from '../../view/details';
import { Status } from '../../view/title';
import type { Trans } from '../../view/trans';
import { LogsModel } from './model';

interface Props {
  session: MeshSession;
  /** Lines to show at first. */
  most: number;
  trans: Trans;
}

/** The newest output of the ranks, filtered. */
export function LogsBody({ session, most, trans }: Props) {
  const [, render] = useReducer((count: number) => count + 1, 0);
  const [model, setModel] = useState<LogsModel | null>(null);
  useEffect(() => {
    const made = new LogsModel(session, most, () => render(0));
    setModel(made);
    return () => made.close();
  }, [session, most]);
  if (!model) {
    return null;
  }
  const bad = model.wanted === null;
  return (
    <section class="mk-logs" aria-label={trans.__('Logs')}>
      <Status session={session} trans={trans} />
      <div class="mk-filters">
        <label>
          {trans.__('Ranks')}
          <input
            type="text"
            value={model.ranks}
            placeholder={trans.__('all')}
            title={trans.__('Such as 0-3,7')}
            aria-invalid={bad}
            onInput={event => model.filter({ ranks: event.currentTarget.value })}
          />
        </label>
        <label>
          {trans.__('Text')}
          <input
            type="search"
            value={model.text}
            onInput={event => model.filter({ text: event.currentTarget.value })}
          />
        </label>
        <label>
          {trans.__('Stream')}
          <select value={model.stream} onChange={event => model.filter({ stream: event.currentTarget.value })}>
            <option value="">{trans.__('both')}</option>
            <option value="stdout">stdout</option>
            <option value="stderr">stderr</option>
          </select>
        </label>
      </div>
      {bad && <p class="mk-bad">{trans.__('Enter ranks such as 0-3,7.')}</p>}
      {model.more && (
        <button type="button" class="mk-button mk-small" onClick={() => model.filter({ most: model.most * 2 })}>
          {trans.__('Show older lines')}
        </button>
      )}
      {model.ready ? (
        // Another filter begins at the end again.
        <Lines key={`${model.ranks}\n${model.text}\n${model.stream}`} lines={model.lines} trans={trans} ranks />
      ) : (
        <p class="mk-quiet">{trans.__('Reading…')}</p>
      )}
    </section>
  );
}
