"""Errors that end an actor or refuse a message, errors of arguments, and ends that an actor asks for itself."""

from __future__ import annotations

from monarch._actors.running import ActorLike
from monarch._node.node import Node
from monarch._node.remote_errors import (
    exception_of,
    in_cleanup,
    is_ours,
    pack_failure,
    unpack_failure,
    with_source,
)
from monarch._python.later import asyncio
from monarch._wire import messages as m
from monarch.exceptions import MonarchError, SerializationError, StoppedError, SupervisionError


def ends_actor(error: BaseException) -> bool:
    """Return whether an error of an endpoint ends its actor: ``SystemExit`` does, an interrupt of a Stop does not."""
    return not isinstance(error, (Exception, KeyboardInterrupt, asyncio.CancelledError))


def pack_end(title: str, method: str, failure: bytes) -> bytes:
    """Return the report to the caller of an error that ended the actor."""
    known = unpack_failure(failure)
    trace = "\n".join(with_source(known.trace))
    text = f"{title}.{method}() raised {known.kind}: {known.text}, which ended the actor\n{trace}"
    return pack_failure(failed_actor(title, text), True)


def failed_actor(title: str, text: str) -> SupervisionError:
    """Return the error of a call to an actor that has failed."""
    error = SupervisionError(text, mesh=title)
    error.actor_failed = True
    return error


def pack_unreadable(error: BaseException) -> bytes | None:
    """Return the packed error of the user's code that ran while arguments were unpickled, or None."""
    cause = error.__cause__
    if not isinstance(error, SerializationError) or cause is None or raised_by_us(cause):
        return None
    if isinstance(cause, (ImportError, MonarchError)):
        # The text of these says what to do.
        return None
    known = unpack_failure(pack_failure(cause))
    known.text = f"{known.text} (while its arguments were unpickled)"
    return m.encode(known)


def pack_unsent(error: BaseException) -> bytes:
    """Return a packed error that was raised between an endpoint and the sending of its answer."""
    known = unpack_failure(pack_failure(error))
    known.text = f"{known.text} (raised outside the endpoint, which may have run; its result is lost)"
    return m.encode(known)


def raised_by_us(error: BaseException) -> bool:
    """Return whether no code of a user took part in raising an error."""
    tb = error.__traceback__
    while tb is not None:
        if not is_ours(tb.tb_frame.f_code.co_filename):
            return False
        tb = tb.tb_next
    return True


def cause_of_end(failed: bytes | None) -> Exception | None:
    """Return what ``__cleanup__`` gets: the error that an actor has failed with; None after a normal stop."""
    if failed is None:
        return None
    known = unpack_failure(failed)
    error = exception_of(known)
    return error if isinstance(error, Exception) else SupervisionError(f"{known.kind}: {known.text}")


def stop_itself(mailbox: ActorLike, reason: str) -> None:
    """Stop an actor by its own wish: after earlier messages, with its ``__cleanup__``."""

    def ended(failure: bytes | None) -> None:
        spec = mailbox.spec
        if failure is not None and spec is not None:
            fault = m.Fault(mailbox.node.proc, mailbox.key, mailbox.rank, in_cleanup(failure))
            mailbox.node.peers.get(spec.owner).send(m.encode(fault))

    mailbox.halt(reason, ended)


def fail_itself(mailbox: ActorLike, reason: str) -> None:
    """Mark an actor failed by its own wish; its owner is told."""
    mailbox.fail(pack_failure(failed_actor(mailbox.title(), f"the actor aborted itself: {reason}"), True))


def unpack_text(failure: bytes) -> str:
    """Return the kind and message of a packed failure, in one line."""
    known = unpack_failure(failure)
    return f"{known.kind}: {known.text}".splitlines()[0]


def unpicklable(title: str, call: m.Call, error: BaseException) -> SerializationError:
    """Return the error of a call whose result cannot be pickled."""
    why = error if isinstance(error, Exception) else f"pickling it raised {type(error).__name__}"
    made = SerializationError(f"the result of {title}.{call.method}() cannot be sent: {why}")
    made.__cause__, made.reason = error, str(why)
    return made


def refuse(node: Node, call: m.Call, reason: str | None, fate: str = "the call did not begin") -> None:
    """Answer a message to an actor that does not exist here (any more)."""
    error = StoppedError(
        f"actor {call.actor} was stopped{': ' + reason if reason else ''}; {fate}"
        if reason is not None
        else f"actor {call.actor} does not exist in {node.proc}; it was never spawned there, or its spawn failed"
    )
    reject(node, call, error, True)


def reject(node: Node, call: m.Call, error: BaseException, own: bool) -> None:
    """Answer a message with an error instead of handling it; from any thread."""
    node.replies.finished(call.src, call.cost, bool(call.port))
    failure = pack_failure(error, own)
    if call.port:
        node.replies.answer(call.src, call.port, call.view, m.ERROR, failure)
    else:
        node.peers.get(call.src).send(m.encode(m.Fault(node.proc, call.actor, node.rank, failure)))
