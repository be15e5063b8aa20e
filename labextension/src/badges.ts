/**
 * A badge on each `%%mesh` cell: the mesh and ranks that it addresses. A click changes them.
 *
 * JupyterLab has a toolbar on the active cell only. There the badge is an item of it; other cells have it in the corner.
 */

import { InputDialog } from '@jupyterlab/apputils';
import type { Cell } from '@jupyterlab/cells';
import { Widget } from '@lumino/widgets';
import { headerOf, headerStart, isMeshCell, targetOf, withTarget } from './header';
import type { CellTarget } from './protocol';
import type { IKernelLink, Settings } from './tokens';
import type { Trans } from './view/trans';

/** Time without a keystroke before the kernel is asked, in ms. */
const PAUSE = 400;
/** Time in which the toolbar of the active cell appears, in ms. */
const TOOLBAR = 100;
const BADGE = 'mk-badge';
const PLACE = 'mk-badge-place';

/** The place of a badge in the toolbar of a cell. */
export class BadgePlace extends Widget {
  /** @param fill puts badges into their places. */
  constructor(private readonly fill: () => void) {
    super();
    this.addClass(PLACE);
  }

  protected override onAfterAttach(): void {
    this.fill();
  }
}

export class Badges {
  /** The meshes when the kernel was asked. */
  private meshes = '';
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly link: IKernelLink,
    private readonly settings: Settings,
    private readonly trans: Trans
  ) {
    const { panel } = link;
    link.changed.connect(this.follow, this);
    link.reconnected.connect(this.soon, this);
    panel.content.modelContentChanged.connect(this.soon, this);
    panel.content.cellInViewportChanged?.connect(this.draw, this);
    panel.content.activeCellChanged.connect(() => setTimeout(() => this.draw(), TOOLBAR));
    panel.disposed.connect(() => clearTimeout(this.timer));
    void panel.revealed.then(() => this.soon());
  }

  /** Ask again after another mesh has come, or is in use. */
  private follow(): void {
    const meshes = JSON.stringify(this.link.meshes.map(mesh => [mesh.uid, mesh.name, mesh.ranks, mesh.current]));
    if (meshes !== this.meshes) {
      this.meshes = meshes;
      this.soon();
    }
    this.draw();
  }

  /** Show what is known of each cell. */
  draw(): void {
    for (const cell of this.cells()) {
      const source = cell.model.sharedModel.getSource();
      const target = this.link.targets.get(cell.model.id);
      // Without any mesh there is nothing to say.
      const known = target && (target.mesh || target.error);
      const shown = this.settings.badges && this.link.state === 'live' && known && isMeshCell(source);
      shown ? this.show(cell, target) : cell.node.querySelector(`.${BADGE}`)?.remove();
    }
  }

  private cells(): Cell[] {
    return this.link.panel.isDisposed
      ? []
      : this.link.panel.content.widgets.filter(cell => cell.model?.type === 'code');
  }

  /** Ask for the targets of all cells once nobody types. */
  private soon(): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), PAUSE);
  }

  private ask(): void {
    const sources = this.cells().map(cell => [cell.model.id, headerOf(cell.model.sharedModel.getSource())]);
    const mesh = sources.filter(([, line]) => isMeshCell(line));
    if (mesh.length && this.link.state === 'live' && this.settings.badges) {
      this.link.send({ kind: 'read_targets', cells: mesh.map(([id]) => id), lines: mesh.map(([, line]) => line) });
    }
    this.draw();
  }

  private show(cell: Cell, target: CellTarget): void {
    const corner = cell.inputArea?.editorWidget?.node ?? cell.inputArea?.node;
    const place = cell.node.querySelector<HTMLElement>(`.${PLACE}`) ?? corner;
    if (!place) {
      return;
    }
    const badge = cell.node.querySelector<HTMLButtonElement>(`.${BADGE}`) ?? this.make(cell);
    if (badge.parentElement !== place) {
      place.style.position = 'relative';
      place.append(badge);
    }
    const text = target.error || this.label(target);
    badge.className = target.error ? `${BADGE} mk-wrong` : BADGE;
    badge.textContent = target.error ? `⚠ ${remedy(text)}` : text;
    badge.title = target.error
      ? this.trans.__('%1. Click to change it.', text)
      : this.trans.__('This cell runs on %1. Click to change.', text);
    badge.setAttribute('aria-label', this.trans.__('Ranks of this cell: %1. Change them.', text));
    // Left of a toolbar that has no place for it, as the settings of JupyterLab may say.
    const bar = place === corner ? cell.node.querySelector<HTMLElement>('.jp-cell-toolbar') : null;
    badge.style.right = bar ? `${bar.offsetWidth + 14}px` : '';
  }

  private make(cell: Cell): HTMLButtonElement {
    const badge = document.createElement('button');
    badge.type = 'button';
    // Before a click is complete, the cell becomes active and the badge moves; and the editor would move its cursor.
    badge.addEventListener('mousedown', event => {
      event.stopPropagation();
      event.preventDefault();
      if (event.button === 0) {
        void this.change(cell);
      }
    });
    badge.addEventListener('click', event => {
      // Of the keyboard, or of a screen reader.
      if (event.detail === 0) {
        void this.change(cell);
      }
    });
    return badge;
  }

  private label({ mesh, ranks }: CellTarget): string {
    if (ranks === 'all') {
      return this.trans.__('%1 · all ranks', mesh);
    }
    const one = /^\d+$/.test(ranks);
    return one ? this.trans.__('%1 · rank %2', mesh, ranks) : this.trans.__('%1 · ranks %2', mesh, ranks);
  }

  /** Ask for other ranks, and write them into the first line of the cell. */
  private async change(cell: Cell): Promise<void> {
    const shared = cell.model.sharedModel;
    const source = shared.getSource();
    const start = headerStart(source);
    const line = headerOf(source);
    const answer = await InputDialog.getText({
      title: this.trans.__('Ranks of this cell'),
      label: this.trans.__('Mesh and ranks, as in trainers[0:4]; empty for all ranks of the current mesh'),
      text: targetOf(line)
    });
    if (answer.button.accept && answer.value !== null && shared.getSource() === source) {
      shared.updateSource(start, start + line.length, withTarget(line, answer.value ?? ''));
    }
  }
}

/** Return the part of an error that says what to write, for which there is room; else all of it. */
export function remedy(error: string): string {
  return error.match(/; (write .*)$/)?.[1] ?? error;
}

/** Add badges to a notebook. */
export function addBadges(link: IKernelLink, settings: Settings, trans: Trans): Badges {
  return new Badges(link, settings, trans);
}
