/** Follows the open notebooks. */

import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { type ISignal, Signal } from '@lumino/signaling';
import { KernelLink } from './link';
import type { IKernelLink, IMeshes } from './tokens';

export class Meshes implements IMeshes {
  private readonly byPanel = new Map<NotebookPanel, KernelLink>();
  private readonly _changed = new Signal<this, void>(this);
  private readonly _added = new Signal<this, IKernelLink>(this);

  constructor(private readonly tracker: INotebookTracker) {
    tracker.widgetAdded.connect((_, panel) => this.add(panel));
    tracker.forEach(panel => {
      this.add(panel);
    });
    tracker.currentChanged.connect(() => this._changed.emit());
  }

  get current(): IKernelLink | null {
    const panel = this.tracker.currentWidget;
    return (panel && this.byPanel.get(panel)) ?? null;
  }

  get links(): readonly IKernelLink[] {
    return [...this.byPanel.values()];
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get added(): ISignal<this, IKernelLink> {
    return this._added;
  }

  private add(panel: NotebookPanel): void {
    if (this.byPanel.has(panel)) {
      return;
    }
    const link = new KernelLink(panel);
    this.byPanel.set(panel, link);
    panel.disposed.connect(() => {
      this.byPanel.delete(panel);
      this._changed.emit();
    });
    link.changed.connect(() => {
      if (this.current === link) {
        this._changed.emit();
      }
    });
    this._added.emit(link);
    this._changed.emit();
  }
}
