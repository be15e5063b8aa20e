/** The conversation with the kernel of one notebook, over the comm `monarch.meshes`. */

import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import { type ISignal, Signal } from '@lumino/signaling';
import { tellEnded } from './ended';
import { type CellTarget, type FromKernel, type FromView, type MeshSummary, TARGET, VERSION } from './protocol';
import type { IKernelLink, LinkState } from './tokens';

export class KernelLink implements IKernelLink {
  state: LinkState = 'none';
  meshes: readonly MeshSummary[] = [];
  readonly targets = new Map<string, CellTarget>();
  isDisposed = false;
  private readonly _changed = new Signal<this, void>(this);
  private readonly _received = new Signal<this, FromKernel>(this);
  private readonly _reconnected = new Signal<this, void>(this);
  private kernel: Kernel.IKernelConnection | null = null;
  private comm: Kernel.IComm | null = null;

  constructor(readonly panel: NotebookPanel) {
    const { sessionContext } = panel;
    sessionContext.kernelChanged.connect(this.follow, this);
    sessionContext.statusChanged.connect(this.onStatus, this);
    sessionContext.connectionStatusChanged.connect(this.onConnection, this);
    sessionContext.iopubMessage.connect(this.onOutput, this);
    panel.disposed.connect(this.dispose, this);
    this.follow();
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get received(): ISignal<this, FromKernel> {
    return this._received;
  }

  get reconnected(): ISignal<this, void> {
    return this._reconnected;
  }

  send(message: FromView): void {
    if (this.comm && !this.comm.isDisposed) {
      this.comm.send(message as never);
    }
  }

  listen(handler: (message: FromKernel) => void): () => void {
    const slot = (_: unknown, message: FromKernel) => handler(message);
    this._received.connect(slot);
    return () => this._received.disconnect(slot);
  }

  dispose(): void {
    if (!this.isDisposed) {
      this.isDisposed = true;
      this.drop('none');
      Signal.clearData(this);
    }
  }

  /** The notebook has another kernel. */
  private follow(): void {
    const kernel = this.panel.sessionContext.session?.kernel ?? null;
    if (kernel !== this.kernel) {
      this.drop('none');
      this.kernel = kernel;
      void this.greet();
    }
  }

  /** Connect if the kernel is Monarch's, or one with meshes; any other would only complain about an unknown comm. */
  private async greet(): Promise<void> {
    const kernel = this.kernel;
    const info = await kernel?.info.catch(() => null);
    const talks = info?.implementation === 'monarch' || (kernel && info && (await hasTalked(kernel)));
    if (talks && kernel === this.kernel && !this.isDisposed && this.state === 'none') {
      this.connect();
    }
  }

  private connect(): void {
    const { kernel } = this;
    if (!kernel || kernel.isDisposed || this.isDisposed || (this.comm && !this.comm.isDisposed)) {
      return;
    }
    const comm = kernel.createComm(TARGET);
    this.comm = comm;
    comm.onMsg = message => this.take(message.content.data as unknown as FromKernel);
    comm.onClose = () => {
      if (comm === this.comm) {
        this.drop('none');
      }
    };
    this.set('connecting');
    comm.open({ version: VERSION });
    this.send({ kind: 'list_meshes', version: VERSION });
    this._reconnected.emit();
  }

  /** Forget what a kernel has said. */
  private drop(state: LinkState): void {
    const { comm } = this;
    this.comm = null;
    if (comm && !comm.isDisposed && this.kernel && !this.kernel.isDisposed && state === 'none') {
      comm.close();
    }
    this.meshes = [];
    this.targets.clear();
    this.set(state);
  }

  private set(state: LinkState): void {
    this.state = state;
    if (!this.isDisposed) {
      this._changed.emit();
    }
  }

  private take(message: FromKernel): void {
    if (message.kind === 'meshes') {
      this.meshes = message.meshes;
      this.set('live');
    } else if (message.kind === 'targets') {
      for (const target of message.targets) {
        this.targets.set(target.cell, target);
      }
      this._changed.emit();
    }
    this._received.emit(message);
  }

  /** A restart ends all comms; a new one opens when the new process is there. */
  private onStatus(_: unknown, status: Kernel.Status): void {
    const restarts = status === 'restarting' || status === 'autorestarting';
    if (restarts || status === 'dead' || status === 'terminating') {
      if (this.state !== 'none') {
        tellEnded(this.meshes.filter(mesh => !mesh.owner && !mesh.detached).map(mesh => mesh.uid));
        this.drop(restarts ? 'restarting' : 'dead');
      }
    } else if ((this.state === 'dead' || this.state === 'restarting') && (status === 'idle' || status === 'busy')) {
      this.connect();
    }
  }

  /** Messages are lost while the connection is. */
  private onConnection(_: unknown, status: Kernel.ConnectionStatus): void {
    if (status === 'connected' && this.comm && !this.comm.isDisposed && this.state === 'live') {
      this.send({ kind: 'list_meshes', version: VERSION });
      this._reconnected.emit();
    }
  }

  /** A cell that loads the extension makes any IPython kernel one with meshes. */
  private onOutput(_: unknown, message: KernelMessage.IMessage): void {
    if (message.header.msg_type === 'execute_input' && this.state === 'none') {
      const { code } = message.content as { code: string };
      if (/\b(re)?load_ext\b['"),\s]*\(?['"]?monarch_kernel\b/.test(code)) {
        this.connect();
      }
    }
  }
}

/** Whether a page has a comm with a kernel already, as before it was loaded again: the kernel has the extension. */
async function hasTalked(kernel: Kernel.IKernelConnection): Promise<boolean> {
  const reply = await kernel.requestCommInfo({ target_name: TARGET }).catch(() => null);
  return reply?.content.status === 'ok' && Object.keys(reply.content.comms).length > 0;
}
