/** One view's conversation with the kernel about a mesh. */

import { MeshModel } from './model';
import {
  type Action,
  ALIVE_SECONDS,
  type Details,
  type Done,
  type FromKernel,
  type FromView,
  VERSION
} from './protocol';

/** Carries messages: the comm of a widget, or that of the panel. */
export interface Channel {
  send(message: FromView): void;
  /** Call a function with each message; return a function that ends this. */
  listen(handler: (message: FromKernel) => void): () => void;
}

/** What stands between a view and its mesh. */
export type Link = 'connecting' | 'live' | 'gone' | 'lost';

/** The result of an action, for a person. */
export interface Note {
  ok: boolean;
  text: string;
}

/** Least time for which the result of an action stays, in ms, and that of a failure. Stacks stay until dismissed. */
export const NOTE_STAYS = 12_000;
export const FAILURE_STAYS = 60_000;
/** Time to read a character, in ms. */
const READING = 80;
/** Time for the kernel to answer an action that was asked before the connection was lost and came back, in ms. */
export const LATE = 10_000;
/** Time for the kernel to take an action, in ms, before the view says that it waits. */
export const TAKEN = 2_000;
/** What is said then. The kernel may have received it. */
export const NOT_HEARD =
  'The connection to the kernel was lost before it answered. Check whether the action took effect before you try again.';
/** What is said where the kernel has not answered in time. It may also be inside C code. */
export const SILENT =
  'The kernel is not responding. This is the last state it sent; if it was restarted, run the cell again for a live view.';

/** What is said where the kernel is known to have ended. */
export const ENDED =
  'The kernel has ended or was restarted. This is the last state that it sent; run the cell again for a live view.';

let lastAction = 0;

/** Return an id for an action, which no other page uses. */
export function nextAction(): number {
  return Date.now() * 1000 + (lastAction++ % 1000);
}

export class MeshSession {
  readonly model: MeshModel;
  link: Link = 'connecting';
  /** Why the link is gone or lost. */
  reason = '';
  pinned = -1;
  details: Details | null = null;
  note: Note | null = null;
  /** Actions that have not ended, by id. */
  readonly pending = new Map<number, Action>();
  /** Those that the kernel has not taken yet, and whether they are late. */
  private readonly untaken = new Map<number, boolean>();
  private readonly handlers = new Set<() => void>();
  private readonly stop: () => void;
  private readonly alive: ReturnType<typeof setInterval>;
  /** Whether this view has paused ranks that have not gone on since: some may pause later. */
  holds = false;
  /** Whether a rank was paused since then. */
  private isHeld = false;
  /** What was shown of that. */
  private noteOfHold: Note | null = null;
  /** Whether the kernel has not answered the first question in time. */
  slow = false;
  /** Whether it says that it has heard this view, also while a cell runs. */
  private answers = false;
  /** Whether it has not answered since it was asked last. */
  private silent = false;
  private missed: ReturnType<typeof setTimeout> | undefined;
  private asked = false;
  private norms = false;
  /** Whether no page shows it, so that the kernel sends nothing. */
  private rests = false;
  /** What the kernel knows this view by: other pages may show the same mesh over the same comm. */
  private readonly view = Math.random().toString(36).slice(2);
  private letsGo: ReturnType<typeof setTimeout> | undefined;
  private gaveUp: ReturnType<typeof setTimeout> | undefined;

  /**
   * @param uid the mesh; empty for a widget, which has one.
   * @param members the ranks that the view is of; none for all.
   */
  constructor(
    readonly channel: Channel,
    readonly uid = '',
    readonly members: readonly number[] = []
  ) {
    this.model = new MeshModel(members);
    this.stop = channel.listen(message => this.handle(message));
    this.alive = setInterval(() => this.sayAlive(), ALIVE_SECONDS * 1000);
    this.open();
  }

  /** Ask for everything: at first, after a gap, and after the connection was lost. */
  open(): void {
    if (this.asked) {
      return;
    }
    this.asked = true;
    this.awaitAnswer();
    this.send({ kind: 'open', version: VERSION, uid: this.uid, view: this.view });
    if (this.pinned >= 0) {
      this.sendPin();
    }
  }

  /** Ask again, whatever was asked before: its answer may be lost. */
  reopen(): void {
    this.asked = false;
    this.link = this.link === 'live' ? 'live' : 'connecting';
    this.expect([...this.pending.keys()]);
    this.open();
    this.tell();
  }

  /** Ask for no more messages, if the kernel answers at once when the page shows the view again. */
  rest(): void {
    if (this.answers && this.link === 'live' && !this.rests) {
      this.rests = true;
      clearTimeout(this.missed);
      this.missed = undefined;
      this.send({ kind: 'close', uid: this.uid, view: this.view });
    }
  }

  /** Follow the mesh again. */
  wake(): void {
    if (this.rests) {
      this.rests = false;
      this.reopen();
    }
  }

  /** Say that no message can come, and why. */
  lose(reason: string): void {
    this.link = 'lost';
    this.reason = reason;
    this.model.freeze();
    this.asked = false;
    this.pending.clear();
    this.tell();
  }

  /** Show the details of a rank; of none with -1. */
  pin(rank: number): void {
    if (rank !== this.pinned) {
      this.pinned = rank;
      this.details = null;
      this.norms = false;
      this.sendPin();
      this.tell();
    }
  }

  /** Compute the norms of large tensors too. */
  askNorms(): void {
    this.norms = true;
    this.sendPin();
  }

  private sendPin(): void {
    this.send({ kind: 'pin', rank: this.pinned, uid: this.uid, norms: this.norms, view: this.view });
  }

  /** Do something with ranks; with all of the view if there are none. */
  act(action: Action, ranks: number[]): void {
    const id = nextAction();
    this.pending.set(id, action);
    this.holds = action === 'pause' || (this.holds && action !== 'resume');
    this.isHeld = false;
    this.show(null);
    const chosen = ranks.length ? ranks : [...this.members];
    this.untaken.set(id, false);
    setTimeout(() => {
      if (this.untaken.has(id)) {
        this.untaken.set(id, true);
        this.tell();
      }
    }, TAKEN);
    this.send({ kind: 'act', id, action, ranks: chosen, uid: this.uid });
    this.tell();
  }

  /**
   * What an action waits for: the kernel, or the cell that it runs, where messages of pages wait for that; null if the
   * kernel has taken all actions in time.
   */
  get waits(): 'kernel' | 'cell' | null {
    const late = [...this.untaken].some(([id, isLate]) => isLate && this.pending.has(id));
    return late ? (this.answers ? 'kernel' : 'cell') : null;
  }

  private take(id: number): void {
    if (this.untaken.get(id)) {
      this.tell();
    }
    this.untaken.delete(id);
  }

  dismiss(): void {
    this.show(null);
    this.tell();
  }

  /** Show a result for a while, instead of the one before. */
  private show(note: Note | null, stays = false): void {
    clearTimeout(this.letsGo);
    this.note = note;
    if (note && !stays) {
      const least = note.ok ? NOTE_STAYS : FAILURE_STAYS;
      this.letsGo = setTimeout(() => this.dismiss(), Math.max(least, READING * note.text.length));
    }
  }

  /** Give up actions whose answers may be lost, unless they come soon: the server may have kept them. */
  private expect(ids: number[]): void {
    clearTimeout(this.gaveUp);
    this.gaveUp = setTimeout(() => {
      if (ids.filter(id => this.pending.delete(id)).length) {
        this.show({ ok: false, text: NOT_HEARD });
        this.tell();
      }
    }, LATE);
  }

  /** Call a function after each change; return a function that ends this. */
  onChange(handler: () => void): () => void {
    this.handlers.add(handler);
    return () => this.handlers.delete(handler);
  }

  close(): void {
    clearInterval(this.alive);
    clearTimeout(this.letsGo);
    clearTimeout(this.gaveUp);
    clearTimeout(this.missed);
    this.stop();
    this.handlers.clear();
    if (this.link !== 'lost' && !this.rests) {
      this.send({ kind: 'close', uid: this.uid, view: this.view });
    }
  }

  /** Send a message. A comm of a kernel that was restarted refuses it in some front ends, and drops it in others. */
  private send(message: FromView): void {
    try {
      this.channel.send(message);
    } catch {
      this.fallSilent();
    }
  }

  private sayAlive(): void {
    if (!this.rests && (this.link === 'live' || this.silent)) {
      this.awaitAnswer();
      this.send({ kind: 'alive', uid: this.uid, view: this.view });
    }
  }

  private awaitAnswer(): void {
    this.missed ??= setTimeout(() => {
      this.missed = undefined;
      if (this.answers) {
        this.fallSilent();
      } else if (this.link === 'connecting') {
        this.slow = true;
        this.tell();
      }
    }, LATE);
  }

  private fallSilent(): void {
    if (!this.silent) {
      this.silent = true;
      this.lose(SILENT);
    }
  }

  /** Note that the kernel is there. */
  private hear(): void {
    clearTimeout(this.missed);
    this.missed = undefined;
    this.slow = false;
    if (this.silent) {
      this.silent = false;
      this.reopen();
    }
  }

  private isOurs(uid: string): boolean {
    return !this.uid || uid === this.uid;
  }

  private handle(message: FromKernel): void {
    if (this.rests && message.kind !== 'done' && message.kind !== 'taken') {
      // It is for another page, or late.
      return;
    }
    this.hear();
    switch (message.kind) {
      case 'heard':
        this.answers = true;
        break;
      case 'snapshot':
        if (this.isOurs(message.mesh.uid)) {
          this.asked = false;
          this.link = 'live';
          this.model.take(message);
          this.followHold();
          this.tell();
        }
        break;
      case 'patch':
        if (this.isOurs(message.uid)) {
          if (this.model.patch(message)) {
            this.followHold();
            this.tell();
          } else {
            this.open();
          }
        }
        break;
      case 'gone':
        if (this.isOurs(message.uid)) {
          this.asked = false;
          this.link = 'gone';
          this.reason = message.reason;
          this.tell();
        }
        break;
      case 'details':
        // Another browser that shows the same widget may have pinned another rank.
        if (this.isOurs(message.uid) && message.rank === this.pinned) {
          this.details = message;
          this.tell();
        }
        break;
      case 'taken':
        this.take(message.id);
        break;
      case 'done':
        this.take(message.id);
        this.finish(message);
        break;
    }
  }

  private finish(done: Done): void {
    const action = this.pending.get(done.id);
    if (this.pending.delete(done.id)) {
      this.show({ ok: done.ok, text: done.text }, action === 'stacks' && done.ok);
      if (action === 'pause') {
        this.noteOfHold = this.note;
      }
      this.tell();
    }
  }

  /** Note that the ranks which this view has paused go on, by a prompt, say, or a Stop. */
  private followHold(): void {
    const isPaused = this.model.ranks.some(row => row?.state === 'paused');
    if (this.isHeld && !isPaused) {
      this.holds = false;
      if (this.note === this.noteOfHold) {
        this.show(null);
      }
    }
    this.isHeld = this.holds && isPaused;
  }

  private tell(): void {
    for (const handler of this.handlers) {
      handler();
    }
  }
}
