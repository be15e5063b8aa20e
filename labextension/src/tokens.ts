/** What the parts of the extension know of each other. */

import type { NotebookPanel } from '@jupyterlab/notebook';
import { Token } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import type { CellTarget, FromKernel, MeshSummary } from './protocol';
import type { Channel } from './session';

/**
 * Whether a kernel talks about meshes: `none` for other kernels, `dead` for one that has ended.
 */
export type LinkState = 'none' | 'connecting' | 'live' | 'restarting' | 'dead';

/** The conversation with the kernel of a notebook; it outlives restarts of the kernel. */
export interface IKernelLink extends Channel, IDisposable {
  readonly panel: NotebookPanel;
  readonly state: LinkState;
  readonly meshes: readonly MeshSummary[];
  /** The ranks that cells address, by id of the cell. */
  readonly targets: ReadonlyMap<string, CellTarget>;
  /** Emitted when any of these change. */
  readonly changed: ISignal<IKernelLink, void>;
  /** Emitted with each message. */
  readonly received: ISignal<IKernelLink, FromKernel>;
  /** Emitted when messages may have been lost: views ask for everything again. */
  readonly reconnected: ISignal<IKernelLink, void>;
}

/** The meshes of the notebooks that are open. */
export interface IMeshes {
  /** That of the current notebook. */
  readonly current: IKernelLink | null;
  /** Emitted when another notebook is current, or its meshes change. */
  readonly changed: ISignal<IMeshes, void>;
  /** All open notebooks. */
  readonly links: readonly IKernelLink[];
  /** Emitted when a notebook has been opened. */
  readonly added: ISignal<IMeshes, IKernelLink>;
}

export const IMeshes = new Token<IMeshes>('@monarch-kernel/labextension:IMeshes', 'The meshes of the open notebooks.');

/** Settings of the extension; the schema says what they mean. */
export interface Settings {
  badges: boolean;
  statusBar: boolean;
  logLines: number;
}

export const DEFAULT_SETTINGS: Settings = { badges: true, statusBar: true, logLines: 500 };

/** Ids of the commands. */
export const Commands = {
  show: 'monarch:show-meshes',
  logs: 'monarch:show-logs',
  interrupt: 'monarch:interrupt-ranks',
  pause: 'monarch:pause-ranks',
  resume: 'monarch:resume-ranks',
  heal: 'monarch:heal',
  stacks: 'monarch:dump-stacks',
  nextFailed: 'monarch:next-failed-rank',
  previousFailed: 'monarch:previous-failed-rank',
  create: 'monarch:new-notebook'
} as const;
