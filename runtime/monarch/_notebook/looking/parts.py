"""The parts of a value: items of containers, tensors of modules and optimizers, attributes of objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from monarch._core.digests.comparison import ComparedPart
from monarch._core.digests.flat import Flat
from monarch._core.digests.values import digest_of
from monarch._core.kinds import class_of
from monarch._core.text.tables import value_text
from monarch._notebook.who.kinds import is_array, is_module, is_of
from monarch._notebook.who.sizes import attributes_of

MOST = 20_000
"""Parts of a value that are compared; more are one part."""
_DICT: Any = dict
_DEEPEST = 40
_WIDTH = 160
_CLOSED: tuple[Any, ...] = (
    type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, bytearray, int, float, complex,
)  # fmt: skip


def parts_of(value: object) -> dict[str, Any]:
    """Return the parts of a value that have no parts of their own, by their paths, in order."""
    found: dict[str, Any] = {}
    for path, each in _walk(value, "", ()):
        if len(found) >= MOST:
            found["the other parts"] = value
            break
        found[path] = each
    return found


def part_of(path: str, value: Any) -> ComparedPart:
    """Describe a part."""
    try:
        flat = Flat(value)
        return ComparedPart(path, flat.form, flat.mark(), flat.form)
    except Exception:
        # It is no plain array, or the code frees it meanwhile.
        digest = digest_of(value)
    mark = bytes.fromhex(digest.whole)[:12] if digest is not None else b""
    form = "" if class_of(value) in (bool, int, float) else class_of(value).__name__
    return ComparedPart(path, form, mark, value_text(value, _WIDTH))


def mark_of(parts: list[ComparedPart]) -> bytes:
    """Return a hash of all parts."""
    return sha256(b"".join(sha256(repr(part[:3]).encode()).digest() for part in parts)).digest()


def _walk(value: Any, path: str, outer: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    value = _own_shard(value)
    items = None if id(value) in outer or len(outer) > _DEEPEST else _items_of(value)
    if items is None:
        yield path, value
        return
    empty = True
    for name, each in items:
        empty = False
        yield from _walk(each, path + name, (*outer, id(value)))
    if empty:
        yield path, value


def _items_of(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the parts of a value with their names; None if it is compared as a whole."""
    kind = class_of(value)
    if is_array(value):
        return None
    if is_module(value):
        # Without methods that the class of the module may override.
        base: Any = sys.modules["torch"].nn.Module
        tensors = chain(list(base.named_parameters(value)), list(base.named_buffers(value)))
        return ((f".{name}", each) for name, each in tensors)
    optimizer = getattr(getattr(sys.modules.get("torch"), "optim", None), "Optimizer", None)
    if is_of(value, optimizer):
        return _items_of(value.state_dict())
    if is_of(value, dict):
        return ((f"[{key!r}]", each) for key, each in list(_DICT.items(value)))
    if kind is list or kind is tuple:
        return ((f"[{at}]", each) for at, each in enumerate(list(value)))
    if is_of(value, *_CLOSED) or kind.__module__ in ("builtins", "collections"):
        return None
    attributes = attributes_of(value)
    return ((f".{name}", each) for name, each in list(attributes.items())) if attributes else None


def _own_shard(value: Any) -> Any:
    """Return the shard of a distributed tensor that this rank has; other values as they are."""
    kind = class_of(value)
    is_distributed = kind.__name__ == "DTensor" and kind.__module__.startswith("torch.")
    return value.to_local() if is_distributed else value
