"""Running a cell: its statements, and the value of its last expression."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

from monarch._actors.failures import fold_frames
from monarch._cells.show import Bundle, Display, bundle_of, portable
from monarch._wire.pickling import dumps, loads
from monarch.exceptions import SerializationError

RESULT_LIMIT = 64 << 20
"""Bytes of a cell's value that come back; of a larger one only what it shows."""


@dataclass
class CellError:
    """What a cell raised on one rank."""

    kind: str
    text: str
    line: int
    """Line of the cell that it was at; 0 if it is none of the cell's."""
    source: str
    """That line."""
    trace: str
    """The whole traceback."""
    interrupted: bool


class Sealed:
    """A value that is unpickled where it is read, and only then."""

    def __init__(self, body: bytes, buffers: Sequence[Any]) -> None:
        self._body = body
        self._buffers = buffers

    def open(self) -> Any:
        """The value."""
        return loads(self._body, [memoryview(buffer) for buffer in self._buffers])

    def __reduce__(self) -> tuple[Any, ...]:
        return Sealed, (self._body, [PickleBuffer(buffer) for buffer in self._buffers])


@dataclass
class CellResult:
    """What a cell gave on one rank."""

    bundle: Bundle | None
    """How its value shows; None if the cell does not end in an expression, or that is None."""
    value: Sealed | None
    """The value, if it could come along."""
    error: CellError | None
    seconds: float


def run_cell(
    source: str, name: str, variables: dict[str, Any], display: Display, sink: Any, instance: Any = None
) -> CellResult:
    """Runs a cell in a namespace; what it raises is a part of the result."""
    begun = time.perf_counter()
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    if instance is not None:
        variables["self"] = instance
    try:
        with display.to(sink):
            value, shown = _execute(source, name, variables)
            bundle = bundle_of(value) if shown and value is not None else None
    except BaseException as error:
        failed = _error(error, name, lines)
        return CellResult(None, None, failed, time.perf_counter() - begun)
    if bundle is not None:
        variables["_"] = value
    sealed = _sealed(value) if bundle is not None else None
    return CellResult(bundle, sealed, None, time.perf_counter() - begun)


def run_in_actor(instance: Any, source: str, name: str, sink: Any) -> CellResult:
    """Runs a cell inside an actor, as ``self``; other names are those of the rank's namespace."""
    variables = sys.modules["__main__"].__dict__
    before = variables.get("self", variables)
    try:
        return run_cell(source, name, variables, Display(), sink, instance)
    finally:
        if before is variables:
            variables.pop("self", None)
        else:
            variables["self"] = before


def _execute(source: str, name: str, variables: dict[str, Any]) -> tuple[Any, bool]:
    """The value of the last expression, and whether it is to be shown."""
    tree = ast.parse(source, name)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    last: ast.Expr | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body.pop()  # pyright: ignore[reportAssignmentType]
    if tree.body:
        _run(compile(tree, name, "exec", flags), variables)
    if last is None:
        return None, False
    value = _run(compile(ast.Expression(last.value), name, "eval", flags), variables)
    return value, not _ends_in_semicolon(source, last)


def _ends_in_semicolon(source: str, last: ast.Expr) -> bool:
    """Whether there is one behind the last expression, where otherwise only comments can be."""
    assert last.end_lineno is not None and last.end_col_offset is not None
    # Offsets of ast are in bytes, and its lines are not those of splitlines.
    first, *others = source.encode().split(b"\n")[last.end_lineno - 1 :]
    return any(b";" in line.partition(b"#")[0] for line in [first[last.end_col_offset :], *others])


def _run(code: Any, variables: dict[str, Any]) -> Any:
    if code.co_flags & inspect.CO_COROUTINE:

        async def wait() -> Any:
            return await eval(code, variables)

        return asyncio.run(wait())
    return eval(code, variables)


def _sealed(value: Any) -> Sealed | None:
    """The value if it can be sent and is not too large, else nothing."""
    try:
        body, buffers = dumps(value)
    except SerializationError:
        return None
    if len(body) + sum(buffer.nbytes for buffer in buffers) > RESULT_LIMIT:
        return None
    return Sealed(body, buffers)


def _error(error: BaseException, name: str, lines: list[str]) -> CellError:
    line = 0
    if isinstance(error, SyntaxError) and error.filename == name:
        line = error.lineno or 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == name:
            line = number
    shown = traceback.TracebackException.from_exception(error)
    fold_frames(shown)
    try:
        text = str(error)
    except Exception as broken:
        text = f"<its text raised {type(broken).__name__}: {broken}>"
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    interrupted = isinstance(error, KeyboardInterrupt)
    trace = portable("".join(shown.format()))
    return CellError(type(error).__name__, portable(text), line, portable(source), trace, interrupted)
