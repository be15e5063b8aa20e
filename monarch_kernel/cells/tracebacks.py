"""Monarch errors in a notebook: with the user's frames, without those of this package."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import linecache
import os
import re
import sys
import traceback
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Protocol

from monarch._kernel_api import is_ours
from monarch.exceptions import ActorError, ArgumentError, AxisError, MonarchError, PointError, ShapeError
from monarch_kernel.calls.running import RunningCalls
from monarch_kernel.calls.stop_report import StopReport
from monarch_kernel.calls.stop_run import uninterrupted
from monarch_kernel.cells.hints import Hints
from monarch_kernel.cells.stopping import Stopping
from monarch_kernel.compat import cell_number, missing_magic, show_traceback, syntax_lines
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.suggest import most_similar
from monarch_kernel.kernel_like import kernel_of, own_kernel, request_of
from monarch_kernel.meshes.registry import NoMeshError
from monarch_kernel.output.cell_errors import CellStopped
from monarch_kernel.source.cell import CellSyntaxError

_MAGIC = re.compile(r"get_ipython\(\)\.run_(?P<kind>cell|line)_magic\('(?P<name>%?\w+)', '(?P<line>(?:[^'\\]|\\.)*)'")
_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:, in <module>)?')
_MISTAKES = (HeaderError, NoMeshError, ArgumentError, AxisError, PointError, ShapeError)
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STREAM = os.path.join(_HERE, "output", "notebook_stream.py")
"""Part of ``print()`` for the person."""


_NO_GROUP = "Default process group has not been initialized"
"""torch's words for code that runs outside of ranks."""
_IN_NOTEBOOK = "this cell ran in the notebook, which is no rank; begin it with %%mesh to run it on the ranks"
# HeaderError is a ValueError, like the other errors about invalid lines.
_KINDS = (MonarchError, HeaderError, CellSyntaxError, NameError, KeyboardInterrupt, asyncio.CancelledError)
"""Errors that are worded here; others are shown as IPython does."""


class Notebook(Protocol):
    """The part of the magics of a notebook that errors use."""

    @property
    def hints(self) -> Hints: ...
    @property
    def stopping(self) -> Stopping: ...

    def wipe(self) -> None:
        """Erase an unfinished line of the running cell."""
        ...

    def calls_of(self, cell: str) -> list[Any]:
        """Return the unanswered calls of actors' endpoints that a notebook cell made."""
        ...

    def ops_of(self, cell: str) -> list[Any]:
        """Return the unanswered calls with ops on tensors that a notebook cell made."""
        ...


def install(shell: Any, notebook: Notebook) -> None:
    """Make the shell show errors in this way."""
    shell.set_custom_exc((Exception, *_KINDS), partial(show, notebook))


def show(
    notebook: Notebook,
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    tb: TracebackType | None,
    tb_offset: Any = None,
) -> None:
    """Show an error and the notebook lines that led to it. IPython unregisters this function if it raises."""
    with uninterrupted():
        _show(notebook, shell, kind, error, tb)


def _show(
    notebook: Notebook, shell: Any, kind: type[BaseException], error: BaseException, tb: TracebackType | None
) -> None:
    # In a terminal, the line about running ranks would be in front of the error.
    notebook.wipe()
    if not isinstance(error, _KINDS):
        with contextlib.suppress(Exception):
            note = _note(notebook.hints, error)
            if note and sys.version_info >= (3, 11):
                error.add_note(note)
            elif note:
                print(note, file=sys.stderr)
        try:
            _show_others(shell, kind, error, tb)
        except Exception as failure:
            # Raised by its own __str__.
            text = f"its message cannot be shown: {type(failure).__name__} in __str__"
            _give_text(error, text)
            show_traceback(shell, kind, RuntimeError(text), [f"{kind.__name__}: {text}"], error)
        return
    if isinstance(error, CellSyntaxError):
        show_traceback(shell, kind, error, syntax_lines(shell, error, shell.displayhook.prompt_count))
        return
    if isinstance(error, NameError):
        _teach(notebook.hints, error)
        shell.showtraceback((kind, error, tb))
        return
    raised = error
    lines = [with_cells(shell, _headline(kind, error)) + _hint(notebook.hints, error)]
    if isinstance(error, asyncio.CancelledError):
        kernel = own_kernel(kernel_of(shell))
        if kernel is None or not kernel.stopped_await:
            # Cancelled by the user's own code.
            shell.showtraceback((kind, error, tb))
            return
        kind, error = KeyboardInterrupt, KeyboardInterrupt("the cell was stopped at an await")
        lines = [f"KeyboardInterrupt: {error}"]
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, CellStopped):
        stopped = stop_calls(notebook, shell)
        if stopped is None and not error.args and not _waits(tb):
            # The notebook's own code was stopped, and no rank.
            shell.showtraceback((kind, error, _without_handler(tb)))
            return
        if stopped is not None:
            print(stopped.text(), file=sys.stderr)
    for frame, number in _of_person(tb) if isinstance(error, KeyboardInterrupt) else traceback.walk_tb(tb):
        name = frame.f_code.co_filename
        if _is_internal(name) or _is_of_shell(name) or name in (argparse.__file__, contextlib.__file__):
            continue
        line = _line(shell, name, number)
        if isinstance(error, CellStopped) and line.startswith("%%"):
            # The lines of the ranks have been shown.
            continue
        lines.append(f"  {_place(shell, name)} line {number}" + (f": {line}" if line else ""))
    apart = notebook.stopping.actors_apart(error) if isinstance(error, ActorError) else ""
    if apart:
        print(apart, file=sys.stderr)
    show_traceback(shell, kind, error, [lines[0], *lines[1:][-5:]], raised)


def _give_text(error: BaseException, text: str) -> None:
    """Give an error a text: ipykernel asks for it once more, and sends no reply if that raises."""
    kind = type(error)
    with contextlib.suppress(TypeError):
        error.__class__ = type(kind.__name__, (kind,), {"__str__": partial(str, text), "__module__": kind.__module__})


def _show_others(shell: Any, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Show an error as IPython does, with the magic that was meant by a misspelt one."""
    missing = missing_magic(shell, tb)
    if missing is not None:
        sign, name, known = missing
        guess = _meant(sign, name, known)
        if guess:
            error.args = (f"{str(error).rstrip('.')}; did you mean `{guess}`?",)
    if not all(_is_of_shell(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(tb)):
        shell.showtraceback((kind, error, _without_hidden(tb)), running_compiled_code=True)
    elif isinstance(error, IndentationError):
        shell.showindentationerror()
    else:
        # The cell could not be compiled.
        shell.showsyntaxerror()


def _meant(sign: str, name: str, known: list[str]) -> str:
    """Return the code that was meant by a magic that does not exist; empty if it is unknown."""
    head, bracket, rest = name.partition("[")
    if bracket and head == "mesh":
        # A variable of the ranks is read without a magic, and ranks are chosen in the first line of a cell.
        return name if rest[:1] in ("'", '"') else f"%%{head} [{rest}"
    guess = most_similar(name, known)
    return f"{sign}{guess}" if guess else ""


def _is_of_shell(name: str) -> bool:
    return f"{os.sep}IPython{os.sep}" in name


def _headline(kind: type[BaseException], error: BaseException) -> str:
    """Return the text of an error. The class of a mistake in a line says nothing more."""
    if not str(error):
        return kind.__name__
    return str(error) if isinstance(error, _MISTAKES) else f"{kind.__name__}: {error}"


def with_cells(shell: Any, text: str) -> str:
    """Return the text of an error with the cells of the notebook instead of the files that they are compiled as."""

    def named(match: re.Match[str]) -> str:
        number = cell_number(shell, match["file"])
        return match[0] if number is None else f"cell [{number}] line {match['line']}"

    return _FRAME.sub(named, text)


def _teach(hints: Hints, error: NameError) -> None:
    """Add where a name that the notebook lacks is defined."""
    hint = hints.of_notebook(error.name) if type(error) is NameError and error.name else ""
    if hint:
        error.args = (f"{error}\n{hint}",)


def _note(hints: Hints, error: BaseException) -> str:
    """Return a line for code of the notebook that was meant for ranks; empty for other errors."""
    if isinstance(error, AttributeError):
        return hints.of_attribute(error.obj, error.name) if error.name else ""
    return _IN_NOTEBOOK if str(error).startswith(_NO_GROUP) and hints.has_mesh() else ""


def _hint(hints: Hints, error: BaseException) -> str:
    """Return a line for an endpoint that used an undefined name; empty for other errors."""
    hint = hints.of_endpoint(error) if isinstance(error, ActorError) else ""
    return f"\n{hint}" if hint else ""


def _without_hidden(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback up to the last frame that is not a hidden one of this package.

    IPython hides frames with ``__tracebackhide__`` too, but never the innermost one.
    """
    last, each = None, tb
    while each is not None:
        frame = each.tb_frame
        if not (frame.f_locals.get("__tracebackhide__") and _is_internal(frame.f_code.co_filename)):
            last = each
        each = each.tb_next
    if last is not None:
        last.tb_next = None
    return tb


def _without_handler(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback up to the interrupted frame, or up to the line that prints."""
    last = tb
    while last is not None and last.tb_next is not None:
        name = last.tb_next.tb_frame.f_code.co_filename
        if name == _STREAM or (last.tb_next.tb_next is None and name.startswith(_HERE)):
            last.tb_next = None
            break
        last = last.tb_next
    return tb


def _of_person(tb: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return the frames of an interrupt down to the call of this package, and the frames of cells below it."""
    frames = list(traceback.walk_tb(tb))
    internal = [at for at, (frame, _) in enumerate(frames) if _is_internal(frame.f_code.co_filename)]
    if not internal:
        return frames
    return frames[: internal[0]] + [each for each in frames[internal[0] :] if _is_of_cell(each[0])]


def _waits(tb: TracebackType | None) -> bool:
    """Return whether an interrupt hit a call of this package, rather than cell code that the call runs."""
    inside = False
    # The last frame is the signal handler.
    for frame, _ in list(traceback.walk_tb(tb))[:-1]:
        inside = not _is_of_cell(frame) and (inside or _is_internal(frame.f_code.co_filename))
    return inside


def _is_of_cell(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "__main__"


def _is_internal(name: str) -> bool:
    return is_ours(name) or (name.startswith(_HERE) and name != _STREAM)


def stop_calls(notebook: Notebook, shell: Any) -> StopReport | None:
    """Stop the calls of the running cell; None if it has none."""
    kernel = kernel_of(shell)
    if kernel is None:
        return None
    cell: str = request_of(kernel).get("header", {}).get("msg_id", "")
    futures = notebook.calls_of(cell)
    if notebook.stopping.detaches():
        return None
    if not futures:
        notebook.stopping.stop_functions(notebook.ops_of(cell))
        return None
    return notebook.stopping.stop_of_actors(RunningCalls("", futures))


def _as_typed(line: str) -> str:
    """Return a line of a cell as typed: IPython rewrites magics as calls."""
    match = _MAGIC.search(line)
    if match is None:
        return line
    # In front of it may be the variable that gets its result.
    typed = f"{line[: match.start()]}{'%%' if match['kind'] == 'cell' else '%'}{match['name']} {match['line']}"
    return typed.rstrip()


def _line(shell: Any, name: str, number: int) -> str:
    """Return a line of code as typed; empty if it is unknown."""
    line = _as_typed(linecache.getline(name, number).strip())
    cell = cell_number(shell, name)
    history: list[str] = shell.history_manager.input_hist_raw
    if line or cell is None or not 0 < cell < len(history):
        return line
    # Classes of a cell on ranks have its body as their source, without the header.
    typed = history[cell].splitlines()
    return typed[number - 1].strip() if number <= len(typed) else ""


def _place(shell: Any, name: str) -> str:
    number = cell_number(shell, name)
    return name if number is None else f"cell [{number}]"
