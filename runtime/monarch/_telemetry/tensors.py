"""Bytes of the tensors of a process by owner: the variables and attributes that hold them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from monarch._core.kinds import class_of

MOST = 20
"""Owners; the smaller ones are counted together."""
OTHER = "other"
_ITEMS = 2000
"""Items of a container, and objects of a module, that are counted."""


def bytes_by_owner(variables: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of storages by the name of the variable that holds them, largest first; without gradients.

    A storage counts once: for a module before an optimizer, and for that before other variables. Runs no user code, and
    may run beside any.

    Args:
        variables: by name; may change meanwhile.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    found: list[tuple[int, str, Any]] = []
    for name, value in list(variables.items()):
        kind = _kind_of(torch, class_of(value))
        if kind is not None and not name.startswith("_"):
            found.append((kind, name, value))
    found.sort(key=lambda each: each[0])
    seen: set[int] = set()
    sizes = {name: sum(_new_bytes(tensor, seen) for tensor in _tensors(torch, value)) for _, name, value in found}
    return _largest({name: size for name, size in sizes.items() if size})


def _kind_of(torch: Any, cls: type) -> int | None:
    """Return how early a class of values is counted; None if it holds no tensors."""
    if issubclass(cls, torch.nn.Module):
        return 0
    if issubclass(cls, torch.optim.Optimizer):
        return 1
    if issubclass(cls, torch.Tensor):
        return 2
    return 3 if cls in (list, tuple, dict) else None


def _tensors(torch: Any, value: Any) -> Iterator[Any]:
    """Yield the tensors of a value, found in its attributes and items, without methods that a class may override."""
    waiting, count = [value], 0
    while waiting and count < _ITEMS:
        each = waiting.pop()
        cls, count = class_of(each), count + 1
        if cls is torch.Tensor or cls is torch.nn.Parameter:
            # Not its gradient: a backward pass replaces that without the GIL, and to read it then can crash.
            yield each
        elif issubclass(cls, torch.Tensor):
            # A DTensor; other subclasses may run code of the user.
            waiting.extend(part for name, part in _attributes(each).items() if name == "_local_tensor")
        elif issubclass(cls, torch.nn.Module):
            parts = _attributes(each)
            for name in ("_parameters", "_buffers", "_modules"):
                waiting.extend(part for part in list(parts.get(name, {}).values()) if part is not None)
        elif issubclass(cls, torch.optim.Optimizer):
            waiting.append(dict(_attributes(each).get("state", {})))
        elif cls is dict:
            waiting.extend(list(each.values())[:_ITEMS])
        elif cls in (list, tuple):
            waiting.extend(each[:_ITEMS])


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _new_bytes(tensor: Any, seen: set[int]) -> int:
    try:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        size = int(storage.nbytes())
    except (RuntimeError, NotImplementedError):
        # Without a storage, such as a fake or sparse one.
        return 0
    if not key or key in seen:
        return 0
    seen.add(key)
    return size


def _largest(sizes: dict[str, int]) -> dict[str, int]:
    ordered = sorted(sizes.items(), key=lambda each: (-each[1], each[0]))
    found = dict(ordered[:MOST])
    rest = sum(size for _, size in ordered[MOST:])
    if rest:
        found[OTHER] = found.get(OTHER, 0) + rest
    return found
