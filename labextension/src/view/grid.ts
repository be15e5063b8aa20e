/** The grid of ranks. Plain elements, changed in place: a thousand tiles change ten times a second. */

import { LOOKS, type RankRow, type State } from '../protocol';
import type { MeshSession } from '../session';
import { type Layout, layOut } from './layout';
import { shade } from './palette';
import type { Trans } from './trans';
import { doing, duration, sentence } from './words';

type Row = Required<RankRow>;

/** What a tile shows, to change only what differs. */
interface Tile {
  element: HTMLElement;
  row: Row | null;
  class: string;
  top: HTMLElement | null;
  text: HTMLElement | null;
  more: HTMLElement | null;
}

/** What the grid tells its view. */
export interface GridEvents {
  pin(rank: number): void;
  select(rank: number): void;
  unpin(): void;
  /** The rank under the pointer or with the focus; -1 if none. */
  point(rank: number, tile: HTMLElement | null): void;
}

/** States whose sign stands on the smallest tiles too. */
const LOUD = new Set<State>(['failed', 'unresponsive', 'paused']);
/** Keys that move the focus, and those that do something with a rank. */
const MOVES = new Set(['ArrowRight', 'ArrowLeft', 'ArrowDown', 'ArrowUp', 'Home', 'End']);
const ACTS = new Set(['Enter', ' ', 'Escape']);
/** JupyterLab has no shortcuts below an element with this attribute. */
const SUPPRESS = 'data-lm-suppress-shortcuts';
/** How often labels for screen readers and times follow, in ms: a bit less than the clock of the view. */
const LABEL_EVERY = 900;

export class Grid {
  private layout: Layout | null = null;
  private tiles: Tile[] = [];
  /** By rank, its line on the page and its place in it, for the arrow keys. */
  private lines: number[][] = [];
  private focused = 0;
  private width = 0;
  private snapshots = -1;
  private labelled = 0;
  private marks = '';
  /** The arguments of the last call of `mark`. */
  private marked: [number, ReadonlySet<number>, State | null] = [-1, new Set(), null];

  constructor(
    private readonly root: HTMLElement,
    private readonly session: MeshSession,
    private readonly trans: Trans,
    private readonly events: GridEvents
  ) {
    root.setAttribute('role', 'grid');
    root.setAttribute('aria-label', trans.__('Ranks'));
    root.addEventListener('keydown', event => this.press(event));
    root.addEventListener('click', event => this.click(event));
    root.addEventListener('pointerover', event => this.point(event.target));
    root.addEventListener('pointerleave', () => events.point(-1, null));
    root.addEventListener('focusin', event => this.point(event.target));
    root.addEventListener('focusout', () => events.point(-1, null));
    // JupyterLab looks at keys at the document, before they come here.
    window.addEventListener('keydown', this.claim, true);
  }

  dispose(): void {
    window.removeEventListener('keydown', this.claim, true);
  }

  /** Have JupyterLab leave a key alone that the grid uses, such as an arrow, which would go to the next cell. */
  private readonly claim = (event: KeyboardEvent): void => {
    if (event.composedPath().includes(this.root)) {
      this.root.toggleAttribute(SUPPRESS, this.uses(event));
    }
  };

  private uses(event: KeyboardEvent): boolean {
    const plain = !event.altKey && !event.metaKey && !event.shiftKey && !event.ctrlKey;
    return isFar(event) || (plain && (MOVES.has(event.key) || ACTS.has(event.key)));
  }

  /** Make room for another width. */
  resize(width: number): void {
    if (Math.abs(width - this.width) > 1) {
      this.width = width;
      this.snapshots = -1;
      this.update();
    }
  }

  /** Show what has changed. */
  update(): void {
    const { model } = this.session;
    if (!model.mesh || !this.width) {
      return;
    }
    const rebuilt = model.snapshots !== this.snapshots;
    const had = rebuilt && this.root.contains(document.activeElement);
    if (rebuilt) {
      this.snapshots = model.snapshots;
      this.build();
    }
    const labels = performance.now() - this.labelled > LABEL_EVERY;
    for (const [rank, tile] of this.shown()) {
      const row = model.ranks[rank];
      if (row && (row !== tile.row || labels)) {
        this.draw(tile, row, labels);
      }
    }
    if (labels) {
      this.labelled = performance.now();
    }
    if (rebuilt) {
      this.mark(...this.marked);
    }
    if (had) {
      // Only now: a focus makes the browser look at the tiles, and their colours would fade in from nothing.
      this.focus(this.focused);
    }
  }

  /** Show which ranks are pinned and selected, and which state stands out. */
  mark(pinned: number, selected: ReadonlySet<number>, only: State | null): void {
    const marks = JSON.stringify([pinned, [...selected], only, this.snapshots, this.width]);
    if (marks === this.marks) {
      return;
    }
    this.marks = marks;
    this.marked = [pinned, selected, only];
    this.root.dataset.only = only ?? '';
    for (const [rank, { element }] of this.shown()) {
      element.classList.toggle('mk-pinned', rank === pinned);
      element.setAttribute('aria-selected', String(rank === pinned || selected.has(rank)));
    }
  }

  /** Move the focus to a rank; to the one that had it last if none is named. */
  focus(rank = this.focused): void {
    if (this.tiles[rank]) {
      this.tiles[this.focused]?.element.setAttribute('tabindex', '-1');
      this.focused = rank;
      this.tiles[rank].element.setAttribute('tabindex', '0');
      this.tiles[rank].element.focus();
    }
  }

  /** Return the ranks that the view shows, with their tiles. */
  private shown(): [number, Tile][] {
    return this.lines.flat().map(rank => [rank, this.tiles[rank]]);
  }

  private build(): void {
    const mesh = this.session.model.mesh!;
    this.layout = layOut(mesh, this.width, this.session.model.shown());
    this.tiles = [];
    this.lines = [];
    this.marks = '';
    const { detail, width, height, gap } = this.layout.size;
    this.root.className = `mk-grid mk-is-${detail}`;
    this.root.style.cssText = `--mk-w:${width}px;--mk-h:${height}px;--mk-gap:${gap}px`;
    this.root.replaceChildren(...this.layout.boxes.map(box => this.buildBox(box.title, box.ranks, box.columns)));
    if (!this.tiles[this.focused]) {
      this.focused =
        this.lines
          .flat()
          .filter(rank => rank <= this.focused)
          .at(-1) ??
        this.lines[0]?.[0] ??
        0;
    }
    this.tiles[this.focused]?.element.setAttribute('tabindex', '0');
  }

  private buildBox(title: string, ranks: number[], columns: number): HTMLElement {
    const box = element('div', 'mk-box');
    if (title) {
      const name = element('div', 'mk-host');
      name.textContent = title;
      name.title = title;
      box.append(name);
    }
    const group = element('div', 'mk-rows');
    group.setAttribute('role', 'rowgroup');
    group.setAttribute('aria-label', title || this.trans.__('Ranks'));
    for (let at = 0; at < ranks.length; at += columns) {
      const row = element('div', 'mk-row');
      row.setAttribute('role', 'row');
      const line = ranks.slice(at, at + columns);
      row.append(...line.map(rank => this.buildTile(rank)));
      group.append(row);
      this.lines.push(line);
    }
    box.append(group);
    return box;
  }

  private buildTile(rank: number): HTMLElement {
    const { detail } = this.layout!.size;
    const tile = element('div', 'mk-tile');
    tile.setAttribute('role', 'gridcell');
    tile.setAttribute('tabindex', '-1');
    tile.dataset.rank = String(rank);
    if (detail !== 'sign' && detail !== 'dot') {
      tile.append(element('span', 'mk-number', String(rank)));
    }
    const add = (name: string, wanted: boolean) => (wanted ? tile.appendChild(element('span', name)) : null);
    const top = add('mk-sign', true);
    const text = add('mk-text', detail === 'full' || detail === 'wide');
    const more = add('mk-more', detail === 'full');
    this.tiles[rank] = { element: tile, row: null, class: '', top, text, more };
    return tile;
  }

  private draw(tile: Tile, row: Row, labels: boolean): void {
    const { detail } = this.layout!.size;
    if (row !== tile.row) {
      const name = `mk-tile mk-${row.state} mk-load${shade(row.load)}${row.restarts ? ' mk-again' : ''}`;
      if (name !== tile.class) {
        const pinned = tile.element.classList.contains('mk-pinned') ? ' mk-pinned' : '';
        tile.element.className = name + pinned;
        tile.class = name;
      }
      const sign = detail !== 'dot' || LOUD.has(row.state) ? LOOKS[row.state].sign : '';
      const counts = row.restarts > 0 && detail !== 'dot' && detail !== 'sign';
      // The sign of a restarted rank is the same arrow.
      const before = row.state === 'restarted' ? '' : `${sign} `;
      put(tile.top!, counts ? `${before}${LOOKS.restarted.sign}${row.restarts}` : sign);
      if (tile.text) {
        put(
          tile.text,
          row.state === 'failed' && row.reason ? row.reason : row.place || row.call || doing(row, this.trans)
        );
      }
    }
    if (tile.more && (labels || row !== tile.row)) {
      put(tile.more, this.footer(row));
    }
    if (labels || !tile.row) {
      tile.element.setAttribute('aria-label', sentence(row, this.session.model.now(), this.trans));
    }
    tile.row = row;
  }

  /** The last line of a large tile: since when, and the load. */
  private footer(row: Row): string {
    const since = duration(this.session.model.now() - row.since, this.trans);
    return row.load < 0.005 ? since : this.trans.__('%1 · load %2 %', since, Math.round(row.load * 100));
  }

  private rankOf(target: EventTarget | null): number {
    const tile = target instanceof Element ? target.closest<HTMLElement>('.mk-tile') : null;
    return tile ? Number(tile.dataset.rank) : -1;
  }

  private point(target: EventTarget | null): void {
    const rank = this.rankOf(target);
    this.events.point(rank, rank < 0 ? null : this.tiles[rank].element);
  }

  private click(event: MouseEvent): void {
    const rank = this.rankOf(event.target);
    if (rank < 0) {
      return;
    }
    this.focus(rank);
    event.shiftKey || event.ctrlKey || event.metaKey ? this.events.select(rank) : this.events.pin(rank);
  }

  private press(event: KeyboardEvent): void {
    const rank = this.rankOf(event.target);
    if (rank < 0 || !this.uses(event)) {
      return;
    }
    const to = this.move(rank, event.key, event.ctrlKey);
    if (to !== null) {
      this.focus(to);
    } else if (event.key === 'Enter') {
      this.events.pin(rank);
    } else if (event.key === ' ') {
      this.events.select(rank);
    } else {
      this.events.unpin();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** Return the rank to which a key leads. */
  private move(rank: number, key: string, far: boolean): number | null {
    const line = this.lines.findIndex(each => each.includes(rank));
    const column = this.lines[line]?.indexOf(rank) ?? 0;
    const order = this.lines.flat();
    const at = order.indexOf(rank);
    const within = (to: number) => {
      const target = this.lines[Math.max(0, Math.min(this.lines.length - 1, to))];
      return target[Math.min(column, target.length - 1)];
    };
    switch (key) {
      case 'ArrowRight':
        return order[Math.min(order.length - 1, at + 1)];
      case 'ArrowLeft':
        return order[Math.max(0, at - 1)];
      case 'ArrowDown':
        return within(line + 1);
      case 'ArrowUp':
        return within(line - 1);
      case 'Home':
        return far ? order[0] : this.lines[line][0];
      case 'End':
        return far ? order.at(-1)! : this.lines[line].at(-1)!;
      default:
        return null;
    }
  }
}

function element(tag: string, name: string, text = ''): HTMLElement {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

/** Whether a key leads to the first or the last rank. */
function isFar(event: KeyboardEvent): boolean {
  return event.ctrlKey && !event.altKey && !event.metaKey && (event.key === 'Home' || event.key === 'End');
}

function put(target: HTMLElement, text: string): void {
  if (target.textContent !== text) {
    target.textContent = text;
  }
}
