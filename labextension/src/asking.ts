/** Actions without a view: for commands while the panel is closed. */

import type { Action, Done } from './protocol';
import { LATE, NOT_HEARD, nextAction } from './session';
import type { IKernelLink } from './tokens';
import type { Trans } from './view/trans';

/** Ask for an action on all ranks of a mesh; return its outcome. */
export function ask(link: IKernelLink, uid: string, action: Action, trans: Trans): Promise<Done> {
  const id = nextAction();
  return new Promise(resolve => {
    let late: ReturnType<typeof setTimeout> | undefined;
    const finish = (done: Done) => {
      clearTimeout(late);
      stop();
      link.changed.disconnect(follow);
      link.reconnected.disconnect(expect);
      resolve(done);
    };
    const follow = () => {
      if (link.state !== 'live') {
        finish({ kind: 'done', id, ok: false, text: trans.__('The kernel has ended.') });
      }
    };
    // The answer may be lost, or the server has kept it and sends it soon.
    const expect = () => {
      clearTimeout(late);
      late = setTimeout(() => finish({ kind: 'done', id, ok: false, text: trans.__(NOT_HEARD) }), LATE);
    };
    const stop = link.listen(message => {
      if (message.kind === 'done' && message.id === id) {
        finish(message);
      }
    });
    link.changed.connect(follow);
    link.reconnected.connect(expect);
    link.send({ kind: 'act', id, action, ranks: [], uid });
  });
}
