"""Services of a rank for a debugger of a front end: values with their parts, expressions, and changes of variables."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count, islice, takewhile
from typing import Any

from monarch._actors.pausing.gate import gate
from monarch._core.digests.digest import DIGEST
from monarch._core.kinds import class_of
from monarch._core.text.tables import value_text
from monarch._node.services.registry import service
from monarch._notebook.looking.at_frame import Scope, look
from monarch._notebook.looking.children import ATTRIBUTE, ValuePart, child_of, children_of, counts_of, replace_child
from monarch._notebook.looking.writing import write_back, write_locals
from monarch._notebook.names.user_names import user_names
from monarch._notebook.showing.show import bundle_of, portable
from monarch._notebook.who.complete import complete

LOCALS, GLOBALS, KEPT = "locals", "globals", "kept"
INDEXED, NAMED = "indexed", "named"
MOST = 500
"""Parts of a value in one answer, if the debugger names no number."""
_WIDTH = 200
_LONGEST = 20_000
"""Characters of a value that is copied."""
_LONGEST_STRING = 4_000_000
"""Characters of a string that a front end wants as it is, such as the rows of a table as JSON."""
_MOST_KEPT = 50

Path = Sequence[tuple[str, Any]]
Row = tuple[str, str, str, int, int, "tuple[str, Any] | None", str]
"""A value: name, text, type, how many parts have an index and how many a name, the step to it, and what follows the
expression of the whole in an expression for it."""

_kept: OrderedDict[int, Any] = OrderedDict()
"""Values of expressions whose parts may be asked for, until the rank continues. Single operations, by any thread."""
_numbers = count(1)


def _forget() -> None:
    _kept.clear()


gate.at_entry.append(_forget)


@service("inspecting.forget_here", "probe")
def forget_here() -> None:
    """Service: let go of the values of expressions."""
    _forget()


@service("inspecting.children_here", "probe")
def children_here(
    level: int, root: str, key: int, path: Path, start: int, most: int, kind: str = ""
) -> tuple[bool, list[Row] | str]:
    """Service: return the parts of a value, or an error.

    Args:
        level: the level of the frame; see ``scope_of``.
        root: LOCALS or GLOBALS of the frame, or KEPT for the value of an expression.
        key: the key of that value.
        path: the steps from there to the value; empty for the variables themselves.
        start: the index of the first part, for parts with an index.
        most: how many; 0 for the first 500.
        kind: INDEXED or NAMED for the parts that have an index or a name; empty for both.
    """

    def read(scope: Scope) -> list[Row]:
        if root != KEPT and not path:
            names = _variables(scope, root)
            rows = [_row(name, names[name], (root, name), name) for name in _shown(scope, root, names)]
            return rows[start : start + most] if most else rows
        value = _resolve(scope, root, key, path)
        found = islice(_of_kind(value, start, kind), most or MOST)
        rows = [_row(each.name, each.value, each.step, each.suffix) for each in found]
        left = sum(counts_of(value)) - start - len(rows)
        if not kind and not most and len(rows) == MOST and left > 0:
            rows.append(("…", f"{left:,} more", "", 0, 0, None, ""))
        return rows

    return look(level, read)


@service("inspecting.evaluate_here", "probe")
def evaluate_here(level: int, source: str, context: str, raw: bool = False) -> tuple[bool, tuple[Row, int] | str]:
    """Service: evaluate an expression, or run statements; return the value and its key, or the error.

    Args:
        level: the level of the frame; see ``scope_of``.
        source: the code.
        context: ``repl`` runs statements too; ``clipboard`` gives the whole text of a value.
        raw: whether the text of a string is the string itself, and whole.
    """

    def read(scope: Scope) -> tuple[Row, int]:
        try:
            value = scope.value_of(source)
        except SyntaxError:
            if context != "repl":
                raise
            _execute(scope, source)
            return ("", "", "", 0, 0, None, ""), 0
        row = _row("", value, None, source)
        if raw and type(value) is str:
            row = (row[0], _whole(value), *row[2:])
        elif context == "clipboard":
            row = (row[0], portable(repr(value))[:_LONGEST], *row[2:])
        elif context == "repl" and value is None:
            row = (row[0], "", *row[2:])
        return row, _keep(value) if row[3] or row[4] else 0

    return look(level, read)


@service("inspecting.set_here", "threaded")
def set_here(level: int, root: str, key: int, path: Path, name: str, source: str) -> tuple[bool, tuple[Row, int] | str]:
    """Service: give a variable, or a part of a value, the value of an expression; return that, or an error.

    Args:
        level: the level of the frame; see ``scope_of``.
        root: as for ``children_here``, with ``key`` and ``path``.
        key: see there.
        path: to the whole; empty for a variable.
        name: the name of the variable or part.
        source: the expression.
    """

    def change(scope: Scope) -> tuple[Row, int]:
        value = scope.value_of(source)
        if root == KEPT or path:
            replace_child(_resolve(scope, root, key, path), name, value)
        elif root == LOCALS and scope.frame is not None and _is_function(scope):
            if name not in scope.local:
                raise LookupError(f"no local variable {name!r}")
            write_locals(scope.frame, {name: value}, set())
        else:
            _variables(scope, GLOBALS)[name] = value
        row = _row(name, value, None, name)
        return row, _keep(value) if row[3] or row[4] else 0

    return look(level, change)


@service("inspecting.assign_here", "threaded")
def assign_here(level: int, target: str, source: str) -> tuple[bool, tuple[Row, int] | str]:
    """Service: assign the value of an expression to another one, such as ``x.y[0]``; return it, or an error."""

    def change(scope: Scope) -> tuple[Row, int]:
        compile(target, "<expression>", "eval")
        _execute(scope, f"{target} = {source}")
        value = scope.value_of(source) if target.isidentifier() else eval(target, scope.names)
        row = _row("", value, None, target)
        return row, _keep(value) if row[3] or row[4] else 0

    return look(level, change)


@service("inspecting.rich_here", "probe")
def rich_here(level: int, name: str) -> tuple[bool, dict[str, Any] | str]:
    """Service: return the MIME bundle of a variable, or an error."""

    def read(scope: Scope) -> dict[str, Any]:
        return {mime: data for mime, data in bundle_of(scope.value_of(name)).items() if mime != DIGEST}

    return look(level, read)


@service("inspecting.share_here", "threaded")
def share_here(level: int, name: str, target: str) -> tuple[bool, str]:
    """Service: make a local variable a variable of the rank's cells, under another name; return an error, if any."""

    def change(scope: Scope) -> str:
        _cells()[target] = scope.value_of(name)
        return ""

    return look(level, change)


@service("inspecting.complete_at", "probe")
def complete_at(level: int, text: str) -> tuple[bool, list[str] | str]:
    """Service: return completions of the name at the end of a piece of code."""
    return look(level, lambda scope: complete(text, scope.names))


@service("inspecting.source_here", "probe")
def source_here(file: str) -> str:
    """Service: return the source of a file that this rank has loaded; empty if it cannot be read."""
    return "".join(linecache.getlines(file))


@service("inspecting.error_here", "probe")
def error_here() -> tuple[str, str, str] | None:
    """Service: return type, text and traceback of the error at which this rank stands; None if it stands at none."""
    stop = gate.stop
    error = stop.error if stop is not None else None
    if stop is None or error is None:
        return None
    try:
        lines = traceback.format_exception(class_of(error), error, stop.trace)
        return class_of(error).__name__, portable(str(error)), portable("".join(lines))
    except Exception as broken:
        return class_of(error).__name__, f"<its str() raised {type(broken).__name__}>", ""


def _keep(value: Any) -> int:
    key = next(_numbers)
    _kept[key] = value
    # The next call forgets what is left.
    gate.wanted = True
    while len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    return key


def _cells() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def _is_function(scope: Scope) -> bool:
    return scope.frame is not None and scope.frame.f_locals is not scope.frame.f_globals


def _variables(scope: Scope, root: str) -> dict[str, Any]:
    if root == LOCALS and _is_function(scope):
        return scope.local
    return scope.frame.f_globals if scope.frame is not None else _cells()


def _shown(scope: Scope, root: str, names: dict[str, Any]) -> list[str]:
    if root == LOCALS and _is_function(scope):
        return [name for name in list(names) if name.isidentifier() and not name.startswith("__")]
    if root == LOCALS:
        return [name for name in user_names(names) if name in names]
    return sorted(name for name in list(names) if not (name.startswith("__") and name.endswith("__")))


def _resolve(scope: Scope, root: str, key: int, path: Path) -> Any:
    if root == KEPT:
        if key not in _kept:
            raise LookupError("the value is gone; evaluate it again")
        value, rest = _kept[key], path
    else:
        value, rest = _variables(scope, root)[path[0][1]], path[1:]
    for step in rest:
        value = child_of(value, step)
    return value


def _of_kind(value: Any, start: int, kind: str) -> Iterator[ValuePart]:
    """Return the parts of a value that have an index or a name; where some have an index, the others are attributes."""
    has_indexed = counts_of(value)[0] > 0
    found = children_of(value, start)
    if kind == NAMED and has_indexed:
        return takewhile(lambda each: each.step[0] == ATTRIBUTE, found)
    if kind == INDEXED:
        return (each for each in found if has_indexed and each.step[0] != ATTRIBUTE)
    return found


def _row(name: str, value: Any, step: tuple[str, Any] | None, suffix: str) -> Row:
    try:
        indexed, named = counts_of(value)
    except Exception:
        # A container may change while it is read.
        indexed, named = 0, 0
    text = repr(value) if type(value) in (int, float, bool) else value_text(value, _WIDTH)
    return name, portable(text), class_of(value).__name__, indexed, named, step, suffix


def _whole(value: str) -> str:
    """Return a string as it can be sent; a part of it might mean something else."""
    if len(value) > _LONGEST_STRING:
        raise ValueError(
            f"a string of {len(value):,} characters exceeds the limit of {_LONGEST_STRING:,}; evaluate a slice of it"
        )
    return value.encode("utf-8", "backslashreplace").decode()


def _execute(scope: Scope, source: str) -> None:
    """Run statements in a frame, whose variables they change."""
    code = compile(source, "<debugger>", "exec")
    if not _is_function(scope) or scope.frame is None:
        exec(code, _variables(scope, GLOBALS))
        return
    before = dict(scope.names)
    exec(code, scope.names)
    write_back(scope.frame, source, before, scope.names)
