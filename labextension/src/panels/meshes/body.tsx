import { useEffect, useReducer } from 'preact/hooks';
import type { MeshSummary } from '../../protocol';
import type { Settings } from '../../tokens';
import { MeshApp } from '../../view/app';
import type { Theme } from '../../view/palette';
import type { Trans } from '../../view/trans';
import { LogsBody } from '../logs/body';
import { isOwn, type PanelModel } from './model';

interface Props {
  model: PanelModel;
  settings: Settings;
  theme: Theme;
  trans: Trans;
}

/** The meshes of the current notebook, and one of them. */
export function MeshesBody({ model, settings, theme, trans }: Props) {
  const [, render] = useReducer((count: number) => count + 1, 0);
  useEffect(() => {
    const slot = () => render(0);
    model.changed.connect(slot);
    return () => {
      model.changed.disconnect(slot);
    };
  }, [model]);
  const { session, summary } = model;
  const text = emptyText(model, trans);
  if (text || !session) {
    return (
      <>
        <p class="mk-status">{text || trans.__('Waiting for the kernel…')}</p>
        <MeshList model={model} chosen="" trans={trans} />
      </>
    );
  }
  if (summary && isForeign(summary)) {
    return (
      <>
        <MeshList model={model} chosen={summary.uid} trans={trans} />
        <p class="mk-status">{trans.__('Read-only: this mesh belongs to %1.', summary.owner ?? '')}</p>
        <MeshApp key={session.uid} session={session} theme={theme} trans={trans} />
      </>
    );
  }
  return (
    <>
      <MeshList model={model} chosen={summary?.uid ?? ''} trans={trans} />
      <div class="mk-tabs" role="tablist" aria-label={trans.__('Mesh details')}>
        <Tab model={model} tab="view" label={trans.__('Ranks')} />
        <Tab model={model} tab="logs" label={trans.__('Logs')} />
      </div>
      <div role="tabpanel" aria-label={model.tab === 'view' ? trans.__('Ranks') : trans.__('Logs')}>
        {model.tab === 'view' ? (
          <MeshApp key={session.uid} session={session} theme={theme} trans={trans} />
        ) : (
          <LogsBody key={session.uid} session={session} most={settings.logLines} trans={trans} />
        )}
      </div>
    </>
  );
}

function Tab({ model, tab, label }: { model: PanelModel; tab: 'view' | 'logs'; label: string }) {
  const chosen = model.tab === tab;
  const press = (event: KeyboardEvent) => {
    if (event.key === 'ArrowLeft' || event.key === 'ArrowRight') {
      const other = (event.currentTarget as HTMLElement).parentElement?.querySelector<HTMLElement>(
        '[aria-selected=false]'
      );
      other?.focus();
      other?.click();
    }
  };
  return (
    <button
      type="button"
      role="tab"
      class="mk-tab"
      aria-selected={chosen}
      tabIndex={chosen ? 0 : -1}
      onClick={() => model.showTab(tab)}
      onKeyDown={press}
    >
      {label}
    </button>
  );
}

/** Return why there is no mesh to see; empty if there is one. */
export function emptyText(model: PanelModel, trans: Trans): string {
  const { current } = model;
  if (!current) {
    return trans.__('Open a notebook to see its meshes.');
  }
  switch (current.state) {
    case 'none':
      return trans.__(
        'The kernel of this notebook has no meshes. Select the Monarch kernel, or run %load_ext monarch_kernel.'
      );
    case 'restarting':
      return model.session ? '' : trans.__('The kernel is restarting. Its meshes have ended with it.');
    case 'dead':
      return model.session ? '' : trans.__('The kernel is not running. Its meshes have ended with it.');
    case 'connecting':
      return trans.__('Waiting for the kernel…');
    default:
      return emptyLiveText(model.summary, trans);
  }
}

/** Return why nothing can be done with the notebook's ranks; empty if it can. */
export function whyNot(model: PanelModel, trans: Trans): string {
  const { current, summary } = model;
  if (!current) {
    return trans.__('Open a notebook first: this command acts on its ranks.');
  }
  if (current.state === 'restarting') {
    return trans.__('The kernel is restarting. Its meshes have ended with it.');
  }
  if (current.state === 'dead') {
    return trans.__('The kernel is not running. Its meshes have ended with it.');
  }
  if (current.state === 'live' && summary && isForeign(summary)) {
    return trans.__('Mesh %1 belongs to %2. Choose a mesh of this notebook.', summary.name, summary.owner ?? '');
  }
  return emptyText(model, trans);
}

function emptyLiveText(summary: MeshSummary | null, trans: Trans): string {
  if (!summary) {
    return trans.__('No mesh is running. Start one with %mesh up in a cell.');
  }
  if (summary.taken) {
    return trans.__(
      'This mesh is in use by %1. When that has ended, run %mesh attach %2 to attach it here.',
      summary.owner ?? '',
      summary.name
    );
  }
  return summary.detached
    ? trans.__('This mesh is detached (%1). Run %mesh attach %2 to use it here.', summary.owner ?? '', summary.name)
    : '';
}

/** Whether a mesh is another kernel's, which can be seen only. */
function isForeign(mesh: MeshSummary): boolean {
  return Boolean(mesh.owner) && !mesh.detached;
}

/** A list of meshes, if there is a choice. */
function MeshList({ model, chosen, trans }: { model: PanelModel; chosen: string; trans: Trans }) {
  const meshes = model.current?.meshes ?? [];
  const groups: [string, MeshSummary[]][] = [
    ['', meshes.filter(isOwn)],
    [trans.__('Detached'), meshes.filter(mesh => mesh.detached)],
    [trans.__('Other notebooks'), meshes.filter(isForeign)]
  ];
  if (meshes.length < 2 && meshes.every(isOwn)) {
    return null;
  }
  return (
    <nav class="mk-meshes" aria-label={trans.__('Meshes')}>
      {groups
        .filter(([, rows]) => rows.length)
        .map(([title, rows]) => (
          <div key={title}>
            {title && <h5>{title}</h5>}
            {rows.map(mesh => (
              <button
                type="button"
                key={mesh.uid}
                class="mk-mesh"
                aria-current={mesh.uid === chosen}
                onClick={() => model.choose(mesh.uid)}
              >
                <b>{mesh.name}</b> {meshText(mesh, trans)}
              </button>
            ))}
          </div>
        ))}
    </nav>
  );
}

/** Return "8 ranks, 1 dead". */
export function meshText(mesh: MeshSummary, trans: Trans): string {
  // The ranks of a detached mesh are not known.
  const parts = mesh.ranks ? [trans._n('1 rank', '%1 ranks', mesh.ranks)] : [];
  if (mesh.failed) {
    parts.push(trans.__('%1 dead', mesh.failed));
  } else if (mesh.paused) {
    parts.push(trans.__('%1 paused', mesh.paused));
  } else if (mesh.running) {
    parts.push(trans.__('%1 running', mesh.running));
  }
  if (mesh.owner) {
    parts.push(mesh.owner);
  }
  return parts.join(', ');
}
