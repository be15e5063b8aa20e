"""Every private name of ipykernel and IPython that the kernel uses, and its assumptions about their internals.

Tests run each of these against the installed versions; `.ci/check-versions` runs them at the lowest and newest ones.
ipykernel is not imported here: an IPython shell without a kernel loads this file too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import currentframe
from io import StringIO
from types import CodeType, FrameType
from typing import Any, TypeVar

from IPython.core.interactiveshell import InteractiveShell

_Kernel = TypeVar("_Kernel", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])

_SHELL: Any = InteractiveShell
_RUN_CODE: CodeType = _SHELL.run_code.__code__
_MOST_TRANSFORMS = 5000
"""Magics and commands of one cell."""


def line_magic(name: str) -> Callable[[_Function], _Function]:
    """Method decorator: the magic ``%name``. IPython's own is not typed, nor are the next three."""
    return import_module("IPython.core.magic").line_magic(name)


def no_var_expand(function: _Function) -> _Function:
    """Decorator: a line magic whose braces are left alone."""
    return import_module("IPython.core.magic").no_var_expand(function)


def cell_magic(name: str) -> Callable[[_Function], _Function]:
    """Method decorator: the magic ``%%name``."""
    return import_module("IPython.core.magic").cell_magic(name)


def matcher(function: _Function) -> _Function:
    """Decorator: a matcher of the shell's completer that takes the context of the cursor."""
    return import_module("IPython.core.completer").context_matcher()(function)


def display(bundle: dict[str, str], display_id: str | None = None) -> None:
    """Show a MIME bundle in the running cell; with an id, it can be updated later."""
    import_module("IPython.display").display(bundle, raw=True, display_id=display_id)


def display_line(text: str, handle: Any = None) -> Any:
    """Show a line of text in the running cell, or put it in the place of an earlier one; return its handle."""
    bundle = {"text/plain": text}
    if handle is None:
        return import_module("IPython.display").display(bundle, raw=True, display_id=True)
    handle.update(bundle, raw=True)
    return handle


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


def syntax_lines(shell: Any, error: SyntaxError, number: int) -> list[str]:
    """Return the lines that IPython shows for a syntax error in a cell of this number: place, line, caret, message."""
    shell.compile._filename_map[error.filename] = number
    return shell.SyntaxTB.structured_traceback(type(error), error, [])


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


def transformed(shell: Any, text: str) -> str:
    """Return a cell with IPython's syntax rewritten as Python, each statement on its own lines.

    Code that is not Python even then is returned as it is.
    """
    manager = shell.input_transformer_manager
    lines: list[str] = text.splitlines(keepends=True)
    # IPython drops empty lines at the top.
    above = next((number for number, line in enumerate(lines) if line.strip()), 0)
    for transform in manager.cleanup_transforms + manager.line_transforms:
        lines = transform(lines)
    for _ in range(_MOST_TRANSFORMS):
        changed, after = manager.do_one_token_transform(lines)
        if not changed:
            break
        lines = _padded(lines, after)
    return "".join(["\n"] * above + lines)


def _padded(before: list[str], after: list[str]) -> list[str]:
    """Return lines with empty ones below a statement that a transform has joined into one line."""
    missing = len(before) - len(after)
    at = next((n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(after) - 1)
    return after[: at + 1] + ["\n"] * missing + after[at + 1 :]


def has_automagic(shell: Any) -> bool:
    """Return whether a line may begin with the name of a magic, without the percent sign."""
    return bool(shell.automagic)


def capturing_streams() -> dict[str, Any]:
    """Return the standard streams that are in memory now, by name, as in a ``%%capture`` cell.

    Only plain ones: the thread that writes to them runs no code of users.
    """
    streams: dict[str, Any] = {"stdout": sys.stdout, "stderr": sys.stderr}
    return {name: stream for name, stream in streams.items() if type(stream) is StringIO}


def reloads_extension() -> bool:
    """Return whether ``%reload_ext`` is under way: IPython unloads an extension before it loads it again."""
    frame = currentframe()
    while frame is not None:
        if frame.f_code.co_name == "reload_extension":
            return True
        frame = frame.f_back
    return False


def captures(publisher: Any) -> bool:
    """Return whether a publisher of displays keeps them for ``%%capture``."""
    return isinstance(publisher, import_module("IPython.core.displaypub").CapturingDisplayPublisher)
