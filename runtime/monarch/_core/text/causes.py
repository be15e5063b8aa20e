"""The sentences about processes that ended, and hosts out of reach."""

from __future__ import annotations

import signal

from monarch._core import causes as c

_MANY = {"was": "were", "is": "are", "has": "have", "refuses": "refuse"}


def describe(cause: c.Cause, at: c.CellRef | None = None) -> str:
    """Return the predicate, as in ``was killed by signal 9 (SIGKILL) at cell [3] line 5``.

    Args:
        cause: what happened to one process.
        at: the cell line that it ran; None if it ran none.
    """
    if isinstance(cause, c.NotRestarted):
        return f"{describe(cause.how, at)}, and could not be restarted: {cause.error}"
    return _of(cause) + (f" {place(at)}" if at is not None else "")


def describe_all(cause: c.Cause, at: c.CellRef | None = None) -> str:
    """Return the same for several processes: ``were killed by signal 9 (SIGKILL)``."""
    verb, space, rest = describe(cause, at).partition(" ")
    return _MANY.get(verb, verb) + space + rest.replace("with its host", "with their host")


def participle(cause: c.Cause) -> str:
    """Return what can follow a rank in a list: ``killed by signal 9 (SIGKILL)``, ``exited with code 1``."""
    return describe(cause).removeprefix("was ")


def place(at: c.CellRef) -> str:
    """Return ``at cell [3] line 5``."""
    return f"at cell [{at.number}] line {at.line}"


def signal_text(number: int) -> str:
    """Return ``signal 9 (SIGKILL)``, or the number alone for one without a name."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _of(cause: c.Cause) -> str:
    match cause:
        case c.Exited(code):
            return f"exited with code {code}"
        case c.Signaled():
            return _signaled(cause)
        case c.Stopped():
            return "was stopped"
        case c.Overdue(grace):
            return f"did not stop within {grace:g} s and was killed" if grace else "was killed"
        case c.NotStarted(why):
            return f"could not be started: {why}"
        case c.NotReady(seconds):
            return (
                f"could not be started: it was not ready within {seconds:g} s; if imports take that long here, "
                f"set MONARCH_READY_SECONDS"
            )
        case c.Unknown():
            return "was never started on this host"
        case c.Orphaned(owner, how):
            return f"was killed because its owner, {owner}, {describe(how)}"
        case c.HostLost(host):
            return f"was lost with its host {host}: the connection to it broke"
        case c.HostsParted(lost, kept):
            return f"was dropped with its host {lost}: the connection between hosts {lost} and {kept} broke"
        case c.AgentEnded(how, tail):
            end = describe(how) if how is not None else "ended"
            return f"was lost with the host agent, which {end}" + (f": {tail}" if tail else "")
        case c.NotInSession():
            return "is on a host that is not in this session"
        case c.NotAttached(host):
            return f"is on host {host}, which this program has not attached"
        case c.Detached(mesh):
            return f"has ended, or lost its connection; its mesh {mesh!r} is kept for the next program"
        case c.Refused(why):
            return f"refuses messages: {why}"
        case c.NotRestarted():
            return describe(cause)


def _signaled(cause: c.Signaled) -> str:
    text = f"was killed by {signal_text(cause.signal)}"
    if cause.out_of_memory:
        text += ", while the OS was out of memory and killing processes (OOM killer)"
    if cause.full_shm:
        text += (
            f" while /dev/shm, of {cause.full_shm}, was full; make it larger (docker run --shm-size=8g, or "
            f"mount -o remount,size=8g /dev/shm), or use less shared memory (fewer DataLoader workers)"
        )
    return text
