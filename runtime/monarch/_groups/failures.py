"""Errors of calls that use process groups: what broke a collective, rather than what torch says of its connections."""

from __future__ import annotations

import re

from monarch._actors.running import current
from monarch._groups.breaking import give_up_everywhere
from monarch._groups.rendezvous import local_rendezvous
from monarch.exceptions import CollectiveMismatchError, GroupError

_BROKEN = re.compile(r"gloo/|NCCL error|Connection (closed|reset) by peer|Connection was likely closed")
"""torch's messages for a collective with broken connections."""
_HEARING = 0.15
"""Seconds to wait for the reason why a collective's connections were closed."""


def note_failure(error: BaseException) -> GroupError | None:
    """Handle an error of an endpoint or a cell: after a broken collective, the next use makes new groups.

    Returns:
        A replacement if the call was freed from a collective, since torch only reports closed connections.
    """
    own = local_rendezvous()
    if isinstance(error, CollectiveMismatchError):
        # No collective has begun, so the groups work.
        return None
    here = current.get()
    # A newer generation, which may begin now, is not the broken one.
    number, reason = own.generation, ""
    if here is not None:
        src, port = here[1].src, here[1].port
        if port:
            own.calls.fail(src, port)
            if own.has_default:
                own.on_failed()
        number = own.calls.used(src, port, number)
        # The closed connections of another freed rank may be noticed before the reason arrives.
        reason = own.calls.take_freed(src, port, own.generation, _HEARING if broke(error) else 0.0)
        aborted = own.calls.take_aborted(src, port)
        if aborted and isinstance(error, KeyboardInterrupt):
            return _instead_of(error, GroupError(aborted, mesh=own.procs().name))
    if broke(error):
        give_up_everywhere(number)
    # A pending interrupt is raised when the collective ends, with its error as context.
    caused = broke(error) or (isinstance(error, KeyboardInterrupt) and broke(error.__context__))
    # So is one that arrived after the collective was freed.
    caused = caused or (isinstance(error, GroupError) and str(error) == reason)
    if not reason or not caused:
        return None
    # Report the origin of the error, not gloo's text about connections closed here.
    return _instead_of(error, GroupError(reason, mesh=own.procs().name))


def broke(error: BaseException | None) -> bool:
    """Return whether an error comes from broken connections of a collective or of a group being made."""
    if not isinstance(error, RuntimeError):
        return False
    try:
        text = str(error)
    except BaseException:
        # A class of the user's own; torch's errors have a text.
        return False
    return _BROKEN.search(text) is not None


def _instead_of(error: BaseException, known: GroupError) -> GroupError:
    """Replace an error with a more precise one, keeping its traceback."""
    known.__suppress_context__ = True
    return known.with_traceback(error.__traceback__)
