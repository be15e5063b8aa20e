/** The widget of a mesh in any front end that shows anywidgets. */

import { onEnded } from './ended';
import type { FromKernel } from './protocol';
import { type Channel, ENDED, MeshSession } from './session';
import { watchAttached } from './view/attached';
import { mountMesh } from './view/mount';

type ModelEvent = 'msg:custom' | 'change:state';

/** The part of anywidget's model that this needs. */
interface Model {
  get(name: 'ranks' | 'state' | 'picture'): unknown;
  send(message: unknown): void;
  on(event: ModelEvent, handler: (message: unknown) => void): void;
  off(event: ModelEvent, handler: (message: unknown) => void): void;
}

/** How long none of its views is on the page before a conversation rests, in ms. */
export const RESTS = 10_000;

function channel(model: Model): Channel {
  return {
    send: message => model.send(message),
    listen: handler => {
      const take = (message: unknown) => handler(message as FromKernel);
      // Where messages to the kernel wait for the running cell, as in marimo.
      const takeState = () => {
        const state = model.get('state');
        if (state) {
          take(JSON.parse(state as string));
        }
      };
      takeState();
      model.on('msg:custom', take);
      model.on('change:state', takeState);
      return () => {
        model.off('msg:custom', take);
        model.off('change:state', takeState);
      };
    }
  };
}

/** Hide the widget's static pictures, which front ends without widgets show; return its undoing. */
function hideStatic(session: MeshSession, name: string): () => void {
  const sheet = document.createElement('style');
  const hide = () => {
    if (name && session.model.mesh && !sheet.isConnected) {
      sheet.textContent = `.${name}{display:none}`;
      document.head.append(sheet);
    }
  };
  const stop = session.onChange(hide);
  hide();
  return () => {
    stop();
    sheet.remove();
  };
}

/** What the views of one model share: their conversation with the kernel. */
class Shared {
  readonly session: MeshSession;
  private readonly showStatic: () => void;
  private readonly ignoreEnds: () => void;
  /** By view, whether it is on the page. VS Code takes views off the page without ending them. */
  private readonly attached = new Map<object, boolean>();
  private rests: ReturnType<typeof setTimeout> | undefined;

  constructor(model: Model) {
    this.session = new MeshSession(channel(model), '', (model.get('ranks') as number[] | undefined) ?? []);
    this.showStatic = hideStatic(this.session, (model.get('picture') as string | undefined) ?? '');
    this.ignoreEnds = onEnded(uids => {
      if (uids.includes(this.session.model.mesh?.uid ?? '')) {
        this.session.lose(ENDED);
      }
    });
  }

  get views(): number {
    return this.attached.size;
  }

  set(view: object, isAttached: boolean): void {
    this.attached.set(view, isAttached);
    this.follow();
  }

  remove(view: object): void {
    this.attached.delete(view);
    this.follow();
  }

  private follow(): void {
    clearTimeout(this.rests);
    if ([...this.attached.values()].some(Boolean)) {
      this.session.wake();
    } else {
      this.rests = setTimeout(() => this.session.rest(), RESTS);
    }
  }

  end(): void {
    clearTimeout(this.rests);
    this.showStatic();
    this.ignoreEnds();
    this.session.close();
  }
}

/** Return the widget of one model: anywidget calls this for each, and gives each view a model object of its own. */
export default function widget() {
  let own: Model | null = null;
  let shared: Shared | null = null;
  const end = () => {
    shared?.end();
    shared = null;
  };
  return {
    initialize({ model }: { model: Model }): () => void {
      own = model;
      return end;
    },
    render({ model, el }: { model: Model; el: HTMLElement }): () => void {
      // What a view registers with its own object ends with that view.
      shared ??= new Shared(own ?? model);
      const used = shared;
      const view = {};
      const unmount = mountMesh(el, used.session);
      const unwatch = watchAttached(el, isAttached => used.set(view, isAttached));
      used.set(view, true);
      return () => {
        unwatch();
        unmount();
        used.remove(view);
        if (!used.views && used === shared) {
          end();
        }
      };
    }
  };
}
