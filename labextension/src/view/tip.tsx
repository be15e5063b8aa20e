import { useLayoutEffect, useRef } from 'preact/hooks';
import type { MeshSession } from '../session';
import type { Trans } from './trans';
import { bytes, doing, duration } from './words';

interface Props {
  session: MeshSession;
  rank: number;
  tile: HTMLElement;
  trans: Trans;
}

/** What the rank under the pointer does. Its tile's label says the same to screen readers. */
export function Tip({ session, rank, tile, trans }: Props) {
  const ref = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const tip = ref.current!;
    const at = tile.getBoundingClientRect();
    const frame = (tip.offsetParent ?? document.documentElement).getBoundingClientRect();
    const left = Math.min(
      Math.max(0, at.left - frame.left + at.width / 2 - tip.offsetWidth / 2),
      frame.width - tip.offsetWidth
    );
    const above = at.top - frame.top - tip.offsetHeight - 6;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${above < 0 ? at.bottom - frame.top + 6 : above}px`;
  });
  const row = session.model.ranks[rank];
  if (!row) {
    return null;
  }
  const host = session.model.mesh?.hosts[rank];
  const memory = [row.rss && bytes(row.rss), row.gpu_memory && trans.__('GPU %1', bytes(row.gpu_memory))];
  const since = duration(session.model.now() - row.since, trans);
  const facts = [
    host,
    row.device,
    row.load > 0.005 && trans.__('load %1 %', Math.round(row.load * 100)),
    ...memory,
    row.queue > 1 && trans.__('%1 calls queued', row.queue),
    row.restarts > 0 && trans._n('restarted once', 'restarted %1 times', row.restarts)
  ];
  return (
    <div class="mk-tip" ref={ref} aria-hidden="true">
      <b>{trans.__('rank %1', rank)}</b> {doing(row, trans)} · {since}
      <div>{facts.filter(Boolean).join(' · ')}</div>
    </div>
  );
}
