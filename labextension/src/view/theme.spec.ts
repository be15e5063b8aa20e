import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { watchTheme } from './theme';

let place: HTMLElement;
let page = '';
let resized: () => void;
let stop: () => void;
const told: string[] = [];

/** happy-dom lays nothing out. */
class Sizes {
  constructor(callback: () => void) {
    resized = callback;
  }
  observe() {}
  disconnect() {}
}

beforeEach(() => {
  vi.stubGlobal('ResizeObserver', Sizes);
  // As long as it is not attached, an element has no style.
  vi.stubGlobal('getComputedStyle', (element: Element) => ({
    backgroundColor: element === document.body ? page : '',
    colorScheme: ''
  }));
  place = document.createElement('div');
  page = 'rgb(17, 17, 17)';
  told.length = 0;
});

afterEach(() => {
  stop();
  place.remove();
  vi.unstubAllGlobals();
});

test('a view that is made before it is on the page has the theme of the page once it is there', () => {
  stop = watchTheme(place, theme => told.push(theme));
  expect(told).toEqual(['light']);
  document.body.append(place);
  resized();
  expect(told).toEqual(['light', 'dark']);
});

test('a view follows the style sheet of the theme, which comes later', () => {
  page = '';
  document.body.append(place);
  const sheet = document.head.appendChild(document.createElement('link'));
  stop = watchTheme(place, theme => told.push(theme));
  page = 'rgb(17, 17, 17)';
  sheet.dispatchEvent(new Event('load'));
  sheet.dispatchEvent(new Event('load'));
  expect(told).toEqual(['light', 'dark']);
  stop();
  page = 'rgb(255, 255, 255)';
  sheet.dispatchEvent(new Event('load'));
  expect(told).toEqual(['light', 'dark']);
  sheet.remove();
});

test('a page may name its background in any way that browsers know', () => {
  page = 'color(srgb 0.99 0.99 1)';
  const data = [252, 252, 255, 255];
  const context = { fillRect: () => {}, getImageData: () => ({ data }) };
  const drawn = vi.spyOn(HTMLCanvasElement.prototype, 'getContext').mockReturnValue(context as never);
  document.body.append(place);
  stop = watchTheme(place, theme => told.push(theme));
  expect(context).toHaveProperty('fillStyle', page);
  expect(told).toEqual(['light']);
  drawn.mockRestore();
});

test.each([
  ['vscode-light', 'light'],
  ['vscode-dark', 'dark'],
  ['vscode-high-contrast', 'dark'],
  ['vscode-high-contrast-light vscode-high-contrast', 'light']
])('a transparent page of VS Code has the theme of its class %s', (names, theme) => {
  page = 'rgba(0, 0, 0, 0)';
  document.body.className = names;
  document.body.append(place);
  stop = watchTheme(place, each => told.push(each));
  expect(told).toEqual([theme]);
  document.body.className = '';
});
