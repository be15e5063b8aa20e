import { useEffect, useRef } from 'preact/hooks';

interface Props {
  height: number;
  label: string;
  class?: string;
  /** Draw into a canvas of a size in CSS pixels. */
  draw(context: CanvasRenderingContext2D, width: number, height: number): void;
  /** The pointer is at a place, or has left. */
  point?(x: number, y: number): void;
  leave?(): void;
}

/** A canvas as wide as its place, sharp on any screen, drawn again at each render. */
export function Canvas({ height, label, draw, point, leave, ...rest }: Props) {
  const ref = useRef<HTMLCanvasElement>(null);
  const latest = useRef(draw);
  latest.current = draw;
  const paint = () => {
    const canvas = ref.current;
    const context = canvas?.getContext?.('2d');
    const width = canvas?.clientWidth ?? 0;
    if (!canvas || !context || !width) {
      return;
    }
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    latest.current(context, width, height);
  };
  useEffect(paint);
  useEffect(() => {
    const observer = new ResizeObserver(paint);
    observer.observe(ref.current!);
    return () => observer.disconnect();
  }, []);
  return (
    <canvas
      ref={ref}
      class={`mk-canvas ${rest.class ?? ''}`}
      style={{ height: `${height}px` }}
      role="img"
      aria-label={label}
      onPointerMove={event => point?.(event.offsetX, event.offsetY)}
      onPointerLeave={leave}
    />
  );
}
