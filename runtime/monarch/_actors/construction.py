"""The construction of an actor: the first thing that its thread or event loop does."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from monarch._actors.actor import is_async
from monarch._actors.ending import pack_unreadable
from monarch._actors.mailbox import NOTHING, Mailbox
from monarch._actors.running import current, explained
from monarch._node.rank_config import ActorSpec
from monarch._node.remote_errors import is_consequence, pack_failure
from monarch._wire import messages as m
from monarch.exceptions import SerializationError, StoppedError


def construct(mailbox: Mailbox, create: m.Create, more: Sequence[Any], broken: bytes | None = None) -> None:
    """Construct an actor and answer, in its thread or on its event loop.

    Args:
        mailbox: the mailbox of the actor.
        create: the message to construct it.
        more: the buffers of the message.
        broken: the failure of this process's bootstrap, if any; then the actor is not constructed.
    """
    mailbox.since = monotonic()
    # Arguments may block while they are unpickled. A stop that gives them up answers this message.
    mailbox.running = m.Call(create.src, mailbox.key, "__init__", create.port, create.view, "", 0, b"")
    try:
        with mailbox.executor.user_code():
            spec: ActorSpec = mailbox.node.bulk.load(create, more)
        if spec.whole:
            # The mesh may have been resized since this was sent.
            spec.region = spec.procs.region()
        mailbox.take_spec(spec)
    except BaseException as error:
        _fail_unless_stopped(mailbox, create, error, isinstance(error, SerializationError))
        return
    finally:
        mailbox.running = None
    if broken is not None:
        _answer_failure(mailbox, create, broken)
    elif is_async(spec.cls):
        mailbox.executor.enter_loop(lambda: _initialize(mailbox, spec, create))
    else:
        _initialize(mailbox, spec, create)


def _initialize(mailbox: Mailbox, spec: ActorSpec, create: m.Create) -> None:
    """Run the constructor."""
    node = mailbox.node
    call = m.Call(create.src, mailbox.key, "__init__", create.port, create.view, "", 0, b"")
    token = current.set((mailbox, call))
    mailbox.since = monotonic()
    mailbox.running = call
    try:
        with mailbox.executor.user_code():
            mailbox.instance = spec.cls(*spec.args, **spec.kwargs)
    except BaseException as error:
        freed = explained(error)
        _fail_unless_stopped(mailbox, create, freed or error, False, is_consequence(freed))
    else:
        node.output.idle()
        node.replies.answer(create.src, create.port, create.view, m.RESULT, NOTHING)
    finally:
        mailbox.running = None
        current.reset(token)


def _fail_unless_stopped(
    mailbox: Mailbox, create: m.Create, error: BaseException, own: bool, freed: bool = False
) -> None:
    """Answer with an error; with that of the stop if its interrupt was the error."""
    if mailbox.ending is not None and isinstance(error, KeyboardInterrupt):
        error = StoppedError(f"{mailbox.title()} was stopped before it was created: {mailbox.ending}")
        own = True
    _answer_failure(mailbox, create, pack_unreadable(error) or pack_failure(error, own, freed))


def _answer_failure(mailbox: Mailbox, create: m.Create, failure: bytes) -> None:
    mailbox.node.output.idle()
    mailbox.failed = failure
    mailbox.node.replies.answer(create.src, create.port, create.view, m.ERROR, failure)
