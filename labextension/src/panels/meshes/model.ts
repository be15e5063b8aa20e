/** Which mesh the panel shows, and its session. */

import { Signal } from '@lumino/signaling';
import type { MeshSummary } from '../../protocol';
import { MeshSession } from '../../session';
import type { IKernelLink, IMeshes } from '../../tokens';

export class PanelModel {
  readonly changed = new Signal<this, void>(this);
  session: MeshSession | null = null;
  tab: 'view' | 'logs' = 'view';
  private link: IKernelLink | null = null;
  private shown = false;
  /** The mesh that a person has chosen. */
  private chosen = '';

  constructor(private readonly meshes: IMeshes) {
    meshes.changed.connect(this.update, this);
    this.update();
  }

  get current(): IKernelLink | null {
    return this.link;
  }

  /** The mesh on show: the chosen one while it is there, or else the notebook's current one, or its first. */
  get summary(): MeshSummary | null {
    return pickMesh(this.link?.meshes ?? [], this.chosen);
  }

  choose(uid: string): void {
    this.chosen = uid;
    this.update();
  }

  showTab(tab: 'view' | 'logs'): void {
    this.tab = tab;
    this.changed.emit();
  }

  /** Messages come only while the panel is visible. */
  setShown(shown: boolean): void {
    this.shown = shown;
    this.update();
  }

  /** The ranks that have failed, in order. */
  get failed(): number[] {
    return this.session?.model.ranks.filter(row => row?.state === 'failed').map(row => row.rank) ?? [];
  }

  /** Pin the next failed rank, or the previous one. */
  stepFailed(direction: 1 | -1): void {
    const { session } = this;
    if (session && session.link === 'connecting') {
      // The panel has just been opened: its ranks come soon.
      const stop = session.onChange(() => {
        if (session.link !== 'connecting') {
          stop();
          this.stepFailed(direction);
        }
      });
      return;
    }
    const rank = nextFailed(this.failed, session?.pinned ?? -1, direction);
    if (rank >= 0) {
      session?.pin(rank);
    }
  }

  private update(): void {
    const { current } = this.meshes;
    if (current !== this.link) {
      this.link?.reconnected.disconnect(this.reopen, this);
      this.link = current;
      this.link?.reconnected.connect(this.reopen, this);
    }
    const { summary } = this;
    const open = this.shown && this.link?.state === 'live' && summary && !summary.detached;
    this.use(open ? summary.uid : '');
    this.changed.emit();
  }

  private use(uid: string): void {
    const { session, link } = this;
    const gone =
      session !== null &&
      (link?.state === 'dead' || link?.state === 'restarting') &&
      this.shown &&
      session.channel === link;
    if (gone) {
      session.lose('');
    } else if (session && (session.uid !== uid || session.channel !== link || session.link === 'lost')) {
      session.close();
      this.session = null;
    }
    if (uid && link && !this.session) {
      this.session = new MeshSession(link, uid);
    }
  }

  private reopen(): void {
    this.session?.reopen();
  }
}

export function pickMesh(meshes: readonly MeshSummary[], chosen: string): MeshSummary | null {
  const own = meshes.filter(isOwn);
  return meshes.find(mesh => mesh.uid === chosen) ?? own.find(mesh => mesh.current) ?? own[0] ?? null;
}

/** Whether a mesh is this notebook's. */
export function isOwn(mesh: MeshSummary): boolean {
  return !mesh.owner && !mesh.detached;
}

/** Return the failed rank after or before one, going round; -1 if none has failed. */
export function nextFailed(failed: number[], from: number, direction: 1 | -1): number {
  const ordered = direction > 0 ? failed : [...failed].reverse();
  const after = ordered.find(rank => (direction > 0 ? rank > from : from >= 0 && rank < from));
  return after ?? ordered[0] ?? -1;
}
