/** Parts for tests: messages of a small mesh, and a channel without a kernel. */

import type { FromKernel, FromView, MeshRow, Patch, RankRow, Snapshot } from './protocol';
import type { Channel } from './session';

export function meshRow(count: number, change: Partial<MeshRow> = {}): MeshRow {
  return {
    uid: 'mesh-1',
    name: 'trainers',
    labels: ['gpus'],
    sizes: [count],
    hosts: Array(count).fill('node-0'),
    started: 1000,
    actions: ['interrupt', 'pause', 'resume', 'heal', 'kill', 'stacks'],
    ...change
  };
}

export function rankRow(rank: number, change: Partial<RankRow> = {}): RankRow {
  return { rank, state: 'idle', since: 1000, ...change };
}

export function snapshotOf(count: number, change: Partial<Snapshot> = {}): Snapshot {
  const ranks = Array.from({ length: count }, (_, rank) => rankRow(rank));
  const rest = { calls: [], spans: [], points: [], bars: [] };
  return { kind: 'snapshot', now: 1010, number: 1, mesh: meshRow(count), ranks, ...rest, ...change };
}

export function patchOf(after: number, change: Partial<Patch> = {}): Patch {
  return { kind: 'patch', uid: 'mesh-1', now: 1011, after, number: after + 1, ...change };
}

/** Records what a view sends; `tell` is the kernel. */
export class TestChannel implements Channel {
  readonly sent: FromView[] = [];
  private readonly handlers = new Set<(message: FromKernel) => void>();

  send(message: FromView): void {
    this.sent.push(message);
  }

  listen(handler: (message: FromKernel) => void): () => void {
    this.handlers.add(handler);
    return () => this.handlers.delete(handler);
  }

  tell(...messages: FromKernel[]): void {
    for (const message of messages) {
      for (const handler of this.handlers) {
        handler(message);
      }
    }
  }

  /** The kinds of messages that were sent. */
  get kinds(): string[] {
    return this.sent.map(message => message.kind);
  }

  get listeners(): number {
    return this.handlers.size;
  }
}
