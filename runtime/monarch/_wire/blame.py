"""Find the part of an object that cannot be pickled."""

from __future__ import annotations

import time
import types
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeGuard

from monarch._core.kinds import is_dict, is_tuple, kind_of
from monarch._wire.pickler import dump_any

_BLAME_SECONDS = 1.0
_BLAME_DEPTH = 20
_BLAME_PARTS = 1000


def error_text(error: BaseException) -> str:
    """Return the text of an error, whose own code may raise too, or else its class."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = ""
    kind = type(error).__name__
    return text if text and isinstance(error, Exception) else f"{kind}: {text}" if text else kind


def blame(obj: Any, what: str, error: BaseException) -> str:
    """Return the path to the part that cannot be pickled, as far as it is found in time, and the reason."""
    if not what and _is_call(obj):
        parts: Iterator[tuple[str, Any]] = iter([("args", obj[0]), ("kwargs", obj[1])])
    else:
        what = what or "value"
        parts = _parts(obj)
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return f"{what or 'args'}: nested too deeply to be pickled"
    until = time.monotonic() + _BLAME_SECONDS
    seen = {id(obj)}
    path, reason = what, error
    for _ in range(_BLAME_DEPTH):
        failed = None
        for step, part in islice(parts, _BLAME_PARTS):
            if id(part) in seen or time.monotonic() > until:
                continue
            try:
                dump_any(part)
            except KeyboardInterrupt:
                raise
            except BaseException as cause:
                failed = step, part, cause
                break
        if failed is None:
            break
        step, part, reason = failed
        path += step
        seen.add(id(part))
        parts = _parts(part)
    return f"{path or 'value'}: {error_text(reason)}"


def _is_call(obj: object) -> TypeGuard[tuple[Any, Any]]:
    return is_tuple(obj) and kind_of(obj) is tuple and list(map(kind_of, obj)) == [tuple, dict]


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object's pickle, each with its path."""
    if is_dict(obj) and kind_of(obj).__reduce_ex__ is object.__reduce_ex__:
        yield from ((f"[{key!r:.60}]", value) for key, value in obj.items())
    if type(obj) in (list, tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(obj))
    elif type(obj) in (set, frozenset):
        yield from ((f"[{item!r:.60}]", item) for item in obj)
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            yield f" (uses {name!r})", cell.cell_contents
        for name in obj.__code__.co_names:
            if name in obj.__globals__:
                yield f" (uses {name!r})", obj.__globals__[name]
    elif isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in vars(obj).items())
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif type(obj) is not dict:
        yield from _reduced_parts(obj)


def _reduced_parts(obj: Any) -> Iterator[tuple[str, Any]]:
    # Not the attributes themselves, some of which __getstate__ may omit.
    try:
        reduced = obj.__reduce_ex__(5)
    except Exception:
        return
    if not is_tuple(reduced):
        return
    _, arguments, state, items, *_ = (*reduced, None, None)
    states: Iterable[Any] = state if kind_of(state) is tuple else (state,)
    for values in states:
        if is_dict(values):
            yield from ((f".{name}", value) for name, value in values.items())
        else:
            yield "", values
    yield from (("", argument) for argument in arguments)
    yield from ((f"[{index}]", item) for index, item in enumerate(items or ()))
