"""``__supervise__`` of an actor: called between two messages, with failures in the meshes that it owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._actors.actor import has_own
from monarch._actors.executors import start_task
from monarch._actors.mailbox import Mailbox
from monarch._actors.running import current
from monarch._core.kinds import is_coroutine
from monarch._node.remote_errors import pack_failure
from monarch._python.later import asyncio
from monarch._wire import messages as m

_judging: set[asyncio.Task[None]] = set()
"""Tasks that judge: an event loop keeps only weak references to them. Single operations only, which are atomic."""


def supervises(mailbox: Mailbox) -> bool:
    """Return whether an actor has ``__supervise__``."""
    return has_own(mailbox.instance, "__supervise__")


def supervise(mailbox: Mailbox, failure: Any, judged: Callable[[bool], None]) -> None:
    """Call an actor's ``__supervise__`` for a failure in a mesh that it owns, before messages that wait.

    Args:
        mailbox: the mailbox of the actor.
        failure: a MeshFailure.
        judged: called with whether the actor has handled it.
    """

    def act() -> None:
        if mailbox.halting is not None:
            # The stop ends the meshes that the actor owns.
            judged(True)
            return
        loop = mailbox.executor.loop
        if loop is not None:
            task = start_task(loop, _supervise_async(mailbox, failure, judged))
            _judging.add(task)
            task.add_done_callback(_judging.discard)
            return
        token = current.set((mailbox, m.Call(mailbox.node.proc, mailbox.key, "__supervise__", 0, b"", "", 0, b"")))
        try:
            handled = mailbox.instance.__supervise__(failure)
        except BaseException as error:
            # From here on, report this failure.
            mailbox.fail(pack_failure(error))
            handled = True
        finally:
            current.reset(token)
        judged(bool(handled))

    mailbox.executor.post_first(act)


async def _supervise_async(mailbox: Mailbox, failure: Any, judged: Callable[[bool], None]) -> None:
    try:
        handled = mailbox.instance.__supervise__(failure)
        if is_coroutine(handled):
            handled = await handled
    except BaseException as error:
        # A stop cancels it, and ends the meshes that the actor owns.
        if mailbox.halting is None or not isinstance(error, asyncio.CancelledError):
            mailbox.fail(pack_failure(error))
        handled = True
    judged(bool(handled))
