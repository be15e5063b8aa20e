/** Puts the view of a mesh into an element. */

import { render } from 'preact';
import type { MeshSession } from '../session';
import { MeshApp } from './app';
import { addStyle, watchTheme } from './theme';
import { ENGLISH, type Trans } from './trans';

/** Show a mesh in an element; return a function that ends this. The element must be on the page for its theme. */
export function mountMesh(element: HTMLElement, session: MeshSession, trans: Trans = ENGLISH): () => void {
  const root = document.createElement('div');
  element.append(root);
  addStyle(root);
  const stop = watchTheme(element, theme => {
    root.className = `mk-view mk-${theme}`;
    render(<MeshApp session={session} theme={theme} trans={trans} />, root);
  });
  return () => {
    stop();
    render(null, root);
    root.remove();
  };
}
