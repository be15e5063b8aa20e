"""The sentences about processes that ended, and hosts out of reach."""

from __future__ import annotations

import signal
from typing import NamedTuple

from monarch._core import causes as c


class _Words(NamedTuple):
    """The words of a sentence that differ for one process and for several."""

    was: str
    """With a space after it, or empty where a list needs no verb."""
    is_: str
    has: str
    refuses: str
    its: str
    it: str


_ONE = _Words("was ", "is", "has", "refuses", "its", "it")
_MANY = _Words("were ", "are", "have", "refuse", "their", "they")
_LISTED = _ONE._replace(was="")


def describe(cause: c.Cause, at: c.CellRef | None = None) -> str:
    """Return the predicate, as in ``was killed by signal 9 (SIGKILL) at cell [3] line 5``.

    Args:
        cause: what happened to one process.
        at: the cell line that it ran; None if it ran none.
    """
    return _describe(cause, at, _ONE)


def describe_all(cause: c.Cause, at: c.CellRef | None = None) -> str:
    """Return the same for several processes: ``were killed by signal 9 (SIGKILL)``."""
    return _describe(cause, at, _MANY)


def participle(cause: c.Cause) -> str:
    """Return what can follow a rank in a list: ``killed by signal 9 (SIGKILL)``, ``exited with code 1``."""
    return _describe(cause, None, _LISTED)


def _describe(cause: c.Cause, at: c.CellRef | None, words: _Words) -> str:
    if isinstance(cause, c.NotRestarted):
        return f"{_describe(cause.how, at, words)}, and could not be restarted: {cause.error}"
    return _of(cause, words) + (f" {place(at)}" if at is not None else "")


def place(at: c.CellRef) -> str:
    """Return ``at cell [3] line 5``."""
    return f"at cell [{at.number}] line {at.line}"


def signal_text(number: int) -> str:
    """Return ``signal 9 (SIGKILL)``, or the number alone for one without a name."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _of(cause: c.Cause, words: _Words) -> str:
    match cause:
        case c.Exited(code):
            return f"exited with code {code}"
        case c.Signaled():
            return _signaled(cause, words)
        case c.Stopped():
            return f"{words.was}stopped"
        case c.Overdue(grace):
            late = f" because {words.it} did not stop within {grace:g} s" if grace else ""
            return f"{words.was}killed{late}"
        case c.NotStarted(why):
            return f"could not be started: {why}"
        case c.NotReady(seconds):
            return (
                f"could not be started: {words.it} {words.was}not ready within {seconds:g} s; if imports take that "
                f"long here, raise MONARCH_READY_SECONDS"
            )
        case c.Unknown():
            return f"{words.was}never started on this host"
        case c.Orphaned(owner, how):
            return f"{words.was}killed because {words.its} owner, {owner}, {describe(how)}"
        case c.HostLost(host):
            return f"{words.was}lost with {words.its} host {host}: the connection to it broke"
        case c.HostsParted(lost, kept):
            return (
                f"{words.was}dropped with {words.its} host {lost}: the connection between hosts {lost} and {kept} broke"
            )
        case c.AgentEnded(how, tail):
            end = describe(how) if how is not None else "ended"
            return f"{words.was}lost with the host agent, which {end}" + (f": {tail}" if tail else "")
        case c.NotInSession():
            return f"{words.is_} on a host that is not in this session"
        case c.NotAttached(host):
            return f"{words.is_} on host {host}, which this program has not attached"
        case c.Detached(mesh):
            kept = f"{words.its} mesh {mesh!r} keeps running for the next program"
            return f"{words.has} ended, or lost {words.its} connection; {kept}"
        case c.Refused(why):
            return f"{words.refuses} messages: {why}"
        case c.NotRestarted():
            return _describe(cause, None, words)


def _signaled(cause: c.Signaled, words: _Words) -> str:
    text = f"{words.was}killed by {signal_text(cause.signal)}"
    if cause.out_of_memory:
        text += ", while the OS was out of memory and killing processes (OOM killer)"
    if cause.full_shm:
        text += (
            f" while /dev/shm, of {cause.full_shm}, was full; make it larger (docker run --shm-size=8g, or "
            f"mount -o remount,size=8g /dev/shm), or use less shared memory (fewer DataLoader workers)"
        )
    return text
