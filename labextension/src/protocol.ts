// Generated from monarch_kernel/views/protocol.py by `python -m monarch_kernel.views.typescript`.
/**
 * The messages between the kernel and its views in the browser: JSON objects
 * whose `kind` names the struct. `labextension/src/protocol.ts` is generated
 * from this file by `python -m monarch_kernel.views.typescript`; a test
 * compares them. The same messages go over the comm of a MeshView widget, and
 * over the comm `monarch.meshes` of the Meshes panel. A view asks first
 * (`Open`); the kernel answers with a `Snapshot`, and then sends a `Patch` when
 * something has changed: at most 10 a second for a mesh, fewer for large ones.
 * Times are seconds since the epoch on the kernel's clock; `now` tells a view
 * how far its own clock differs.
 */

/** Name of the comm target of the Meshes panel. */
export const TARGET = 'monarch.meshes';

/** Raised by a change that an older front end would misread. */
export const VERSION = 2;

/** A view forgets spans that ended longer ago than this. */
export const SPAN_SECONDS = 60;

/** How often a view says that it still shows a mesh. */
export const ALIVE_SECONDS = 30;

/**
 * Of the spans that have ended, a view keeps this many with the latest ends.
 */
export const MOST_SPANS = 4096;

/**
 * Attribute of the picture of a mesh with its display id: a page updates
 * pictures that it finds in a saved notebook.
 */
export const DISPLAY = 'data-monarch-display';

export type State =
  | 'starting'
  | 'idle'
  | 'running'
  | 'collective'
  | 'blocked'
  | 'paused'
  | 'unresponsive'
  | 'failed'
  | 'restarted'
  | 'stopped';

export type Action =
  | 'interrupt'
  | 'pause'
  | 'resume'
  | 'heal'
  | 'kill'
  | 'stacks';

/** How a state is shown, with its colours on light and dark pages. */
export interface Look {
  word: string;
  sign: string;
  light: string;
  dark: string;
}

export const LOOKS: Record<State, Look> = {
  starting: { word: 'starting', sign: '◌', light: '#8c96a3', dark: '#8c96a3' },
  idle: { word: 'idle', sign: '○', light: '#c3ccd6', dark: '#4a5563' },
  running: { word: 'running', sign: '▶', light: '#1b7f5c', dark: '#2fbf8f' },
  collective: { word: 'waiting in a collective', sign: '◐', light: '#e0a100', dark: '#f2c14e' },
  blocked: { word: 'in a C call', sign: '■', light: '#7a5195', dark: '#b78fd6' },
  paused: { word: 'paused', sign: '‖', light: '#2f6fb5', dark: '#64a8f0' },
  unresponsive: { word: 'unresponsive', sign: '?', light: '#b5651d', dark: '#e8965a' },
  failed: { word: 'dead', sign: '✕', light: '#b3261e', dark: '#ff6f61' },
  restarted: { word: 'restarted', sign: '↻', light: '#3aa0a8', dark: '#62c9d1' },
  stopped: { word: 'stopped', sign: '–', light: '#9aa3ad', dark: '#5b6570' }
};

/** A mesh as a whole. */
export interface MeshRow {
  uid: string;
  name: string;
  /** Axes, outermost first. */
  labels: string[];
  /** Ranks along each axis. */
  sizes: number[];
  /** Host of each rank. */
  hosts: string[];
  started: number;
  /** 0 while it lives. */
  ended?: number;
  /** Why it ended. */
  reason?: string;
  /** Actions that this kernel offers for its ranks. */
  actions?: Action[];
}

/** The state of a rank. A missing field has its default. */
export interface RankRow {
  rank: number;
  state: State;
  /** When it came into this state. */
  since: number;
  /**
   * Title of the oldest call that it runs or has queued, as in `cell [3]`;
   * empty if idle.
   */
  call?: string;
  /** Innermost line of user code, as in `cell [3] line 5`. */
  place?: string;
  /** Why it failed or is silent. */
  reason?: string;
  /** As in `all_reduce #12`. */
  collective?: string;
  queue?: number;
  pid?: number;
  device?: string;
  restarts?: number;
  /** Utilization of its GPU, or else the share of one core, from 0 to 1. */
  load?: number;
  /** Resident bytes. */
  rss?: number;
  gpu_memory?: number;
  /** Bytes by owner. */
  tensors?: Record<string, number>;
}

/** A cell or call. */
export interface CallRow {
  call: number;
  title: string;
  /** Number of the notebook cell; 0 if none. */
  cell: number;
  ranks: number[];
  /** Ranks that have not answered. */
  left: number[];
  started: number;
  ended?: number;
  /**
   * By rank, the first line of its error; those that were only stopped have
   * none here.
   */
  errors?: Record<string, string>;
  /**
   * Ranks that were ended from outside: by an interrupt, or because other ranks
   * had failed.
   */
  stopped?: number[];
  /** Why its ranks wait, for long; empty if they do not, or it is not known. */
  waits?: string;
}

/** Time that a rank spent in one state, for the timeline. */
export interface SpanRow {
  rank: number;
  state: State;
  begin: number;
  /** 0 if it lasts. */
  end?: number;
  title?: string;
}

/**
 * Values of a metric on a rank, and the place of the first one: the view drops
 * what it has from there on.
 */
export interface Points {
  name: string;
  /** -1 for the notebook. */
  rank: number;
  steps: number[];
  /** null stands for NaN and infinities. */
  values: (number | null)[];
  /** How many points the view keeps before these. */
  at?: number;
}

/** Progress of the ranks in one piece of work. */
export interface BarRow {
  bar: string;
  unit: string;
  /** Those that take part, in order; none for all ranks of the mesh. */
  ranks: number[];
  /** Of each of the ranks; one value if they work on it together. */
  done: number[];
  /**
   * Of each of the ranks; one value if it is the same for all. Not positive if
   * unknown.
   */
  total: number[];
  /** The ranks that continue. */
  left: number[];
  started: number;
  /** When the last rank ended; 0 while one continues. */
  ended?: number;
  /**
   * Whether it is work of the mesh as a whole, or of some ranks of it, instead
   * of that of each rank.
   */
  together?: boolean;
}

/** A tensor of a pinned rank. */
export interface TensorRow {
  name: string;
  shape: number[];
  dtype: string;
  device: string;
  /** null if it was not computed or is not finite. */
  norm?: number | null;
  nans?: number;
}

/** A line of output; ranks with equal lines share one. */
export interface LogLine {
  ranks: number[];
  /** `stdout` or `stderr`. */
  stream: string;
  text: string;
  cell?: number;
}

/** A mesh in the list of the Meshes panel. */
export interface MeshSummary {
  uid: string;
  name: string;
  /** 0 if unknown. */
  ranks: number;
  failed: number;
  running: number;
  /** Whether cells without `--mesh` go to it. */
  current?: boolean;
  /** Whether it outlives its notebook, and this one could attach it. */
  detached?: boolean;
  /**
   * The kernel of a mesh that is not this notebook's, as a person would name
   * it, or the state of a detached one; empty for this one's.
   */
  owner?: string;
  paused?: number;
  /**
   * Whether the process that `owner` names has attached a detached mesh, so
   * that no other can.
   */
  taken?: boolean;
}

/** The ranks that a `%%mesh` cell addresses. */
export interface CellTarget {
  /** Id of the cell. */
  cell: string;
  mesh: string;
  /** As in `0-3`; `all` for the whole mesh. */
  ranks: string;
  /** Why the line addresses no ranks, and what to write instead. */
  error?: string;
}

/** Everything of a mesh; replaces what the view has. */
export interface Snapshot {
  kind: 'snapshot';
  now: number;
  /** Number of the newest event that it shows. */
  number: number;
  mesh: MeshRow;
  ranks: RankRow[];
  calls: CallRow[];
  spans: SpanRow[];
  points: Points[];
  bars: BarRow[];
}

/**
 * The changes since the event `after`. Rows replace those of the same rank,
 * call, span or bar; points say where they go. A view whose newest event is not
 * `after` asks again with `Open`. If the mesh has got another shape, the kernel
 * sends a Snapshot instead.
 */
export interface Patch {
  kind: 'patch';
  uid: string;
  now: number;
  after: number;
  number: number;
  mesh?: MeshRow | null;
  ranks?: RankRow[];
  calls?: CallRow[];
  /** A span is identified by its rank and begin. */
  spans?: SpanRow[];
  points?: Points[];
  bars?: BarRow[];
  /** Calls that the view forgets. */
  dropped_calls?: number[];
  /** Bars that the view forgets. */
  dropped_bars?: string[];
}

/**
 * Answer to a message about a mesh that this kernel does not have, or from a
 * page of another version.
 */
export interface Gone {
  kind: 'gone';
  uid: string;
  reason: string;
}

/**
 * Answer to Alive, of a kernel that answers while a cell runs too: a view that
 * misses it says so.
 */
export interface Heard {
  kind: 'heard';
  uid: string;
}

/** A pinned rank, about once a second. */
export interface Details {
  kind: 'details';
  uid: string;
  rank: number;
  /**
   * Lines of its main thread's stack, outermost first; empty if the rank does
   * not answer.
   */
  stack: string[];
  /** Its last lines of output. */
  lines: LogLine[];
  tensors: TensorRow[];
  /** Why something is missing. */
  note?: string;
}

/**
 * Says that an action has begun. It comes late where messages of pages wait for
 * the running cell.
 */
export interface Taken {
  kind: 'taken';
  id: number;
}

/** An action has ended. */
export interface Done {
  kind: 'done';
  id: number;
  ok: boolean;
  /** Its effect, or the reason of its failure. */
  text: string;
}

/**
 * The meshes of this notebook, and others that it could attach; for the panel,
 * whenever they change.
 */
export interface Meshes {
  kind: 'meshes';
  version: number;
  meshes: MeshSummary[];
}

/** Answer to `ReadLogs`. */
export interface Logs {
  kind: 'logs';
  uid: string;
  lines: LogLine[];
  /** Whether there are older lines that match. */
  more: boolean;
}

/** Answer to `ReadTargets`. */
export interface Targets {
  kind: 'targets';
  targets: CellTarget[];
}

/** The output so far of a notebook cell that runs, or has run not long ago. */
export interface CellOutputs {
  /** Id of the cell. */
  cell: string;
  /** Id of the message that runs it: the parent of its further messages. */
  request: string;
  /** Its execution count. */
  number: number;
  /** As in a notebook file; displays with an id have `transient` too. */
  outputs: Record<string, unknown>[];
  ended?: boolean;
}

/** Answer to `ReadOutputs`. */
export interface Outputs {
  kind: 'outputs';
  cells: CellOutputs[];
}

/** A question of a cell needs no answer any more: its input box goes. */
export interface PromptOver {
  kind: 'prompt_over';
  /** Id of the message that runs the cell. */
  request: string;
  /** Id of the message that asked. */
  question: string;
}

/**
 * Asks for a Snapshot, and for a Patch at each change from then on. A widget
 * shows one mesh and leaves `uid` empty.
 */
export interface Open {
  kind: 'open';
  version: number;
  uid?: string;
  /**
   * Differs between the views that share a comm, as those of two pages with the
   * same widget do; the same in Alive, Close and Pin.
   */
  view?: string;
}

/**
 * Ends the patches of a mesh, unless another view behind the same comm shows
 * it.
 */
export interface Close {
  kind: 'close';
  uid?: string;
  view?: string;
}

/**
 * Says that a view still shows a mesh; the kernel ends the patches of one that
 * says nothing, as after its page was closed. It is an `Open` if they have
 * ended.
 */
export interface Alive {
  kind: 'alive';
  uid?: string;
  view?: string;
}

/**
 * Asks for the Details of a rank from now on, and for those of no other; of
 * none with -1.
 */
export interface Pin {
  kind: 'pin';
  rank: number;
  uid?: string;
  /** Whether to compute the norms of tensors above 64 MiB too. */
  norms?: boolean;
  view?: string;
}

/** Asks for an action; answered by Taken at once, and by Done at its end. */
export interface Act {
  kind: 'act';
  id: number;
  action: Action;
  /** Empty for all. */
  ranks: number[];
  uid?: string;
}

/** Asks for the newest lines of output that match. */
export interface ReadLogs {
  kind: 'read_logs';
  /** Empty for all. */
  ranks: number[];
  /** Part of the line, in any case; empty for all. */
  text: string;
  /** Empty for both. */
  stream: string;
  most: number;
  uid?: string;
}

/** Asks which ranks cells address. */
export interface ReadTargets {
  kind: 'read_targets';
  /** Ids of cells. */
  cells: string[];
  /** Their first lines. */
  lines: string[];
}

/** Asks for Meshes, now and at each change. */
export interface ListMeshes {
  kind: 'list_meshes';
  version: number;
}

/**
 * Asks for the output of the last cells, for a page that was not open all the
 * time, or has not started them.
 */
export interface ReadOutputs {
  kind: 'read_outputs';
  /**
   * Id of the message that runs a cell, for that of this one; empty for all.
   */
  request?: string;
}

/** Values of fields that a message leaves out. */
export const DEFAULTS = {
  MeshRow: { ended: 0.0, reason: '', actions: [] },
  RankRow: { call: '', place: '', reason: '', collective: '', queue: 0, pid: 0, device: '', restarts: 0, load: 0.0, rss: 0, gpu_memory: 0, tensors: {} },
  CallRow: { ended: 0.0, errors: {}, stopped: [], waits: '' },
  SpanRow: { end: 0.0, title: '' },
  Points: { at: 0 },
  BarRow: { ended: 0.0, together: false },
  TensorRow: { norm: null, nans: 0 },
  LogLine: { cell: 0 },
  MeshSummary: { current: false, detached: false, owner: '', paused: 0, taken: false },
  CellTarget: { error: '' },
  Patch: { mesh: null, ranks: [], calls: [], spans: [], points: [], bars: [], dropped_calls: [], dropped_bars: [] },
  Details: { note: '' },
  CellOutputs: { ended: false },
  Open: { uid: '', view: '' },
  Close: { uid: '', view: '' },
  Alive: { uid: '', view: '' },
  Pin: { uid: '', norms: false, view: '' },
  Act: { uid: '' },
  ReadLogs: { uid: '' },
  ReadOutputs: { request: '' }
};

export type FromKernel =
  | Snapshot
  | Patch
  | Gone
  | Heard
  | Details
  | Taken
  | Done
  | Meshes
  | Logs
  | Targets
  | Outputs
  | PromptOver;

export type FromView =
  | Open
  | Close
  | Alive
  | Pin
  | Act
  | ReadLogs
  | ReadTargets
  | ListMeshes
  | ReadOutputs;
