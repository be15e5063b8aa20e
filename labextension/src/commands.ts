/** The commands of the palette. */

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, type ICommandPalette, Notification, showDialog } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { Widget } from '@lumino/widgets';
import { ask } from './asking';
import { meshesIcon } from './icon';
import type { MeshesPanel } from './panels/meshes';
import { whyNot } from './panels/meshes/body';
import type { PanelModel } from './panels/meshes/model';
import type { Action } from './protocol';
import { Commands } from './tokens';
import { actionWord } from './view/actions';
import type { Trans } from './view/trans';

/** First cells of a notebook from the launcher. */
const START = ['%mesh up 4', '%%mesh\nprint(f"rank {rank} of {world_size}")'];

/** Characters of a notification; JupyterLab cuts longer ones. */
const LONGEST = 140;
/** Time for which a notification is shown, in ms; without one JupyterLab only counts it. */
const AUTO_CLOSE = 8000;

/** Add the commands; `show` opens the panel. */
export function addCommands(
  app: JupyterFrontEnd,
  panel: MeshesPanel,
  palette: ICommandPalette | null,
  trans: Trans,
  show: () => void
): void {
  const { commands } = app;
  const { model } = panel;
  const act = (action: Action) => {
    const { session } = model;
    const reason = whyNot(model, trans);
    if (reason) {
      Notification.warning(reason, { autoClose: AUTO_CLOSE });
    } else if (session) {
      session.act(action, session.pinned >= 0 ? [session.pinned] : []);
    } else {
      void actAside(model, action, trans);
    }
  };
  const step = (direction: 1 | -1) => {
    show();
    model.stepFailed(direction);
    panel.focusGrid();
  };
  const add = (id: string, label: string, execute: () => void) => {
    commands.addCommand(id, { label, execute, describedBy: { args: { type: 'object', properties: {} } } });
    palette?.addItem({ command: id, category: trans.__('Monarch') });
  };
  add(Commands.show, trans.__('Show Meshes'), () => {
    show();
    model.showTab('view');
    panel.focusGrid();
  });
  add(Commands.logs, trans.__('Show Rank Logs'), () => {
    show();
    model.showTab('logs');
  });
  add(Commands.interrupt, trans.__('Interrupt Ranks'), () => act('interrupt'));
  add(Commands.pause, trans.__('Pause Ranks'), () => act('pause'));
  add(Commands.resume, trans.__('Resume Ranks'), () => act('resume'));
  add(Commands.heal, trans.__('Heal Dead Ranks'), () => act('heal'));
  add(Commands.stacks, trans.__('Dump Rank Stacks'), () => act('stacks'));
  add(Commands.nextFailed, trans.__('Next Dead Rank'), () => step(1));
  add(Commands.previousFailed, trans.__('Previous Dead Rank'), () => step(-1));
  commands.addCommand(Commands.create, {
    label: args => (args.isLauncher ? trans.__('Mesh Notebook') : trans.__('New Mesh Notebook')),
    caption: trans.__('A notebook that starts a mesh of ranks'),
    icon: meshesIcon,
    execute: args => createNotebook(app, String(args.cwd ?? '')),
    describedBy: { args: { type: 'object', properties: { cwd: { type: 'string' }, isLauncher: { type: 'boolean' } } } }
  });
  palette?.addItem({ command: Commands.create, category: trans.__('Monarch') });
}

/** Act on all ranks of the notebook's mesh while no view shows it, and say the outcome. */
async function actAside({ current, summary }: PanelModel, action: Action, trans: Trans): Promise<void> {
  if (!current || !summary) {
    return;
  }
  const title = `${actionWord(action, trans)}: ${summary.name}`;
  const { ok, text } = await ask(current, summary.uid, action, trans);
  if (text.length > LONGEST || text.includes('\n')) {
    const body = new Widget();
    body.node.append(Object.assign(document.createElement('pre'), { className: 'mk-outcome', textContent: text }));
    await showDialog({ title, body, buttons: [Dialog.okButton()] });
  } else {
    Notification.emit(text || title, ok ? 'success' : 'error', { autoClose: ok ? AUTO_CLOSE : false });
  }
}

/** Open a notebook with the kernel Monarch and cells that start a mesh. */
async function createNotebook(app: JupyterFrontEnd, cwd: string): Promise<unknown> {
  const panel: NotebookPanel = await app.commands.execute('notebook:create-new', { kernelName: 'monarch', cwd });
  await panel.context.ready;
  const shared = panel.content.model?.sharedModel;
  shared?.transact(() => {
    shared.deleteCellRange(0, shared.cells.length);
    shared.insertCells(
      0,
      START.map(source => ({ cell_type: 'code', source, metadata: {} }))
    );
  });
  return panel;
}
