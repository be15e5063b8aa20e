/** Whether the page is light or dark, whatever shows it, and the style sheet of the views. */

import { luminance, type Theme, tileRules } from './palette';
import style from './style.css';

const ID = 'monarch-views';

/** Add the style sheet to the document, or the shadow root, of an element. */
export function addStyle(element: Node): void {
  const root = element.getRootNode();
  const place = root instanceof ShadowRoot ? root : document.head;
  if (!place.querySelector(`#${ID}`)) {
    const sheet = document.createElement('style');
    sheet.id = ID;
    sheet.textContent = `${style}\n${tileRules()}`;
    place.append(sheet);
  }
}

/** Return the theme that VS Code names in its frames, whose pages are transparent. */
function editorTheme(): Theme | undefined {
  const kind = [...document.body.classList].filter(name => name.startsWith('vscode-'));
  if (kind.includes('vscode-light') || kind.includes('vscode-high-contrast-light')) {
    return 'light';
  }
  return kind.includes('vscode-dark') || kind.includes('vscode-high-contrast') ? 'dark' : undefined;
}

/** Return the theme behind an element: that of the first background that is not transparent. */
export function themeOf(element: Element): Theme {
  for (let at: Element | null = element; at; at = parentOf(at)) {
    const parts = channelsOf(getComputedStyle(at).backgroundColor);
    if (parts.length >= 3 && (parts[3] ?? 1) > 0.5) {
      return luminance([parts[0], parts[1], parts[2]]) < 0.3 ? 'dark' : 'light';
    }
  }
  const named = editorTheme();
  if (named) {
    return named;
  }
  const schemes = getComputedStyle(document.documentElement).colorScheme;
  return schemes.includes('dark') && matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
}

/** Return red, green and blue of a computed colour, from 0 to 255, and its opacity; none if there is no such colour. */
function channelsOf(colour: string): number[] {
  if (!colour || colour.startsWith('rgb')) {
    return colour.match(/[\d.]+/g)?.map(Number) ?? [];
  }
  // Such as oklch() and color(), which only the browser converts.
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 1;
  const context = canvas.getContext('2d');
  if (!context) {
    return [];
  }
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  const [red, green, blue, opacity] = context.getImageData(0, 0, 1, 1).data;
  return [red, green, blue, opacity / 255];
}

function parentOf(element: Element): Element | null {
  const root = element.getRootNode();
  return element.parentElement ?? (root instanceof ShadowRoot ? root.host : null);
}

/**
 * Call a function with the theme, now and when the page changes it; return a function that ends this.
 *
 * A page that opens may show the element before the style sheet of its theme is there, and before it is attached.
 */
export function watchTheme(element: Element, handler: (theme: Theme) => void): () => void {
  let told: Theme | null = null;
  const tell = () => {
    const theme = themeOf(element);
    if (theme !== told) {
      told = theme;
      handler(theme);
    }
  };
  const loaded = (event: Event) => {
    if (event.target instanceof HTMLLinkElement || event.target instanceof HTMLStyleElement) {
      tell();
    }
  };
  const observer = new MutationObserver(() => requestAnimationFrame(tell));
  for (const each of [document.documentElement, document.body]) {
    observer.observe(each, {
      attributes: true,
      attributeFilter: ['class', 'style', 'data-jp-theme-light', 'data-theme']
    });
  }
  const media = matchMedia('(prefers-color-scheme: dark)');
  media.addEventListener('change', tell);
  // These events do not bubble.
  document.addEventListener('load', loaded, true);
  const sizes = new ResizeObserver(tell);
  sizes.observe(element);
  tell();
  return () => {
    observer.disconnect();
    sizes.disconnect();
    document.removeEventListener('load', loaded, true);
    media.removeEventListener('change', tell);
  };
}
