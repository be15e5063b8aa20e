/** Removes the input boxes of questions that the kernel no longer asks, as after a Resume in the panel. */

import type { CodeCell } from '@jupyterlab/cells';
import type { OutputArea } from '@jupyterlab/outputarea';
import type { Kernel } from '@jupyterlab/services';
import type { Panel } from '@lumino/widgets';
import type { PromptOver } from './protocol';
import type { IKernelLink } from './tokens';

const BOX = 'jp-OutputArea-stdin-item';
/** Times at which the box is looked for, in ms: the question may come after the news that it is over. */
const LOOKS = [0, 200, 1000];

/** The parts of a kernel that hold back other cells while a box is open; JupyterLab before 4.4 has the property only. */
type Guarded = Kernel.IKernelConnection & { hasPendingInput?: boolean; removeInputGuard?(): void };

/** Remove the boxes of a notebook that are over. */
export function closePrompts(link: IKernelLink): void {
  link.received.connect((_, message) => {
    if (message.kind === 'prompt_over') {
      look(link, message, 0);
    }
  });
}

function look(link: IKernelLink, over: PromptOver, at: number): void {
  setTimeout(() => {
    if (!link.panel.isDisposed && !close(link, over) && at + 1 < LOOKS.length) {
      look(link, over, at + 1);
    }
  }, LOOKS[at]);
}

/** Remove the box of a question; return whether it was there. */
function close(link: IKernelLink, over: PromptOver): boolean {
  const cells = link.panel.content.widgets.filter(each => each.model?.type === 'code') as CodeCell[];
  const area = cells.find(each => each.outputArea?.future?.msg.header.msg_id === over.request)?.outputArea;
  const box = area && boxesOf(area).find(each => questionOf(each) === over.question);
  if (!box) {
    return false;
  }
  box.dispose();
  if (!boxesOf(area).length) {
    const kernel = link.panel.sessionContext.session?.kernel as Guarded | null | undefined;
    if (kernel?.removeInputGuard) {
      kernel.removeInputGuard();
    } else if (kernel) {
      kernel.hasPendingInput = false;
    }
  }
  return true;
}

function boxesOf(area: OutputArea): Panel[] {
  return area.widgets.filter(each => each.hasClass(BOX)) as Panel[];
}

/** Return the id of the message that an input box answers. */
export function questionOf(box: Panel): string {
  const inputs = box.widgets as unknown as { _parentHeader?: { msg_id?: string } }[];
  return inputs.map(each => each._parentHeader?.msg_id ?? '').find(Boolean) ?? '';
}
