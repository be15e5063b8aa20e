"""Unhandled failures, shown in the cell that caused them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import monarch.actor
from monarch._kernel_api import ProcMesh, describe_unhandled, is_a, report_of
from monarch.actor import MeshFailure, default_fault_hook
from monarch.exceptions import MonarchError
from monarch_kernel.cells.advice import NotebookAdvice
from monarch_kernel.output.streams import Streams


class CellHook:
    """The fault hook of a notebook: it writes to the cell whose spawn failed, or to the current cell.

    Args:
        streams: returns the streams of the notebook.
        advice: the advice in the notebook.
    """

    def __init__(self, streams: Callable[[], Streams], advice: NotebookAdvice) -> None:
        self._streams = streams
        self._advice = advice

    def __call__(self, failure: MeshFailure) -> None:
        todo = ""
        if is_a(failure.mesh, ProcMesh):
            # The session may end just now.
            with suppress(MonarchError):
                todo = self._advice.after_failure_of(failure.mesh, failure.ranks)
        self._streams().tell(f"{_died(failure, todo) if todo else describe_unhandled(failure)}\n", failure.port)


def _died(failure: MeshFailure, todo: str) -> str:
    """Return the text for ranks of a mesh of cells that have died while no cell waited for them."""
    at = time.strftime("%H:%M:%S ", time.localtime(failure.when)) if failure.when else ""
    return f"monarch: {at}{report_of(failure, f'mesh {failure.mesh_name!r}')}\n{todo}"


def install(streams: Callable[[], Streams], advice: NotebookAdvice) -> None:
    """Install the hook, unless the user has set one."""
    now = monarch.actor.unhandled_fault_hook
    if now is default_fault_hook or isinstance(now, CellHook):
        monarch.actor.unhandled_fault_hook = CellHook(streams, advice)
