/** Tells the views on a page that the kernel of their meshes has ended: JupyterLab's extension knows it at once. */

const EVENT = 'monarch-meshes-ended';

export function tellEnded(uids: string[]): void {
  document.dispatchEvent(new CustomEvent(EVENT, { detail: uids }));
}

/** Call a function with the meshes whose kernel has ended; return a function that ends this. */
export function onEnded(handler: (uids: string[]) => void): () => void {
  const take = (event: Event) => handler((event as CustomEvent<string[]>).detail);
  document.addEventListener(EVENT, take);
  return () => document.removeEventListener(EVENT, take);
}
