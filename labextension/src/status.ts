/** The status bar's item: "8 ranks, 1 dead, 2 paused". */

import { Widget } from '@lumino/widgets';
import type { MeshSummary } from './protocol';
import type { IMeshes, Settings } from './tokens';
import type { Trans } from './view/trans';

export class StatusItem extends Widget {
  /** Whether there is anything to show; the status bar hides the item otherwise. */
  active = false;
  private readonly button = document.createElement('button');

  constructor(
    private readonly meshes: IMeshes,
    private readonly settings: Settings,
    private readonly trans: Trans,
    open: () => void
  ) {
    super();
    this.button.type = 'button';
    this.button.title = trans.__('Show the meshes of this notebook');
    this.button.addEventListener('click', open);
    this.node.append(this.button);
    meshes.changed.connect(this.draw, this);
    this.draw();
  }

  draw(): void {
    const own = (this.meshes.current?.meshes ?? []).filter(mesh => !mesh.owner);
    this.active = own.length > 0 && this.settings.statusBar;
    this.setHidden(!this.active);
    const failed = own.some(mesh => mesh.failed);
    this.button.className = failed ? 'mk-statusbar mk-wrong' : 'mk-statusbar';
    this.button.textContent = `${failed ? '✕ ' : ''}${summary(own, this.trans)}`;
  }
}

/** Return the ranks of all meshes, and how many are dead or paused. */
export function summary(meshes: readonly MeshSummary[], trans: Trans): string {
  const sum = (of: (mesh: MeshSummary) => number) => meshes.reduce((total, mesh) => total + of(mesh), 0);
  const ranks = trans._n(
    '1 rank',
    '%1 ranks',
    sum(mesh => mesh.ranks)
  );
  const failed = sum(mesh => mesh.failed);
  const paused = sum(mesh => mesh.paused ?? 0);
  const parts = [failed && trans.__('%1 dead', failed), paused && trans.__('%1 paused', paused)];
  return [ranks, ...parts.filter(Boolean)].join(', ');
}
