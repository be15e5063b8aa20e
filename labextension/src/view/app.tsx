/** The view of a mesh, the same under a cell and in the Meshes panel. */

import type { RefObject } from 'preact';
import { useEffect, useReducer, useRef, useState } from 'preact/hooks';
import type { State } from '../protocol';
import type { MeshSession } from '../session';
import { Actions } from './actions';
import { Bars } from './bars';
import { Calls } from './calls';
import type { ChartColours } from './chart';
import { Details } from './details';
import { Failures } from './failures';
import { Grid } from './grid';
import { Legend } from './legend';
import { Metrics } from './metrics';
import type { Theme } from './palette';
import { Timeline } from './timeline';
import { Tip } from './tip';
import { Status, Title } from './title';
import type { Trans } from './trans';

export interface Props {
  session: MeshSession;
  theme: Theme;
  trans: Trans;
  /** What the panel shows below the grid instead of metrics and timeline. */
  children?: unknown;
}

const COLOURS: Record<Theme, ChartColours> = {
  light: { ink: '#1f2328', muted: '#57606a', rule: '#e3e7eb', accent: '#1b6ec2' },
  dark: { ink: '#e6e8eb', muted: '#a8b0ba', rule: '#2c333b', accent: '#6db3f8' }
};
/** How often texts and charts follow, in ms; tiles follow with each frame. */
const SLOW = 200;
/** The same for more than 256 ranks. */
const SLOWER = 400;

export function MeshApp({ session, theme, trans }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const grid = useRef<Grid | null>(null);
  const [only, setOnly] = useState<State | null>(null);
  const [selected, setSelected] = useState<ReadonlySet<number>>(new Set());
  const [pointed, setPointed] = useState<{ rank: number; tile: HTMLElement } | null>(null);
  usePace(session, place, () => grid.current?.update());

  const ready = session.model.mesh !== null;
  useEffect(() => {
    if (!place.current) {
      return;
    }
    const made = new Grid(place.current, session, trans, {
      pin: rank => session.pin(session.pinned === rank ? -1 : rank),
      unpin: () => {
        session.pin(-1);
        setSelected(new Set());
      },
      select: rank => setSelected(set => toggled(set, rank)),
      point: (rank, tile) => setPointed(tile && { rank, tile })
    });
    grid.current = made;
    const observer = new ResizeObserver(() => made.resize(place.current?.clientWidth ?? 0));
    observer.observe(place.current);
    made.resize(place.current.clientWidth);
    return () => {
      observer.disconnect();
      made.dispose();
    };
  }, [session, ready]);
  // A state that no rank is in any more would leave all of them pale.
  const shown = only && session.model.ranks.some(row => row?.state === only) ? only : null;
  useEffect(() => grid.current?.mark(session.pinned, selected, shown));

  if (!ready) {
    return <Status session={session} trans={trans} />;
  }
  const colours = COLOURS[theme];
  // What has the focus goes, and the next key must not go to the page around.
  const unpin = () => {
    const rank = session.pinned;
    session.pin(-1);
    grid.current?.focus(rank);
  };
  const dismiss = () => {
    session.dismiss();
    grid.current?.focus();
  };
  return (
    <>
      <Title session={session} trans={trans} />
      <Status session={session} trans={trans} />
      <Actions session={session} selected={selected} trans={trans} />
      {session.note && (
        <p class={`mk-note${session.note.ok ? '' : ' mk-bad'}`} role="status">
          <span class={session.note.text.includes('\n') ? 'mk-lines' : undefined}>{session.note.text}</span>
          <button type="button" class="mk-close" aria-label={trans.__('Dismiss')} onClick={dismiss}>
            ×
          </button>
        </p>
      )}
      <Bars model={session.model} trans={trans} />
      <div class={`mk-main${session.pinned >= 0 ? ' mk-split' : ''}`}>
        <div class="mk-left">
          <Legend model={session.model} only={only} trans={trans} choose={setOnly} />
          <div ref={place} class="mk-grid" />
          <Calls model={session.model} trans={trans} />
        </div>
        <Details session={session} trans={trans} close={unpin} />
        <div class="mk-below">
          <Metrics model={session.model} colours={colours} trans={trans} />
          <Timeline model={session.model} theme={theme} colours={colours} trans={trans} />
        </div>
      </div>
      {pointed && pointed.rank !== session.pinned && (
        <Tip session={session} rank={pointed.rank} tile={pointed.tile} trans={trans} />
      )}
      <Failures session={session} trans={trans} />
    </>
  );
}

function toggled(set: ReadonlySet<number>, rank: number): ReadonlySet<number> {
  const next = new Set(set);
  next.delete(rank) || next.add(rank);
  return next;
}

/** Call `fast` with each frame after a change, and render again at a slower pace, and each second, while on the page. */
function usePace(session: MeshSession, place: RefObject<HTMLElement>, fast: () => void): void {
  const [, render] = useReducer((count: number) => count + 1, 0);
  const latest = useRef(fast);
  latest.current = fast;
  useEffect(() => {
    let frame = 0;
    let timer: ReturnType<typeof setTimeout> | null = null;
    const slowly = () => {
      timer = null;
      render(0);
    };
    const change = () => {
      if (place.current && !place.current.isConnected) {
        return;
      }
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        latest.current();
      });
      timer ??= setTimeout(slowly, session.model.ranks.length > 256 ? SLOWER : SLOW);
    };
    const stop = session.onChange(change);
    // Times continue without any message.
    const clock = setInterval(change, 1000);
    render(0);
    return () => {
      stop();
      clearInterval(clock);
      cancelAnimationFrame(frame);
      clearTimeout(timer ?? undefined);
    };
  }, [session]);
}
