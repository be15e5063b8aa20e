"""Running a cell: its statements, and the value of its last expression."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import os
import re
import time
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from types import CodeType
from typing import Any, TypeAlias, TypeVar

from monarch._actors.pausing.failed import failed as last_error
from monarch._core.digests.digest import Digest
from monarch._groups.breaking import position
from monarch._groups.failures import broke, note_failure
from monarch._groups.program_frames import program_of
from monarch._node.remote_errors import TellsFailure, fold_frames, is_consequence
from monarch._notebook.running.cell_loop import cell_loop
from monarch._notebook.running.marks import marked, unmark
from monarch._notebook.running.needs import needs_loop, runs_loop, speaks_of_loops
from monarch._notebook.running.running_cell import RunningCell, running_cell
from monarch._notebook.showing.display import Display
from monarch._notebook.showing.show import Bundle, bundle_of, portable
from monarch._notebook.showing.streams import note_file, tell_replaced
from monarch._procs.zygote.user_forks import leave_if_forked
from monarch._python.sources import keep_source
from monarch._wire.pickling import dumps, loads, plain_classes
from monarch.exceptions import SerializationError

Steps: TypeAlias = Generator[Any, Any, "CellResult"]
_Ended = TypeVar("_Ended")

RESULT_LIMIT = 64 << 20
"""Bytes of a cell's value that come back; of a larger one only what it shows."""

_CELL = re.compile(r"cell \[\d+\]|.*[/\\]ipykernel_\d+[/\\]\d+\.py|<ipython-input-.*>")
"""Files of code from cells: of ``%%mesh`` cells, and of functions and classes that the notebook has sent."""


@dataclass
class CellError:
    """The error of a cell on one rank."""

    kind: str
    text: str
    line: int
    """Line of the cell; 0 if none of its frames is in the cell."""
    source: str
    """That line."""
    trace: str
    """The whole traceback."""
    interrupted: bool
    freed: bool = False
    """Whether it only says that the cell was freed from a collective, because of other ranks or of a stop."""
    broken: bool = False
    """Whether it is of a collective whose connections broke."""
    cut_off: bool = False
    """Whether it only says that the cell was interrupted there, since other ranks had died."""
    reached: int = 0
    """Line of the statement at the top level of the cell that was running; 0 if unknown."""
    missing: str = ""
    """The name that is not defined, of a NameError."""
    file: str = ""
    """The file that the line is in, of a program that the cell ran, or an earlier cell; empty for the cell itself."""
    called: str = ""
    """The place in the cell that called a function of an earlier cell, and its source; empty without such a call."""
    hint: str = ""
    """Advice, added by the notebook."""
    position: tuple[int, dict[str, int] | None] | None = None
    """Of an interrupted rank in its process groups, as ``breaking.position`` returns it; None for other errors."""


class LazyPickle:
    """A value that is unpickled where it is read, and only then."""

    def __init__(self, body: bytes, buffers: Sequence[Any]) -> None:
        self._body = body
        self._buffers = buffers

    def open(self) -> Any:
        """Return the value."""
        return loads(self._body, [memoryview(buffer) for buffer in self._buffers])

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyPickle, (self._body, [PickleBuffer(buffer) for buffer in self._buffers])


@dataclass
class CellResult(TellsFailure):
    """The result of a cell on one rank."""

    bundle: Bundle | None
    """How its value shows; None if the cell does not end in an expression, or that is None."""
    value: LazyPickle | None
    """The value, if it could come along."""
    error: CellError | None
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether the cell has raised."""
        return self.error is not None

    @property
    def stopped(self) -> bool:
        """Whether it was interrupted, or left a collective because of other ranks or of a stop."""
        return self.error is not None and (self.error.interrupted or self.error.freed or self.error.broken)


# Most results are made of these, and of text and numbers.
plain_classes.update((CellResult, LazyPickle, Digest))


class StoppedIteration(BaseException):
    """Carries a StopIteration of code out of generators and coroutines, which would make another error of it."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__()
        self.error = error


def run(steps: Generator[Any, Any, _Ended]) -> _Ended:
    """Run a cell to its end in this thread."""
    send: Any = None
    while True:
        try:
            awaitable = steps.send(send)
            try:
                send = cell_loop.complete(awaitable)
            except BaseException as error:
                send = steps.throw(error)
        except StopIteration as end:
            return end.value


async def run_async(steps: Steps) -> CellResult:
    """Run a cell on a running event loop."""
    send: Any = None
    while True:
        try:
            awaitable = steps.send(send)
            try:
                send = await awaitable
            except BaseException as error:
                send = steps.throw(error)
        except StopIteration as end:
            return end.value


def steps_of(
    source: str,
    name: str,
    variables: dict[str, Any],
    display: Display,
    sink: Any,
    change: ast.NodeTransformer | None = None,
    typed: str = "",
    figures: bool = True,
) -> Steps:
    """Return a cell in a namespace, to be run; what it raises is a part of the result.

    It gives what the cell awaits, and is sent what that comes to.

    Args:
        source: its code.
        name: what tracebacks call it.
        variables: the namespace.
        display: what shows values meanwhile.
        sink: where they are shown.
        change: changes the code before it runs.
        typed: its text as the user typed it, on the same lines, if that has magics.
        figures: whether open figures are shown at the end, and closed.
    """
    begun = time.perf_counter()
    lines = keep_source(name, typed or source)
    cell_loop.make_current()
    before = running_cell.set(RunningCell(name, variables, display, change))
    try:
        with display.to(sink, figures):
            value, shown = yield from execute_code(source, name, variables, change)
            bundle = bundle_of(value) if shown and value is not None else None
            display.note(bundle)
        leave_if_forked()
        if bundle is not None:
            variables["_"] = value
        sealed = _sealed(value) if bundle is not None else None
    except BaseException as raised:
        failed = _failed(raised.error if isinstance(raised, StoppedIteration) else raised, name, lines)
        return CellResult(None, None, failed, time.perf_counter() - begun)
    finally:
        running_cell.reset(before)
        unmark()
        tell_replaced()
        cell_loop.tell_pending(note_file())
    return CellResult(bundle, sealed, None, time.perf_counter() - begun)


def _failed(error: BaseException, name: str, lines: list[str]) -> CellError:
    """Note the error of a cell, and return it as it is sent; the frames of the cell are kept with the error alone."""
    leave_if_forked(error)
    last_error.keep(error)
    freed = note_failure(error)
    if isinstance(error, KeyboardInterrupt) or freed is not None:
        _tell_cut_import(error)
    if freed is not None and is_consequence(freed):
        # Not torch's text about connections that were closed here.
        last_error.explain(error, freed)
    else:
        last_error.stop(error)
    failed = _error(freed or error, name, lines)
    failed.freed, failed.broken = is_consequence(freed), broke(error)
    return failed


def _tell_cut_import(error: BaseException) -> None:
    """Say that an interrupt has cut an import off: Python may keep some of its modules half made."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Python removes the frames of the import itself.
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__spec__") is not None:
            name = frame.f_globals.get("__name__", "a module")
            print(
                f"note: the import of {name} was interrupted; if it or a module that imports it fails later, "
                f"%mesh restart starts the ranks again",
                file=note_file(),
            )
            return


def execute_code(
    source: str, name: str, variables: dict[str, Any], change: ast.NodeTransformer | None
) -> Generator[Any, Any, tuple[Any, bool]]:
    """Run code, giving what it awaits; return the value of its last expression, and whether to show it."""
    tree = ast.parse(source, name)
    last: ast.Expr | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1]
    end = (last.end_lineno, last.end_col_offset) if last is not None else None
    if change is not None:
        tree = ast.fix_missing_locations(change.visit(tree))
    tree = marked(tree, name)
    if last is not None:
        # An expression, by the check above.
        last = tree.body.pop()  # pyright: ignore[reportAssignmentType]
    parts = [_compiled(tree, name, "exec")] if tree.body else []
    if last is not None:
        parts.append(_compiled(ast.Expression(last.value), name, "eval"))
    whole = [*tree.body, last] if last is not None else tree.body
    if _on_loop(parts, ast.Module(whole if speaks_of_loops(source) else [], [])):
        value = yield _await_all(parts, variables)
    else:
        value = None
        for code in parts:
            value = _evaluated(code, variables)
            if _is_coroutine(code):
                value = yield _awaited(value)
    return (None, False) if last is None else (value, not _ends_in_semicolon(source, end))


def hides_value(source: str) -> bool:
    """Return whether a cell ends in an expression whose value a semicolon hides."""
    body = ast.parse(source).body
    last = body[-1] if body else None
    return isinstance(last, ast.Expr) and _ends_in_semicolon(source, (last.end_lineno, last.end_col_offset))


def _compiled(tree: Any, name: str, mode: str) -> CodeType:
    return compile(tree, name, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _is_coroutine(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _on_loop(parts: Sequence[CodeType], tree: ast.Module) -> bool:
    """Return whether all of a cell is put on an event loop: it awaits, or needs a loop, and runs none itself."""
    needs = any(_is_coroutine(code) for code in parts) or (needs_loop(tree) and asyncio._get_running_loop() is None)
    return needs and not runs_loop(tree)


async def _await_all(parts: Sequence[CodeType], variables: dict[str, Any]) -> Any:
    """Run the parts of a cell; return the value of the last one."""
    value = None
    for code in parts:
        value = _evaluated(code, variables)
        if _is_coroutine(code):
            value = await _awaited(value)
    return value


def _evaluated(code: CodeType, variables: dict[str, Any]) -> Any:
    try:
        return eval(code, variables)
    except StopIteration as error:
        raise StoppedIteration(error) from None


async def _awaited(value: Any) -> Any:
    """Await the coroutine of a part; a StopIteration in it has become a RuntimeError, which names it as its cause."""
    try:
        return await value
    except RuntimeError as error:
        # Without a frame of the part, it was made where the part ended, not where a coroutine of the user did.
        trace = error.__traceback__
        if isinstance(error.__cause__, StopIteration) and (trace is None or trace.tb_next is None):
            raise StoppedIteration(error.__cause__) from None
        raise


def _ends_in_semicolon(source: str, end: Any) -> bool:
    """Return whether there is one behind the last expression, where otherwise only comments can be."""
    line, column = end
    # Offsets of ast are in bytes, and its lines are not those of splitlines.
    first, *others = source.encode().split(b"\n")[line - 1 :]
    return any(b";" in line.partition(b"#")[0] for line in [first[column:], *others])


def _sealed(value: Any) -> LazyPickle | None:
    """Return the pickled value if it can be sent and is not too large, otherwise None."""
    try:
        body, buffers = dumps(value)
    except SerializationError:
        return None
    if len(body) + sum(buffer.nbytes for buffer in buffers) > RESULT_LIMIT:
        return None
    return LazyPickle(body, buffers)


def _described(error: BaseException) -> tuple[str, traceback.TracebackException]:
    """Return the text of an error and its traceback; what the error's own code raises is neither's end."""
    try:
        text = str(error)
    except BaseException as broken:
        text = f"<its str() raised {type(broken).__name__}>"
        # Its code does not run a second time.
        return text, traceback.TracebackException(type(error), Exception(text), error.__traceback__)
    return text, traceback.TracebackException.from_exception(error)


def _error(error: BaseException, name: str, lines: list[str]) -> CellError:
    program = program_of(error)
    file, line, reached, inner = name, 0, 0, (name, 0)
    if program is not None:
        error = error.with_traceback(program.frames)
        file, lines = program.file, linecache.getlines(program.file)
    if isinstance(error, SyntaxError) and error.filename == file:
        line = error.lineno or 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == file:
            line = number
            if not reached and frame.f_code.co_name == "<module>":
                reached = number
        if program is None and _CELL.fullmatch(frame.f_code.co_filename):
            inner = frame.f_code.co_filename, number
    text, shown = _described(error)
    fold_frames(shown)
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    interrupted = isinstance(error, KeyboardInterrupt)
    trace = portable("".join(shown.format()))
    failed = CellError(type(error).__name__, portable(text), line, portable(source), trace, interrupted)
    failed.reached = reached
    failed.missing = portable(error.name or "") if type(error) is NameError else ""
    failed.position = position() if interrupted else None
    failed.file = portable(os.path.basename(file)) if program is not None else ""
    if line and inner[0] != name and inner[1]:
        failed.called = f"{name} line {line}: {failed.source}"
        failed.file, failed.line = inner
        failed.source = portable(linecache.getline(*inner).strip())
    return failed
