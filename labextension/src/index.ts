/** The plugins of the JupyterLab extension. All that Notebook 7 lacks is optional. */

import { ILabShell, ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator } from '@jupyterlab/translation';
import { addBadges, BadgePlace, type Badges } from './badges';
import { addCommands } from './commands';
import { meshesIcon } from './icon';
import { restoreOutputs } from './outputs';
import { MeshesPanel } from './panels/meshes';
import { PanelModel } from './panels/meshes/model';
import { updatePictures } from './pictures';
import { closePrompts } from './prompts';
import { Meshes } from './service';
import { StatusItem } from './status';
import { Commands, DEFAULT_SETTINGS, IMeshes, type Settings } from './tokens';
import { addStyle } from './view/theme';
import { ENGLISH, type Trans } from './view/trans';

const NAME = '@monarch-kernel/labextension';
const DOMAIN = 'monarch_kernel';

const service: JupyterFrontEndPlugin<IMeshes> = {
  id: `${NAME}:service`,
  description: 'The meshes of the open notebooks.',
  autoStart: true,
  requires: [INotebookTracker],
  provides: IMeshes,
  activate: (_: JupyterFrontEnd, tracker: INotebookTracker) => {
    const meshes = new Meshes(tracker);
    meshes.added.connect((_, link) => {
      restoreOutputs(link);
      updatePictures(link);
      closePrompts(link);
    });
    return meshes;
  }
};

const plugin: JupyterFrontEndPlugin<void> = {
  id: `${NAME}:plugin`,
  description: 'The Meshes panel, its commands, and the badges of cells.',
  autoStart: true,
  requires: [IMeshes],
  optional: [
    ITranslator,
    ISettingRegistry,
    ICommandPalette,
    ILabShell,
    ILauncher,
    IStatusBar,
    IToolbarWidgetRegistry,
    ILayoutRestorer
  ],
  activate: async (
    app: JupyterFrontEnd,
    meshes: IMeshes,
    translator: ITranslator | null,
    registry: ISettingRegistry | null,
    palette: ICommandPalette | null,
    labShell: ILabShell | null,
    launcher: ILauncher | null,
    statusBar: IStatusBar | null,
    toolbars: IToolbarWidgetRegistry | null,
    restorer: ILayoutRestorer | null
  ) => {
    const trans: Trans = translator?.load(DOMAIN) ?? ENGLISH;
    const settings = { ...DEFAULT_SETTINGS };
    addStyle(document.body);

    const panel = new MeshesPanel(new PanelModel(meshes), settings, trans);
    panel.title.icon = meshesIcon;
    app.shell.add(panel, 'right', { rank: 900, type: 'Meshes' });
    // A page that is opened again has the panel as it was.
    restorer?.add(panel, panel.id);
    const show = () => app.shell.activateById(panel.id);
    addCommands(app, panel, palette, trans, show);

    const badges: Badges[] = [];
    const decorate = (link: (typeof meshes.links)[number]) => badges.push(addBadges(link, settings, trans));
    meshes.links.forEach(decorate);
    meshes.added.connect((_, link) => decorate(link));
    const drawBadges = () => {
      for (const each of badges) {
        each.draw();
      }
    };
    toolbars?.addFactory('Cell', 'monarch-ranks', () => new BadgePlace(drawBadges));

    launcher?.add({ command: Commands.create, category: trans.__('Other'), args: { isLauncher: true }, rank: 10 });
    const item = statusBar && new StatusItem(meshes, settings, trans, show);
    if (item) {
      statusBar.registerStatusItem(`${NAME}:status`, {
        item,
        align: 'left',
        rank: 6,
        isActive: () => item.active,
        activeStateChanged: meshes.changed
      });
    }
    labShell?.layoutModified.connect(() => panel.model.setShown(panel.isVisible));

    await follow(registry, settings, () => {
      item?.draw();
      drawBadges();
      panel.model.changed.emit();
    });
  }
};

/** Read the settings, now and when they change. */
async function follow(registry: ISettingRegistry | null, settings: Settings, changed: () => void): Promise<void> {
  const loaded = await registry?.load(plugin.id).catch((error: unknown) => {
    console.warn('Monarch: cannot read the settings; using the defaults.', error);
    return null;
  });
  const read = () => {
    Object.assign(settings, loaded?.composite);
    changed();
  };
  loaded?.changed.connect(read);
  read();
}

export default [service, plugin];
