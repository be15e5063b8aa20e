"""Every private name of ipykernel and IPython that the kernel uses, and its assumptions about their internals.

Tests run each of these against the installed versions; `.ci/check-versions` runs them at the lowest and newest ones.
ipykernel is not imported here: an IPython shell without a kernel loads this file too.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, TypeVar

from IPython.core.interactiveshell import InteractiveShell

_Kernel = TypeVar("_Kernel", bound=type)

_RUN_CODE = InteractiveShell.run_code.__code__


def runs_cell(frame: FrameType | None) -> bool:
    """Return whether the thread with this innermost frame runs the code of a cell."""
    while frame is not None:
        if frame.f_code is _RUN_CODE:
            return True
        frame = frame.f_back
    return False


def cancels_awaits(kernel: _Kernel) -> _Kernel:
    """Class decorator: ipykernel enters ``kernel.cancel_on_sigint(future)`` while a cell awaits something.

    Raises:
        AttributeError: this version of ipykernel lacks the hook.
    """
    before: Any = kernel
    assert callable(before._cancel_on_sigint)
    before._cancel_on_sigint = before.cancel_on_sigint
    return kernel


def show_traceback(shell: Any, kind: type[BaseException], error: BaseException, lines: list[str]) -> None:
    """Show an error as these lines, in the output of the cell and in the reply to it."""
    shell._showtraceback(kind, error, lines)


def cell_number(shell: Any, filename: str) -> int | None:
    """Return the number of the cell whose code has this file name; None if no cell has."""
    return shell.compile._filename_map.get(filename)


def publish(kernel: Any, kind: str, content: dict[str, Any], parent: Any, topic: str = "") -> None:
    """Send a message to all frontends, from any thread, and even after the end of its cell.

    Args:
        kernel: the sender.
        kind: type of the message, such as ``stream``.
        content: of the message.
        parent: the request of the cell, with its header.
        topic: for subscribers to select by; empty for the kind of the message.
    """
    kernel.session.send(kernel.iopub_socket, kind, content, parent=parent, ident=(topic or kind).encode())
