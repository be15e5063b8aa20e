"""Models in variables that all ranks train together: whether they are in step, and how they begin afresh."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from monarch._actors.running import before, current
from monarch._core.kinds import class_of
from monarch._node.services.registry import service
from monarch._notebook.namespace import Namespace
from monarch._notebook.variables.holding import ddp_modules_here, ddp_modules_in, holding
from monarch._notebook.variables.names import names_here

_SAMPLE = 16_384
"""Elements of a tensor that are compared, from all over it."""
_ITEMS, _DEPTH = 100, 3
"""Items of a list, tuple or dict that are compared, and lists in lists."""
_ATOMS = (bool, float, complex, type(None))
_LONGEST = 200
"""Most characters, bytes and bits of a plain value that is compared."""
# Appended by the receiving thread, taken by that of the cells.
_wanted: list[tuple[list[str] | None, bool]] = []


class Steps(NamedTuple):
    """How far a rank is in the training of its models, and what its variables are, as far as a look tells."""

    models: dict[str, str]
    """Prints of the parameters of modules in DistributedDataParallel, by variable; by number for those of actors."""
    values: dict[str, str]
    """Prints of numbers, texts, tensors and arrays, and of lists and dicts of these, by variable."""
    unfinished: bool
    """Whether such a module is in the middle of a pass."""


@service("afresh.begin", "quick")
def begin(names: list[str] | None, resets: bool) -> None:
    """Let modules in DistributedDataParallel begin afresh before the next cell.

    Args:
        names: the variables that have them; None for all of cells.
        resets: whether to give up their last pass too.
    """
    _wanted.append((names, resets))
    if _prepare not in before:
        before.append(_prepare)


def _prepare() -> None:
    here = current.get()
    if here is None or not isinstance(here[0].instance, Namespace):
        # Cells may be in the middle of a pass.
        return
    if not _wanted:
        with suppress(ValueError):
            before.remove(_prepare)
    while _wanted:
        # A Stop may cut it: then it is done before the next cell. To do it twice is the same as once.
        if _prepare not in before:
            before.append(_prepare)
        begin_now(here[0].instance.variables, *_wanted[0])
        del _wanted[0]
        with suppress(ValueError):
            before.remove(_prepare)


def begin_now(variables: Mapping[str, Any], names: Sequence[str] | None, resets: bool) -> None:
    """Let modules in DistributedDataParallel begin afresh; see ``begin``."""
    for model in ddp_modules_in(_chosen(variables, names).values()):
        from monarch._tensors.ddp_afresh import begin_afresh, reset_ddp
        from monarch._tensors.ddp_compat import why_bound

        if resets:
            reset_ddp(model)
        elif not why_bound(model):
            # Such a model is copied without its wrapper.
            begin_afresh(model)


@service("afresh.steps", "threaded")
def steps(has_values: bool) -> Steps:
    """Service: return how far this rank is.

    Args:
        has_values: whether to look at numbers, texts, tensors and arrays too.
    """
    variables = _chosen(sys.modules["__main__"].__dict__, names_here())
    models, values = dict[str, str](), dict[str, str]()
    unfinished = False
    for name, value in variables.items() if has_values else ():
        # Another thread may change it.
        with suppress(Exception):
            if (found := _print_of(value)) is not None:
                values[name] = found
    every = ddp_modules_here()
    held = holding(variables, every, once=True)
    in_variables = {id(model) for each in held.values() for model in each}
    unfinished = any(map(_is_unfinished, (model for each in held.values() for model in each)))
    # Those of actors, in the order in which they were made, which is the same on all ranks.
    of_actors = [model for model in every if id(model) not in in_variables]
    named = {**held, **{f"model {number} of actors": [model] for number, model in enumerate(of_actors, 1)}}
    for name, each in named.items():
        from monarch._tensors.ddp_compat import parameters_of_all

        with suppress(Exception):
            parts = [_of_tensor(tensor) for model in each for tensor in parameters_of_all(model)]
            if parts and None not in parts:
                models[name] = str(zlib.crc32(repr(parts).encode()))
    return Steps(models, values, unfinished)


def _is_unfinished(model: Any) -> bool:
    from monarch._tensors.ddp_compat import is_unfinished

    return is_unfinished(model)


def _chosen(variables: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    # In one step: another thread may delete one.
    now = dict(variables)
    return now if names is None else {name: now[name] for name in names if name in now}


def _print_of(value: Any, depth: int = _DEPTH) -> str | None:
    """Return what tells whether a value is the same on another rank; None for a value of which a look says nothing.

    Args:
        value: the value.
        depth: how deep to look into lists, tuples and dicts.
    """
    kind: Any = class_of(value)
    if kind in (str, bytes):
        return repr(value) if len(value) <= _LONGEST else None
    if kind is int:
        return repr(value) if value.bit_length() <= _LONGEST else None
    if kind in _ATOMS:
        return repr(value)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and kind is torch.Tensor:
        return _of_tensor(value)
    if torch is not None and kind is torch.Generator:
        return _of_tensor(value.get_state())
    if numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject:
        return f"{value.shape} {value.dtype} {zlib.crc32(value.flat[:: max(1, value.size // _SAMPLE)].tobytes())}"
    return _of_parts(value, depth) if depth else None


def _of_parts(value: Any, depth: int) -> str | None:
    """Return the same for a list, tuple or dict: what a look tells of the first of its items."""
    kind: Any = class_of(value)
    if kind in (list, tuple):
        items = [_print_of(each, depth - 1) for each in value[:_ITEMS]]
    elif kind is dict:
        items = [f"{_print_of(key, 0)}: {_print_of(value[key], depth - 1)}" for key in [*value][:_ITEMS]]
    else:
        return None
    return f"{kind.__name__} of {len(value)}: {zlib.crc32(repr(items).encode())}"


def _of_tensor(tensor: Any) -> str | None:
    """Return the same for a tensor, which copies few of its elements; None for one of another kind.

    A part of a tensor that is divided among ranks would be a collective.
    """
    torch: Any = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    with torch.no_grad():
        part = tensor.detach()
        if part.is_contiguous():
            part = part.view(-1)[:: max(1, part.numel() // _SAMPLE)]
        room = _SAMPLE
        for axis in reversed(range(part.dim())):
            # Of another layout, the first elements.
            part = part.narrow(axis, 0, min(part.shape[axis], 2 * room))
            room = max(1, room // max(1, part.shape[axis]))
        data = part.contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(data)}"
