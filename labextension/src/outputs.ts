/** Brings back the output of cells that run when the page opens, or that another page runs, and follows it. */

import type { CodeCell } from '@jupyterlab/cells';
import type { IOutputAreaModel } from '@jupyterlab/outputarea';
import type { KernelMessage } from '@jupyterlab/services';
import type { CellOutputs } from './protocol';
import type { IKernelLink } from './tokens';

type Message = KernelMessage.IMessage;

/** Kinds of messages that are outputs of a notebook file. */
const OUTPUTS = new Set(['stream', 'display_data', 'execute_result', 'error']);

const MOST_OTHERS = 64;

/** Ask for the output of running cells whenever the kernel answers again, and of each cell that another page runs. */
export function restoreOutputs(link: IKernelLink): void {
  const followers = new Map<string, Follower>();
  /** Cells of other pages. Their output is no change of this page's notebook, which it would offer to save. */
  const others = new Set<string>();
  const { context, content, sessionContext } = link.panel;
  const change = (request: string, act: () => void): void => {
    const { dirty } = context.model;
    act();
    if (others.has(request)) {
      context.model.dirty = dirty;
    }
  };
  link.reconnected.connect(() => link.send({ kind: 'read_outputs', request: '' }));
  link.received.connect((_, message) => {
    for (const each of message.kind === 'outputs' ? message.cells : []) {
      if (!followers.has(each.request)) {
        change(each.request, () => follow(link, each, followers));
      }
      if (each.ended) {
        others.delete(each.request);
      }
    }
  });
  sessionContext.iopubMessage.connect((_, message) => {
    const parent = (message.parent_header as { msg_id?: string }).msg_id ?? '';
    const follower = followers.get(parent);
    if (follower) {
      change(parent, () => {
        if (!follower.take(message)) {
          followers.delete(parent);
          others.delete(parent);
        }
      });
    } else if (message.header.msg_type === 'execute_input' && !runs(content.widgets, parent)) {
      if (others.size >= MOST_OTHERS) {
        // Requests of consoles have no cell, and no answer names them.
        others.clear();
      }
      others.add(parent);
      link.send({ kind: 'read_outputs', request: parent });
    }
  });
}

/** Return whether this page has sent the request that runs one of its cells. */
export function runs(cells: readonly unknown[], request: string): boolean {
  return cells.some(each => (each as Partial<CodeCell>).outputArea?.future?.msg.header.msg_id === request);
}

function follow(link: IKernelLink, outputs: CellOutputs, followers: Map<string, Follower>): void {
  const cell = link.panel.content.widgets.find(each => each.model.id === outputs.cell) as CodeCell | undefined;
  if (cell?.model.type === 'code' && isMissing(cell, outputs)) {
    const follower = new Follower(cell, outputs);
    if (!outputs.ended) {
      followers.set(outputs.request, follower);
    }
  }
}

/** Return whether a cell lacks output; a page that has started the cell itself has it all. */
export function isMissing(cell: Pick<CodeCell, 'model' | 'outputArea'>, outputs: CellOutputs): boolean {
  if (cell.outputArea.future?.msg.header.msg_id === outputs.request) {
    return false;
  }
  return !outputs.ended || cell.model.executionCount !== outputs.number;
}

/** Puts messages into the output area of a cell, as the future of its request would. */
export class Follower {
  private readonly displays = new Map<string, number[]>();
  private readonly outputs: IOutputAreaModel;
  private clears = false;

  constructor(
    private readonly cell: Pick<CodeCell, 'model'>,
    start: CellOutputs
  ) {
    const { model } = cell;
    this.outputs = model.outputs;
    this.outputs.fromJSON(start.outputs as never);
    for (const [at, output] of start.outputs.entries()) {
      this.note(output, at);
    }
    model.executionCount = start.number || null;
    setState(model, start.ended ? 'idle' : 'running');
  }

  /** Take a message; return false if it is the last one. */
  take(message: Message): boolean {
    const kind = message.header.msg_type;
    const content = message.content as never as Record<string, unknown> & { wait?: boolean; execution_state?: string };
    if (OUTPUTS.has(kind)) {
      this.add(kind, content);
    } else if (kind === 'update_display_data') {
      this.update(content);
    } else if (kind === 'clear_output') {
      this.clears = Boolean(content.wait);
      this.clears || this.clear();
    } else if (kind === 'status' && content.execution_state === 'idle') {
      setState(this.cell.model, 'idle');
      return false;
    }
    return true;
  }

  private add(kind: string, content: Record<string, unknown>): void {
    if (this.clears) {
      this.clears = false;
      this.clear();
    }
    const { transient: _, ...rest } = content;
    const length = this.outputs.add({ output_type: kind, ...rest } as never);
    this.note(content, length - 1);
  }

  private clear(): void {
    this.outputs.clear();
    this.displays.clear();
  }

  /** Remember where a display with an id is, for its updates. */
  private note(content: Record<string, unknown>, at: number): void {
    const id = displayId(content);
    if (id) {
      this.displays.set(id, [...(this.displays.get(id) ?? []), at]);
    }
  }

  private update(content: Record<string, unknown>): void {
    const { transient: _, ...rest } = content;
    for (const at of this.displays.get(displayId(content)) ?? []) {
      this.outputs.set(at, { output_type: 'display_data', ...rest } as never);
    }
  }
}

function displayId(content: Record<string, unknown>): string {
  return (content.transient as { display_id?: string } | undefined)?.display_id ?? '';
}

/** JupyterLab before 4.4 has no such property. */
function setState(model: { executionState?: 'idle' | 'running' | null }, state: 'idle' | 'running'): void {
  if ('executionState' in model) {
    model.executionState = state;
  }
}
