import { useLayoutEffect, useRef, useState } from 'preact/hooks';
import type { LogLine, RankRow, State, TensorRow } from '../protocol';
import { LOOKS } from '../protocol';
import type { MeshSession } from '../session';
import { hold } from './held';
import type { Trans } from './trans';
import { bytes, doing, duration, figure, rankSet } from './words';

/** States of a rank without a process, and so without a stack. */
const OVER: ReadonlySet<State> = new Set(['failed', 'stopped']);

interface Props {
  session: MeshSession;
  trans: Trans;
}

interface DetailsProps extends Props {
  close(): void;
}

/** The pinned rank: its figures, last lines, live stack and tensors. */
export function Details({ session, trans, close }: DetailsProps) {
  const row = session.model.ranks[session.pinned];
  if (!row) {
    return null;
  }
  const { details } = session;
  const press = (event: KeyboardEvent) => {
    if (event.key === 'Escape') {
      event.stopPropagation();
      close();
    }
  };
  return (
    <section class="mk-details" aria-label={trans.__('Rank %1', row.rank)} onKeyDown={press}>
      <header>
        <span class={`mk-swatch mk-${row.state} mk-load4`} aria-hidden="true">
          {LOOKS[row.state].sign}
        </span>
        <h4>{trans.__('Rank %1', row.rank)}</h4>
        <button
          type="button"
          class="mk-close"
          aria-label={trans.__('Unpin')}
          title={trans.__('Unpin (Escape)')}
          onClick={close}
        >
          ×
        </button>
      </header>
      <Figures row={row} session={session} trans={trans} />
      {details?.note && <p class="mk-note">{details.note}</p>}
      {!details && session.link === 'live' && <p class="mk-quiet">{pendingText(session, trans)}</p>}
      {details && !OVER.has(row.state) && <Stack lines={details.stack} idle={isIdle(row)} trans={trans} />}
      {details && <Lines key={row.rank} lines={details.lines} trans={trans} />}
      {details && <Tensors rows={details.tensors} device={row.device} session={session} trans={trans} />}
    </section>
  );
}

function pendingText(session: MeshSession, trans: Trans): string {
  return session.model.mesh?.actions.length
    ? trans.__('Asking the rank…')
    : trans.__('To see the stack, output and tensors of this rank, use its own notebook or program.');
}

function Figures({ row, session, trans }: Props & { row: Required<RankRow> }) {
  const host = session.model.mesh?.hosts[row.rank] ?? '';
  const since = duration(session.model.now() - row.since, trans);
  const tensors = Object.entries(row.tensors).sort(([, one], [, other]) => other - one);
  const figures: [string, string | number][] = [
    [trans.__('State'), trans.__('%1, for %2', doing(row, trans), since)],
    [trans.__('Call'), row.call],
    [trans.__('Queue'), row.queue > 1 ? trans.__('%1 calls', row.queue) : ''],
    [trans.__('Process'), row.pid ? trans.__('%1 on %2', row.pid, host || '?') : host],
    [trans.__('Device'), row.device],
    [trans.__('Load'), row.load ? trans.__('%1 %', Math.round(row.load * 100)) : ''],
    [trans.__('Memory'), row.rss ? bytes(row.rss) : ''],
    [trans.__('GPU memory'), row.gpu_memory ? bytes(row.gpu_memory) : ''],
    [trans.__('Tensors'), tensors.map(([owner, size]) => `${owner} ${bytes(size)}`).join(', ')],
    [trans.__('Restarts'), row.restarts || '']
  ];
  return (
    <dl class="mk-figures">
      {figures
        .filter(([, value]) => value !== '')
        .map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
    </dl>
  );
}

/** Distance from the end, in pixels, at which a person still looks at the end. */
const NEAR_END = 24;

/** Keep to the end, where the newest is, unless a person has scrolled up; until they scroll down again. */
function useEnd(content: unknown) {
  const ref = useRef<HTMLPreElement>(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    const box = ref.current;
    if (box && follows.current) {
      box.scrollTop = box.scrollHeight;
    }
  }, [content]);
  const onScroll = () => {
    follows.current = isNearEnd(ref.current!);
  };
  return { ref, onScroll };
}

function isNearEnd(box: HTMLElement): boolean {
  return box.scrollHeight - box.scrollTop - box.clientHeight <= NEAR_END;
}

/** Show the newest lines; while a person reads older ones, keep those where they are. */
function useHeld(latest: LogLine[]) {
  const ref = useRef<HTMLPreElement>(null);
  const [follows, setFollows] = useState(true);
  const shown = useRef(latest);
  const height = useRef(0);
  const held = follows ? { lines: latest, newer: false } : hold(shown.current, latest);
  shown.current = held.lines;
  useLayoutEffect(() => {
    const box = ref.current;
    if (box) {
      // What was added to held lines are older ones, above.
      box.scrollTop = follows ? box.scrollHeight : box.scrollTop + box.scrollHeight - height.current;
      height.current = box.scrollHeight;
    }
  }, [held.lines, follows]);
  const onScroll = () => setFollows(isNearEnd(ref.current!));
  return { ...held, follow: () => setFollows(true), box: { ref, onScroll } };
}

/** Whether a rank runs nothing, so that the stack is that of the wait for a call. */
function isIdle(row: Required<RankRow>): boolean {
  return (row.state === 'idle' || row.state === 'restarted') && !row.call;
}

function Stack({ lines, idle, trans }: { lines: string[]; idle: boolean; trans: Trans }) {
  const end = useEnd(lines);
  return (
    <>
      <h5>{trans.__('Stack of the main thread')}</h5>
      {idle ? (
        <p class="mk-quiet">{trans.__('Waiting for a call.')}</p>
      ) : lines.length ? (
        <pre class="mk-code" tabIndex={0} role="group" aria-label={trans.__('Stack')} {...end}>
          {lines.join('\n')}
        </pre>
      ) : (
        <p class="mk-quiet">{trans.__('The rank has not answered; it may be blocked in C code.')}</p>
      )}
    </>
  );
}

/** Lines of output, those of stderr set apart by a bar and a word for screen readers. */
export function Lines({ lines: latest, trans, ranks = false }: { lines: LogLine[]; trans: Trans; ranks?: boolean }) {
  const { lines, newer, follow, box } = useHeld(latest);
  return (
    <>
      {!ranks && <h5>{trans.__('Last lines of output')}</h5>}
      {lines.length ? (
        <pre class="mk-code" tabIndex={0} role="group" aria-label={trans.__('Output')} {...box}>
          {lines.map((line, at) => (
            <div key={at} class={line.stream === 'stderr' ? 'mk-err' : undefined}>
              {ranks && <span class="mk-who">[{rankSet(line.ranks)}] </span>}
              {line.text || ' '}
            </div>
          ))}
        </pre>
      ) : (
        <p class="mk-quiet">{trans.__('No output.')}</p>
      )}
      {newer && (
        <button type="button" class="mk-button mk-small mk-newer" onClick={follow}>
          {trans.__('Show newer lines')}
        </button>
      )}
    </>
  );
}

function Tensors(props: { rows: TensorRow[]; device: string; session: MeshSession; trans: Trans }) {
  const { rows, session, trans } = props;
  if (!rows.length) {
    return null;
  }
  const some = rows.some(row => row.norm === null || row.norm === undefined);
  // That of the rank is said above.
  const differ = rows.some(row => row.device !== props.device);
  const columns = ['Name', 'Shape', 'Type', 'Norm', 'NaN', ...(differ ? ['Device'] : [])];
  return (
    <>
      <h5>
        {trans.__('Tensors')}
        {some && (
          <button
            type="button"
            class="mk-button mk-small"
            onClick={() => session.askNorms()}
            title={trans.__('Include tensors above 64 MiB; takes time on the device')}
          >
            {trans.__('Compute all norms')}
          </button>
        )}
      </h5>
      <div class="mk-scroll" tabIndex={0} role="group" aria-label={trans.__('Tensors')}>
        <table class="mk-table">
          <thead>
            <tr>
              {columns.map(name => (
                <th key={name} scope="col">
                  {trans.__(name)}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map(row => (
              <tr key={row.name}>
                <th scope="row">{row.name}</th>
                <td>{row.shape.join(' × ') || trans.__('scalar')}</td>
                <td>{row.dtype.replace('torch.', '')}</td>
                <td class="mk-num">{figure(row.norm)}</td>
                <td class={`mk-num${row.nans ? ' mk-bad' : ''}`}>{row.nans ?? 0}</td>
                {differ && <td>{row.device}</td>}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
