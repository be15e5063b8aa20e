/** Call a function when an element is taken off the page or put on it again; return a function that ends this. */
export function watchAttached(element: Element, handler: (isAttached: boolean) => void): () => void {
  let told = true;
  // An element that leaves the page loses its size.
  const sizes = new ResizeObserver(() => {
    if (element.isConnected !== told) {
      told = element.isConnected;
      handler(told);
    }
  });
  sizes.observe(element);
  return () => sizes.disconnect();
}
