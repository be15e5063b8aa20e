import { useRef, useState } from 'preact/hooks';
import type { MeshModel } from '../model';
import { LOOKS, SPAN_SECONDS, type SpanRow, type State } from '../protocol';
import { Canvas } from './canvas';
import type { ChartColours } from './chart';
import type { Theme } from './palette';
import type { Trans } from './trans';
import { duration } from './words';

type Span = Required<SpanRow>;

const LEFT = 46;
const BOTTOM = 18;
/** Height of the rows of up to this many ranks; more share this height. */
const TALLEST = 256;
/** Height of rows from which there is a gap between them; between lower ones, gaps would pale the colours. */
const GAPS = 6;
/** Least distance between two numbers of ranks, if rows are lower than a number. */
const NUMBERS = 24;
/** The timeline covers at least this time, in seconds. */
const SHORTEST = 10;
/** Seconds between marks of the axis, of which there are at most so many. */
const STEPS = [2, 5, 10, 15];
const MARKS = 5;
/** Least distance between two marks, in pixels. */
const APART = 48;
/** States in the order in which they are drawn over each other: what is rare and grave comes last. */
const ORDER: State[] = [
  'idle',
  'stopped',
  'starting',
  'collective',
  'restarted',
  'paused',
  'blocked',
  'running',
  'unresponsive',
  'failed'
];

interface Props {
  model: MeshModel;
  theme: Theme;
  colours: ChartColours;
  trans: Trans;
}

/** The last minute, or what there is of it: a row for each rank, coloured by its state. */
export function Timeline({ model, theme, colours, trans }: Props) {
  const wide = useRef(0);
  const [at, setAt] = useState<[number, number] | null>(null);
  const shown = model.shown();
  const count = shown.length;
  if (!model.spans.size || !count) {
    return null;
  }
  const row = Math.max(Math.min(14, TALLEST / count), 0.1);
  const height = Math.ceil(row * count) + BOTTOM + 2;
  const now = model.now();
  const range = rangeOf(model.firstSpan, now);
  const quiet = range < SPAN_SECONDS ? trans.__('last %1 s', Math.round(range)) : trans.__('last minute');
  const readout = (at && pointed(model, at, shown, row, wide.current, now, range, trans)) || quiet;
  return (
    <figure class="mk-timeline">
      <figcaption>
        <b>{trans.__('Timeline')}</b> <span class="mk-readout">{readout}</span>
      </figcaption>
      <Canvas
        height={height}
        label={trans.__('Timeline of the %1, a row for each of %2 ranks', quiet, count)}
        draw={(context, width) => {
          wide.current = width;
          context.clearRect(0, 0, width, height);
          const end = model.mesh?.ended ? trans.__('end') : trans.__('now');
          drawAxis(context, width, height, range, end, colours, trans);
          drawNumbers(context, shown, row, colours);
          drawSpans(context, model, shown, width, row, now, range, theme);
        }}
        point={(x, y) => setAt([x, y])}
        leave={() => setAt(null)}
      />
    </figure>
  );
}

/** Return the seconds that the timeline covers: from the first span on, up to a minute. */
export function rangeOf(first: number, now: number): number {
  return Math.min(SPAN_SECONDS, Math.max(SHORTEST, now - first));
}

/** Return the seconds between two marks of the axis, whose texts need room in pixels. */
export function stepOf(range: number, room = Number.POSITIVE_INFINITY): number {
  return STEPS.find(step => range / step <= MARKS && (room * step) / range >= APART) ?? SPAN_SECONDS;
}

/** Return the place of a time. */
function place(time: number, now: number, range: number, width: number): number {
  return LEFT + ((width - LEFT - 8) * (time - now + range)) / range;
}

function drawSpans(
  context: CanvasRenderingContext2D,
  model: MeshModel,
  shown: number[],
  width: number,
  row: number,
  now: number,
  range: number,
  theme: Theme
): void {
  const groups = new Map<State, Span[]>(ORDER.map(state => [state, []]));
  for (const spans of model.spans.values()) {
    for (const span of spans) {
      groups.get(span.state)?.push(span);
    }
  }
  const gap = row >= GAPS ? 1 : 0;
  const places = new Map(shown.map((rank, at) => [rank, at]));
  for (const [state, spans] of groups) {
    context.fillStyle = LOOKS[state][theme];
    for (const span of spans) {
      const from = Math.max(LEFT, place(span.begin, now, range, width));
      const to = place(span.end || now, now, range, width);
      if (to > LEFT) {
        // A lone straggler among a thousand ranks is still seen.
        const tall = gap ? row - gap : Math.max(row, ORDER.indexOf(state) > 3 ? 1 : row);
        context.fillRect(from, (places.get(span.rank) ?? 0) * row, Math.max(to - from, 0.75), tall);
      }
    }
  }
}

function drawAxis(
  context: CanvasRenderingContext2D,
  width: number,
  height: number,
  range: number,
  end: string,
  colours: ChartColours,
  trans: Trans
): void {
  context.font = '11px system-ui, sans-serif';
  context.fillStyle = colours.muted;
  context.strokeStyle = colours.rule;
  context.lineWidth = 1;
  context.textAlign = 'center';
  const step = stepOf(range, width - LEFT - 8);
  for (let ago = 0; ago <= range; ago += step) {
    const x = Math.round(place(-ago, 0, range, width)) + 0.5;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, height - BOTTOM);
    context.stroke();
    const text = ago ? trans.__('−%1 s', ago) : end;
    context.fillText(text, Math.min(x, width - 14), height - 4);
  }
}

function drawNumbers(context: CanvasRenderingContext2D, shown: number[], row: number, colours: ChartColours): void {
  context.fillStyle = colours.muted;
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  const every = 2 ** Math.max(0, Math.ceil(Math.log2((row < 13 ? NUMBERS : 13) / row)));
  for (let at = 0; at < shown.length; at += every) {
    context.fillText(String(shown[at]), LEFT - 6, at * row + Math.max(row, 10) / 2);
  }
  context.textBaseline = 'alphabetic';
}

/** Return what the rank under the pointer did at that time; empty for nothing. */
function pointed(
  model: MeshModel,
  [x, y]: number[],
  shown: number[],
  row: number,
  width: number,
  now: number,
  range: number,
  trans: Trans
): string {
  const rank = shown[Math.floor(y / row)];
  const ago = range * (1 - (x - LEFT) / (width - LEFT - 8));
  const span = model.spans.get(rank)?.find(each => each.begin <= now - ago && (each.end || now) >= now - ago);
  if (!span) {
    return '';
  }
  const word = trans.__(LOOKS[span.state].word);
  const spent = duration((span.end || now) - span.begin, trans);
  return trans.__(
    'rank %1, %2 ago: %3',
    rank,
    duration(ago, trans),
    [word, span.title, spent].filter(Boolean).join(', ')
  );
}
