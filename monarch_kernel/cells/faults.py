"""Failures that nobody handles, shown in the cell that they came of."""

from __future__ import annotations

from collections.abc import Callable

import monarch.actor
from monarch._kernel_api import describe_unhandled
from monarch.actor import MeshFailure, default_fault_hook
from monarch_kernel.output.streams import Streams


class CellHook:
    """The hook of a notebook: writes to the cell whose spawn has failed; of other failures to the one that runs.

    Args:
        streams: those of the notebook, when they are needed.
    """

    def __init__(self, streams: Callable[[], Streams]) -> None:
        self._streams = streams

    def __call__(self, failure: MeshFailure) -> None:
        self._streams().tell(f"{describe_unhandled(failure)}\n", failure.port)


def install(streams: Callable[[], Streams]) -> None:
    """Puts the hook in place, unless the person has put one of their own there."""
    now = monarch.actor.unhandled_fault_hook
    if now is default_fault_hook or isinstance(now, CellHook):
        monarch.actor.unhandled_fault_hook = CellHook(streams)
