/** The widget of a mesh in any front end that shows anywidgets. */

import type { FromKernel } from './protocol';
import { type Channel, MeshSession } from './session';
import { mountMesh } from './view/mount';

type ModelEvent = 'msg:custom' | 'change:state' | 'destroy';

/** The part of anywidget's model that this needs. */
interface Model {
  get(name: 'ranks' | 'state'): unknown;
  send(message: unknown): void;
  on(event: ModelEvent, handler: (message: unknown) => void): void;
  off(event: ModelEvent, handler: (message: unknown) => void): void;
}

/** What the views of one model share. */
interface Shared {
  session: MeshSession;
  views: number;
  showStatic(): void;
}

const shared = new WeakMap<Model, Shared>();

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

/** Hide the static picture of the mesh below the widget, which front ends without widgets show; return its undoing. */
function hideStatic(session: MeshSession): () => void {
  const sheet = document.createElement('style');
  const hide = () => {
    const uid = session.model.mesh?.uid;
    if (uid && !sheet.isConnected) {
      sheet.textContent = `.monarch-mesh-${uid.replace(/[^A-Za-z0-9_-]/g, '-')}{display:none}`;
      document.head.append(sheet);
    }
  };
  const stop = session.onChange(hide);
  return () => {
    stop();
    sheet.remove();
  };
}

function share(model: Model): Shared {
  const session = new MeshSession(channel(model), '', (model.get('ranks') as number[] | undefined) ?? []);
  const showStatic = hideStatic(session);
  model.on('destroy', showStatic);
  return { session, views: 0, showStatic };
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const kept = shared.get(model) ?? share(model);
  shared.set(model, kept);
  kept.views += 1;
  const unmount = mountMesh(el, kept.session);
  return () => {
    unmount();
    kept.views -= 1;
    if (!kept.views) {
      model.off('destroy', kept.showStatic);
      kept.showStatic();
      kept.session.close();
      shared.delete(model);
    }
  };
}

export default { render };
