import { useMemo, useRef, useState } from 'preact/hooks';
import type { MeshModel, Series } from '../model';
import { Canvas } from './canvas';
import { type ChartColours, drawChart, type Scale } from './chart';
import { type Point, summarize } from './series';
import type { Trans } from './trans';
import { figure } from './words';

interface Props {
  model: MeshModel;
  colours: ChartColours;
  trans: Trans;
}

/** A live chart of each metric that ranks log. */
export function Metrics({ model, colours, trans }: Props) {
  if (!model.metrics.size) {
    return null;
  }
  return (
    <section class="mk-metrics" aria-label={trans.__('Metrics')}>
      {[...model.metrics].map(([name, ranks]) => (
        <Chart key={name} name={name} ranks={ranks} version={model.metricsVersion} colours={colours} trans={trans} />
      ))}
    </section>
  );
}

interface ChartProps {
  name: string;
  ranks: Map<number, Series>;
  version: number;
  colours: ChartColours;
  trans: Trans;
}

function Chart({ name, ranks, version, colours, trans }: ChartProps) {
  const [log, setLog] = useState(false);
  const [at, setAt] = useState<number | null>(null);
  const scale = useRef<Scale | null>(null);
  const points = useMemo(() => summarize(ranks), [ranks, version]);
  const shown = nearest(points, at) ?? points[points.length - 1];
  const text = shown ? describe(shown, ranks.size, trans) : trans.__('no finite value yet');
  return (
    <figure class="mk-chart">
      <figcaption>
        <b>{name}</b> <span class="mk-readout">{text}</span>
        <button
          type="button"
          class="mk-button mk-small"
          aria-pressed={log}
          onClick={() => setLog(!log)}
          title={trans.__('Logarithmic scale')}
        >
          log
        </button>
      </figcaption>
      <Canvas
        height={150}
        label={trans.__('Chart of %1: %2', name, text)}
        draw={(context, width, height) => {
          scale.current = drawChart(context, ranks, points, width, height, log, colours);
          if (scale.current && at !== null && shown) {
            mark(context, scale.current.x(shown.step), height, colours.muted);
          }
        }}
        point={x => scale.current && setAt(scale.current.step(x))}
        leave={() => setAt(null)}
      />
    </figure>
  );
}

function mark(context: CanvasRenderingContext2D, x: number, height: number, colour: string): void {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x, 0);
  context.lineTo(x, height - 20);
  context.stroke();
}

function nearest(points: Point[], step: number | null): Point | null {
  if (step === null) {
    return null;
  }
  let best: Point | null = null;
  for (const point of points) {
    if (!best || Math.abs(point.step - step) < Math.abs(best.step - step)) {
      best = point;
    }
  }
  return best;
}

function describe(point: Point, ranks: number, trans: Trans): string {
  const mean = figure(point.mean);
  if (ranks < 2 || point.low === point.high) {
    return trans.__('step %1: %2', point.step, mean);
  }
  const low = trans.__('rank %1: %2', point.lowRank, figure(point.low));
  const high = trans.__('rank %1: %2', point.highRank, figure(point.high));
  return trans.__('step %1: mean %2 (%3, %4)', point.step, mean, low, high);
}
