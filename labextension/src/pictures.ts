/**
 * Updates the pictures of meshes in a notebook that was opened after their cells had run: the kernel continues to update
 * them, but JupyterLab knows only the display ids of what this page has received itself.
 */

import type { IOutputAreaModel } from '@jupyterlab/outputarea';
import type { KernelMessage } from '@jupyterlab/services';
import { DISPLAY } from './protocol';
import type { IKernelLink } from './tokens';

const HTML = 'text/html';

interface Update {
  data?: Record<string, unknown>;
  metadata?: Record<string, unknown>;
  transient?: { display_id?: string };
}

/** Carry out the kernel's updates of pictures in a notebook. */
export function updatePictures(link: IKernelLink): void {
  link.panel.sessionContext.iopubMessage.connect((_, message: KernelMessage.IMessage) => {
    if (message.header.msg_type === 'update_display_data') {
      const update = message.content as Update;
      for (const cell of isPicture(update) ? (link.panel.content.model?.cells ?? []) : []) {
        if (cell.type === 'code') {
          updatePicture((cell as unknown as { outputs: IOutputAreaModel }).outputs, update);
        }
      }
    }
  });
}

function isPicture({ data, transient }: Update): boolean {
  return Boolean(transient?.display_id) && textOf(data?.[HTML]).includes(DISPLAY);
}

/** Update a picture among the outputs of a cell, unless JupyterLab has just done it; return whether it did. */
export function updatePicture(outputs: Pick<IOutputAreaModel, 'length' | 'get' | 'set'>, update: Update): boolean {
  const { data, metadata, transient } = update;
  const named = `${DISPLAY}="${transient?.display_id}"`;
  for (let at = 0; at < outputs.length; at++) {
    const { type, data: old } = outputs.get(at);
    const html = textOf(old[HTML]);
    if (html.includes(named)) {
      const isNew = html !== textOf(data?.[HTML]);
      if (isNew) {
        outputs.set(at, { output_type: type, data, metadata: metadata ?? {} } as never);
      }
      return isNew;
    }
  }
  return false;
}

/** Return text as a notebook file may hold it: in one piece, or in lines. */
function textOf(value: unknown): string {
  return Array.isArray(value) ? value.join('') : String(value ?? '');
}
