import { useLayoutEffect, useRef, useState } from 'preact/hooks';
import type { Action, RankRow, State } from '../protocol';
import type { MeshSession } from '../session';
import type { Trans } from './trans';
import { namedRanks } from './words';

/** Return the word on the button of an action. */
export function actionWord(action: Action, trans: Trans): string {
  const words: Record<Action, string> = {
    interrupt: trans.__('Interrupt'),
    pause: trans.__('Pause'),
    resume: trans.__('Resume'),
    heal: trans.__('Heal'),
    kill: trans.__('Kill'),
    stacks: trans.__('Dump stacks')
  };
  return words[action];
}

/** Return what an action does, for the tooltip of its button. */
export function actionHelp(action: Action, trans: Trans): string {
  const texts: Record<Action, string> = {
    interrupt: trans.__('Raise KeyboardInterrupt in the code they run; variables are kept'),
    pause: trans.__('Pause them at their next line'),
    resume: trans.__('Resume paused ranks'),
    heal: trans.__('Replace dead ranks with new processes; the others keep their variables'),
    kill: trans.__('End their processes; their variables are lost'),
    stacks: trans.__('Print the stack of each rank, without stopping it')
  };
  return texts[action];
}

/** States of a rank that runs something. */
const BUSY: ReadonlySet<State> = new Set(['running', 'collective', 'blocked', 'paused', 'unresponsive']);
/** States of a rank without a process. */
const OVER: ReadonlySet<State> = new Set(['failed', 'stopped']);

/** Return why an action would do nothing on these ranks; empty if it would do something. */
export function whyUseless(action: Action, rows: Required<RankRow>[], trans: Trans): string {
  const living = rows.filter(row => !OVER.has(row.state));
  const paused = living.filter(row => row.state === 'paused');
  switch (action) {
    case 'interrupt':
      return living.some(row => BUSY.has(row.state) || row.call) ? '' : trans.__('Nothing is running on these ranks');
    case 'pause':
      return living.length > paused.length ? '' : trans.__('All of these ranks are paused or have ended');
    case 'resume':
      return paused.length ? '' : trans.__('None of these ranks is paused');
    case 'kill':
    case 'stacks':
      return living.length ? '' : trans.__('None of these ranks is alive');
    default:
      return '';
  }
}

/** Return the ranks that a button acts on: those selected, or the pinned one, or none for all. */
export function targets(session: MeshSession, selected: ReadonlySet<number>): number[] {
  if (selected.size) {
    return [...selected].sort((one, other) => one - other);
  }
  return session.pinned >= 0 ? [session.pinned] : [];
}

function busyWord(session: MeshSession, trans: Trans): string {
  switch (session.waits) {
    case 'cell':
      return trans.__('waiting for the running cell to end…');
    case 'kernel':
      return trans.__('waiting for the kernel…');
    default:
      return trans.__('working…');
  }
}

function waitsHelp(trans: Trans): string {
  return trans.__('While a cell is running, these buttons work only with the Monarch kernel');
}

interface Props {
  session: MeshSession;
  selected: ReadonlySet<number>;
  trans: Trans;
}

export function Actions({ session, selected, trans }: Props) {
  const [asks, setAsks] = useState(false);
  const group = useRef<HTMLDivElement>(null);
  const mesh = session.model.mesh!;
  const ranks = targets(session, selected);
  const rows = session.model.ranks.filter(row => row && (!ranks.length || ranks.includes(row.rank)));
  const failed = session.model.ranks.some(row => row?.state === 'failed');
  const useless = (action: Action) => {
    if (action === 'resume' && session.holds) {
      // A rank that is idle, or in C code, pauses later.
      return '';
    }
    const text = action === 'heal' && !failed ? trans.__('No rank is dead') : whyUseless(action, rows, trans);
    return [...session.pending.values()].includes(action) ? trans.__('In progress') : text;
  };
  if (mesh.ended || session.link !== 'live' || !mesh.actions.length) {
    return null;
  }
  const run = (action: Action) => (action === 'kill' ? setAsks(true) : session.act(action, ranks));
  const cancel = () => {
    setAsks(false);
    group.current?.querySelector<HTMLElement>('.mk-act-kill')?.focus();
  };
  const only = session.model.isPart || session.model.ranks.length === 1 ? session.model.shown() : [];
  const scope = ranks.length || only.length ? namedRanks(ranks.length ? ranks : only, trans) : trans.__('all ranks');
  return (
    <div class="mk-actions" ref={group} role="group" aria-label={trans.__('Actions on %1', scope)}>
      <span class="mk-scope">{scope}</span>
      {mesh.actions.map(action => (
        <button
          type="button"
          key={action}
          class={`mk-button mk-act-${action}`}
          title={useless(action) || actionHelp(action, trans)}
          aria-label={`${actionWord(action, trans)}: ${scope}`}
          // One that is disabled would lose the focus.
          aria-disabled={Boolean(useless(action))}
          onClick={() => useless(action) || run(action)}
        >
          {actionWord(action, trans)}
        </button>
      ))}
      {session.pending.size > 0 && (
        <span class="mk-busy" role="status" title={session.waits === 'cell' ? waitsHelp(trans) : undefined}>
          {busyWord(session, trans)}
        </span>
      )}
      {asks && <Confirm session={session} ranks={ranks} trans={trans} close={cancel} />}
    </div>
  );
}

/** Asks before ranks are killed, and names the cost. */
function Confirm(props: { session: MeshSession; ranks: number[]; trans: Trans; close(): void }) {
  const { session, ranks, trans, close } = props;
  const first = useRef<HTMLButtonElement>(null);
  // Before the dialog is seen, so that a quick key reaches it.
  useLayoutEffect(() => first.current?.focus(), []);
  const meant = ranks.length || !session.model.isPart ? ranks : session.model.shown();
  const count = meant.length || session.model.ranks.length;
  const named = meant.length ? namedRanks(meant, trans) : trans._n('the only rank', 'all %1 ranks', count);
  const cost = trans._n(
    'Its process ends; its variables and its GPU memory are lost, and calls that wait for it fail.',
    'Their processes end; their variables and their GPU memory are lost, and calls that wait for them fail.',
    count
  );
  const kill = () => {
    session.act('kill', ranks);
    close();
  };
  const press = (event: KeyboardEvent) => {
    if (event.key === 'Escape') {
      event.stopPropagation();
      close();
    }
  };
  return (
    <div class="mk-confirm" role="alertdialog" aria-label={trans.__('Kill %1?', named)} onKeyDown={press}>
      <b>{trans.__('Kill %1?', named)}</b> {cost}
      <div class="mk-choices">
        <button type="button" class="mk-button" ref={first} onClick={close}>
          {trans.__('Cancel')}
        </button>
        <button type="button" class="mk-button mk-danger" onClick={kill}>
          {trans.__('Kill %1', named)}
        </button>
      </div>
    </div>
  );
}
