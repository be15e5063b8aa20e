/** Draws a metric: a thin line for each rank, a bold one for their mean, and a band from the lowest to the highest. */

import { NOTEBOOK, type Series } from '../model';
import { logTicks, type Point, range, ticks } from './series';
import { figure } from './words';

export interface ChartColours {
  ink: string;
  muted: string;
  rule: string;
  accent: string;
}

export interface Scale {
  x(step: number): number;
  y(value: number): number;
  /** The step at a place. */
  step(x: number): number;
}

const LEFT = 46;
const BOTTOM = 20;
const TOP = 8;
const RIGHT = 10;
/** More lines than this only make a blot. */
const MOST_LINES = 128;

/** Draw a chart into a canvas of a size in CSS pixels; return its scale, or null if it has no values. */
export function drawChart(
  context: CanvasRenderingContext2D,
  ranks: ReadonlyMap<number, Series>,
  points: Point[],
  width: number,
  height: number,
  log: boolean,
  colours: ChartColours
): Scale | null {
  context.clearRect(0, 0, width, height);
  const values = range(ranks, log);
  if (!values) {
    return null;
  }
  const steps = stepRange(ranks);
  const scale = makeScale(steps, values, width, height, log);
  drawAxes(context, scale, steps, values, width, height, log, colours);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT, height - BOTTOM + 1);
  context.clip();
  drawBand(context, points, scale, log, colours.accent);
  const others = [...ranks].filter(([rank]) => rank !== NOTEBOOK);
  context.globalAlpha = Math.max(0.12, Math.min(0.55, 4 / Math.max(1, others.length)));
  for (const [, series] of others.slice(0, MOST_LINES)) {
    drawLine(context, series.steps, series.values, scale, log, colours.accent, 1);
  }
  context.globalAlpha = 0.7;
  const last = points[points.length - 1];
  for (const rank of last && last.lowRank !== last.highRank ? [last.lowRank, last.highRank] : []) {
    const { steps: at, values: of } = ranks.get(rank)!;
    drawLine(context, at, of, scale, log, colours.accent, 1);
  }
  context.globalAlpha = 1;
  const means = points.map(point => point.mean);
  drawLine(
    context,
    points.map(point => point.step),
    means,
    scale,
    log,
    colours.accent,
    2.25
  );
  const own = ranks.get(NOTEBOOK);
  if (own) {
    drawLine(context, own.steps, own.values, scale, log, colours.ink, 2);
  }
  context.restore();
  return scale;
}

function stepRange(ranks: ReadonlyMap<number, Series>): [number, number] {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (const { steps } of ranks.values()) {
    low = Math.min(low, steps[0] ?? low);
    high = Math.max(high, steps[steps.length - 1] ?? high);
  }
  return low < high ? [low, high] : [low - 1, low + 1];
}

function makeScale(
  steps: [number, number],
  values: [number, number],
  width: number,
  height: number,
  log: boolean
): Scale {
  const change = log ? Math.log10 : (value: number) => value;
  const [low, high] = values.map(change);
  const wide = width - LEFT - RIGHT;
  const tall = height - BOTTOM - TOP;
  return {
    x: step => LEFT + (wide * (step - steps[0])) / (steps[1] - steps[0]),
    y: value => TOP + tall * (1 - (change(value) - low) / (high - low)),
    step: x => steps[0] + ((x - LEFT) * (steps[1] - steps[0])) / wide
  };
}

function drawAxes(
  context: CanvasRenderingContext2D,
  scale: Scale,
  steps: [number, number],
  values: [number, number],
  width: number,
  height: number,
  log: boolean,
  colours: ChartColours
): void {
  context.font = '11px system-ui, sans-serif';
  context.fillStyle = colours.muted;
  context.strokeStyle = colours.rule;
  context.lineWidth = 1;
  context.textBaseline = 'middle';
  context.textAlign = 'right';
  for (const mark of log ? logTicks(...values) : ticks(...values, 4)) {
    const y = Math.round(scale.y(mark)) + 0.5;
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(width - RIGHT, y);
    context.stroke();
    context.fillText(figure(mark), LEFT - 6, y);
  }
  context.textBaseline = 'alphabetic';
  context.textAlign = 'center';
  for (const mark of ticks(...steps, Math.max(2, width / 90))) {
    if (Number.isInteger(mark)) {
      context.fillText(String(mark), Math.min(scale.x(mark), width - 14), height - 5);
    }
  }
}

function drawBand(
  context: CanvasRenderingContext2D,
  points: Point[],
  scale: Scale,
  log: boolean,
  colour: string
): void {
  const shown = points.filter(point => !log || point.low > 0);
  if (shown.length < 2) {
    return;
  }
  context.beginPath();
  for (const point of shown) {
    context.lineTo(scale.x(point.step), scale.y(point.high));
  }
  for (const point of shown.slice().reverse()) {
    context.lineTo(scale.x(point.step), scale.y(point.low));
  }
  context.closePath();
  context.globalAlpha = 0.15;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}

/** A line with a gap at each NaN. */
function drawLine(
  context: CanvasRenderingContext2D,
  steps: number[],
  values: (number | null)[],
  scale: Scale,
  log: boolean,
  colour: string,
  thick: number
): void {
  context.strokeStyle = colour;
  context.lineWidth = thick;
  context.lineJoin = 'round';
  context.beginPath();
  let gap = true;
  for (let at = 0; at < steps.length; at++) {
    const value = values[at];
    if (value === null || (log && value <= 0)) {
      gap = true;
      continue;
    }
    const x = scale.x(steps[at]);
    gap ? context.moveTo(x, scale.y(value)) : context.lineTo(x, scale.y(value));
    gap = false;
  }
  context.stroke();
}
