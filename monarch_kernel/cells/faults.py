"""Unhandled failures, shown in the cell that caused them."""

from __future__ import annotations

from collections.abc import Callable

import monarch.actor
from monarch._kernel_api import describe_unhandled
from monarch.actor import MeshFailure, default_fault_hook
from monarch_kernel.output.streams import Streams


class CellHook:
    """The fault hook of a notebook: it writes to the cell whose spawn failed, or to the current cell.

    Args:
        streams: returns the streams of the notebook.
    """

    def __init__(self, streams: Callable[[], Streams]) -> None:
        self._streams = streams

    def __call__(self, failure: MeshFailure) -> None:
        self._streams().tell(f"{describe_unhandled(failure)}\n", failure.port)


def install(streams: Callable[[], Streams]) -> None:
    """Install the hook, unless the user has set one."""
    now = monarch.actor.unhandled_fault_hook
    if now is default_fault_hook or isinstance(now, CellHook):
        monarch.actor.unhandled_fault_hook = CellHook(streams)
