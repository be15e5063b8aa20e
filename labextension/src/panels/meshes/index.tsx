/** The Meshes panel of the sidebar. */

import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';
import { render } from 'preact';
import type { Settings } from '../../tokens';
import { addStyle, watchTheme } from '../../view/theme';
import type { Trans } from '../../view/trans';
import { MeshesBody } from './body';
import type { PanelModel } from './model';

export class MeshesPanel extends Widget {
  private stop: (() => void) | null = null;

  constructor(
    readonly model: PanelModel,
    private readonly settings: Settings,
    private readonly trans: Trans
  ) {
    super();
    this.id = 'monarch-meshes';
    this.addClass('mk-panel');
    this.title.caption = trans.__('Meshes');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('Meshes'));
  }

  /** Move the focus to the pinned rank, or the first. */
  focusGrid(): void {
    requestAnimationFrame(() => {
      const pinned = this.model.session?.pinned ?? -1;
      const tile =
        this.node.querySelector<HTMLElement>(`.mk-tile[data-rank="${pinned}"]`) ??
        this.node.querySelector<HTMLElement>('.mk-tile[tabindex="0"]');
      tile?.focus();
    });
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    const root = document.createElement('div');
    this.node.append(root);
    addStyle(root);
    this.stop = watchTheme(this.node, theme => {
      root.className = `mk-view mk-${theme}`;
      render(<MeshesBody model={this.model} settings={this.settings} theme={theme} trans={this.trans} />, root);
    });
  }

  protected override onBeforeDetach(message: Message): void {
    this.stop?.();
    const root = this.node.firstElementChild;
    if (root) {
      render(null, root);
      root.remove();
    }
    this.model.setShown(false);
    super.onBeforeDetach(message);
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.model.setShown(true);
  }

  protected override onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.model.setShown(false);
  }
}
