/** Where ranks stand: boxes of hosts, with tiles in rows along the mesh's axes, as large as there is room for. */

import type { MeshRow } from '../protocol';

/** Ranks of one host. */
export interface Box {
  title: string;
  ranks: number[];
  columns: number;
}

/** How much a tile shows. */
export type Detail = 'full' | 'wide' | 'number' | 'sign' | 'dot';

export interface Size {
  detail: Detail;
  width: number;
  height: number;
  gap: number;
}

export interface Layout {
  boxes: Box[];
  size: Size;
}

const SIZES: Size[] = [
  { detail: 'full', width: 196, height: 78, gap: 6 },
  { detail: 'full', width: 150, height: 72, gap: 6 },
  { detail: 'wide', width: 100, height: 50, gap: 5 },
  { detail: 'number', width: 58, height: 34, gap: 4 },
  { detail: 'number', width: 46, height: 30, gap: 4 },
  { detail: 'sign', width: 26, height: 24, gap: 3 },
  { detail: 'sign', width: 19, height: 19, gap: 2 },
  { detail: 'dot', width: 13, height: 13, gap: 2 },
  { detail: 'dot', width: 9, height: 9, gap: 1 }
];

/** Room around the tiles of a box. */
export const PADDING = 10;
/** Height of a box's title. */
export const TITLE = 20;
const BETWEEN = 8;
/** Height in pixels that the grid should not exceed if smaller tiles avoid it. */
const TALLEST = 420;
const MOST_COLUMNS = 16;
/** Tiles with text may be wider than their size by this factor, so that the grid is as wide as what is below it. */
const STRETCH = 1.5;

/** Return the layout of a mesh in a width, in pixels; of some of its ranks if there are any. */
export function layOut(mesh: MeshRow, width: number, shown: number[] = []): Layout {
  const boxes = makeBoxes(mesh, shown);
  for (const size of SIZES) {
    // Large tiles may stand in more rows than the axes ask for; small ones keep the picture of the axes.
    for (const narrower of size.detail === 'full' || size.detail === 'wide' ? [1, 2, 4] : [1, 2]) {
      const folded = boxes.map(box => ({ ...box, columns: Math.ceil(box.columns / narrower) }));
      const pile = folded.some((box, at) => box.columns === 1 && boxes[at].columns > 1);
      if (!pile && fits(folded, size, width)) {
        return { boxes: folded, size: stretched(folded, size, width) };
      }
    }
  }
  const size = SIZES[SIZES.length - 1];
  const most = Math.max(1, Math.floor((width - 2 * PADDING + size.gap) / (size.width + size.gap)));
  return { boxes: boxes.map(box => ({ ...box, columns: Math.min(box.columns, most) })), size };
}

/** Return the ranks by host, or along the first axis if that is one of hosts. */
export function makeBoxes(mesh: MeshRow, shown: number[] = []): Box[] {
  const inner = mesh.sizes.at(-1) ?? 1;
  const count = mesh.sizes.reduce((product, size) => product * size, 1);
  const boxes: Box[] = [];
  const perHost = mesh.labels[0] === 'hosts' && mesh.sizes.length > 1 ? count / mesh.sizes[0] : 0;
  const single = new Set(mesh.hosts).size < 2;
  const ranks = shown.length ? shown : Array.from({ length: count }, (_, rank) => rank);
  const hostOf = (rank: number) => (single ? perHost && Math.floor(rank / perHost) : mesh.hosts[rank]);
  for (const [at, rank] of ranks.entries()) {
    if (at === 0 || hostOf(rank) !== hostOf(ranks[at - 1])) {
      boxes.push({ title: mesh.hosts[rank] ?? '', ranks: [], columns: 1 });
    }
    boxes[boxes.length - 1].ranks.push(rank);
  }
  if (single && boxes.length > 1) {
    for (const box of boxes) {
      box.title = `hosts ${hostOf(box.ranks[0])}`;
    }
  }
  return boxes.map(box => ({ ...box, columns: columnsOf(box.ranks.length, inner) }));
}

function columnsOf(count: number, inner: number): number {
  if (inner > 1 && inner <= MOST_COLUMNS && count % inner === 0 && count / inner <= 4 * inner) {
    return inner;
  }
  if (count <= 8) {
    return count <= 4 || count > 6 ? Math.min(count, 4) : 3;
  }
  return count <= 64 ? 8 : count <= 256 ? 16 : 32;
}

/** Return the room around the tiles of a box; a single box has no border. */
function paddingOf(boxes: Box[]): number {
  return boxes.length > 1 ? 2 * PADDING : 0;
}

/** Return how many boxes stand beside each other. */
function besideOf(boxes: Box[], size: Size, width: number): number {
  const widest = Math.max(...boxes.map(box => box.columns)) * (size.width + size.gap) - size.gap + paddingOf(boxes);
  return Math.min(boxes.length, Math.floor((width + BETWEEN) / (widest + BETWEEN)));
}

function fits(boxes: Box[], size: Size, width: number): boolean {
  const beside = besideOf(boxes, size, width);
  if (beside < 1) {
    return false;
  }
  const tall = (box: Box) => Math.ceil(box.ranks.length / box.columns) * (size.height + size.gap) + TITLE + PADDING;
  const tallest = Math.max(...boxes.map(tall));
  return Math.ceil(boxes.length / beside) * (tallest + BETWEEN) <= TALLEST;
}

/** Return the size with tiles as wide as there is room for, within limits; those without text stay square. */
function stretched(boxes: Box[], size: Size, width: number): Size {
  if (size.detail === 'sign' || size.detail === 'dot') {
    return size;
  }
  const beside = besideOf(boxes, size, width);
  const columns = Math.max(...boxes.map(box => box.columns));
  const box = Math.floor((width - (beside - 1) * BETWEEN) / beside) - paddingOf(boxes);
  const room = Math.floor((box + size.gap) / columns) - size.gap;
  return { ...size, width: Math.max(size.width, Math.min(room, Math.floor(STRETCH * size.width))) };
}
