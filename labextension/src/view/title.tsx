import type { MeshSession } from '../session';
import type { Trans } from './trans';
import { duration, namedRanks } from './words';

interface Props {
  session: MeshSession;
  trans: Trans;
}

/** The mesh's name, shape and age. */
export function Title({ session, trans }: Props) {
  const { model } = session;
  const mesh = model.mesh!;
  const shape = mesh.labels.map((label, at) => `${mesh.sizes[at]} ${label}`).join(' × ');
  const age = duration(model.now() - mesh.started, trans);
  // Where the kernel is silent, whether the mesh is up is unknown.
  const isKnown = session.link !== 'lost' || Boolean(mesh.ended);
  return (
    <div class="mk-title">
      <h3>{mesh.name || trans.__('mesh')}</h3>
      <span>
        {model.isPart
          ? trans.__('%1 of %2', namedRanks(model.shown(), trans), mesh.hosts.length)
          : trans._n('1 rank', '%1 ranks', model.ranks.length)}
        {mesh.labels.length > 1 && !model.isPart && ` (${shape})`}
        {isKnown && ' · '}
        {isKnown && (mesh.ended ? trans.__('ran for %1', age) : trans.__('up for %1', age))}
      </span>
    </div>
  );
}

/** Why there is nothing to see, or why what is seen no longer changes. */
export function Status({ session, trans }: Props) {
  const text = statusText(session, trans);
  return text ? (
    <p class="mk-status" role="status">
      {text}
    </p>
  ) : null;
}

export function statusText(session: MeshSession, trans: Trans): string {
  const { link, reason, model } = session;
  if (link === 'lost') {
    return reason || trans.__('The kernel is not running. This is the last state that it sent.');
  }
  if (link === 'gone') {
    return reason || trans.__('The kernel no longer has this mesh.');
  }
  if (!model.mesh) {
    return session.slow
      ? trans.__('The kernel is not responding. If it has ended, run the cell again for a live view.')
      : trans.__('Waiting for the kernel…');
  }
  if (model.mesh.ended) {
    return model.mesh.reason ? trans.__('The mesh has ended: %1', model.mesh.reason) : trans.__('The mesh has ended.');
  }
  return model.ranks.length ? '' : trans.__('The mesh has no ranks yet.');
}
