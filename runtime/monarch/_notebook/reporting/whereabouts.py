"""Where the code of a call is: its line, and the collective that it waits in, as a service that answers meanwhile."""

from __future__ import annotations

import os
import re
from types import FrameType
from typing import NamedTuple

from monarch._core.unjoined import CollectiveWait
from monarch._node.remote_errors import is_ours
from monarch._node.services.registry import service
from monarch._notebook.reporting.busy import call_in_cell, place_of
from monarch._python.frames import frame_of
from monarch._supervision.freeing import running, thread_of
from monarch._supervision.unjoined import waits

_PYTHON = os.path.dirname(os.__file__) + os.sep
_CALL = re.compile(r"(?:await )?(?P<name>[A-Za-z_][\w.]*)\(")


class Whereabouts(NamedTuple):
    """The position of a call."""

    place: str
    """The innermost line of a cell, as in ``cell [3] line 5``, or else of a user's file, as in ``train.py:5``."""
    call: str
    """The function that this line is calling, such as ``time.sleep``; empty if unknown."""
    waits: CollectiveWait | None
    """The collective that it waits in."""
    tensors: str
    """The types and shapes of the tensors of this collective, where all ranks must give the same; empty if unknown."""


@service("whereabouts.whereabouts", "threaded")
def whereabouts(key: str, src: str, port: int) -> Whereabouts | None:
    """Service: return where a call is; None if it does not run here.

    Args:
        key: the key of the actor's mesh.
        src: proc that has called.
        port: where it waits for the answer.
    """
    found = running(key, src, port)
    if found is None:
        return None
    frame = frame_of(thread_of(found[0]))
    collective, tensors = waits(key, src, port), ""
    if collective is not None:
        from monarch._tensors.collectives.waiting import tensors_in

        tensors = tensors_in(frame)
    call = _CALL.match(call_in_cell(frame))
    return Whereabouts(place_of(frame) or _line_of_user(frame), call["name"] if call else "", collective, tensors)


def _line_of_user(frame: FrameType | None) -> str:
    """Return the innermost line that is neither of Python, of this package, nor installed."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not (is_ours(name) or name.startswith((_PYTHON, "<")) or "-packages" + os.sep in name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
