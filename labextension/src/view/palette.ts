/** Colours of tiles: the state gives the colour, the load its shade. The text on each is legible. */

import { LOOKS, type State } from '../protocol';

export type Theme = 'light' | 'dark';
type Rgb = [number, number, number];

/** Shades of a colour, from no load to full load. */
export const SHADES = 5;
/** The page behind the tiles. */
const PAGE: Record<Theme, string> = { light: '#ffffff', dark: '#111418' };
/** States in which the load says something. */
const SHADED = new Set<State>(['running', 'collective', 'blocked']);
/** Share of the colour at no load. */
const PALEST = 0.45;

export const STATES = Object.keys(LOOKS) as State[];

/** Return the shade of a load. */
export function shade(load: number): number {
  return Math.max(0, Math.min(SHADES - 1, Math.round(load * (SHADES - 1))));
}

/** Return the colours of a tile: its background, and what is written on it. */
export function tile(state: State, level: number, theme: Theme): { back: string; ink: string } {
  const share = SHADED.has(state) ? PALEST + ((1 - PALEST) * level) / (SHADES - 1) : 1;
  const back = mix(parse(LOOKS[state][theme]), parse(PAGE[theme]), share);
  const inks = ['#ffffff', '#000000'];
  const [best] = inks.sort((one, other) => contrast(parse(other), back) - contrast(parse(one), back));
  return { back: format(back), ink: best };
}

/** Return the ratio of contrast of two colours, from 1 to 21. */
export function contrast(one: Rgb, other: Rgb): number {
  const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}

/** Return the luminance of a colour, from 0 to 1. */
export function luminance(colour: Rgb): number {
  const [red, green, blue] = colour.map(each => {
    const part = each / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** Return the rules of all tiles. */
export function tileRules(): string {
  const rules: string[] = [];
  for (const theme of ['light', 'dark'] as const) {
    for (const state of STATES) {
      for (let level = 0; level < SHADES; level++) {
        const { back, ink } = tile(state, level, theme);
        rules.push(`.mk-view.mk-${theme} .mk-${state}.mk-load${level}{background-color:${back};color:${ink}}`);
      }
    }
  }
  // Over the rule that dims all tiles while one state is chosen.
  rules.push(...STATES.map(state => `.mk-view .mk-grid[data-only="${state}"] .mk-${state}{opacity:1}`));
  return rules.join('\n');
}

export function parse(colour: string): Rgb {
  return [1, 3, 5].map(at => Number.parseInt(colour.slice(at, at + 2), 16)) as Rgb;
}

function format(colour: Rgb): string {
  return `#${colour.map(each => Math.round(each).toString(16).padStart(2, '0')).join('')}`;
}

function mix(one: Rgb, other: Rgb, share: number): Rgb {
  return one.map((each, at) => each * share + other[at] * (1 - share)) as Rgb;
}
