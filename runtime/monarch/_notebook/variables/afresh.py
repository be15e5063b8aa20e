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

_SAMPLE = 1024
"""Elements of a tensor that are compared."""
_ATOMS = (bool, float, complex, type(None))
_LONGEST = 200
"""Most characters, bytes and bits of a plain value that is compared."""
# Appended by the receiving thread, taken by that of the cells.
_wanted: list[tuple[list[str] | None, bool]] = []


class Steps(NamedTuple):
    """How far a rank is in the training of its models, and what its variables are, as far as a look tells."""

    models: dict[str, str]
    """By variable with modules in DistributedDataParallel, what their parameters are."""
    values: dict[str, str]
    """The same of numbers, texts, tensors and arrays."""
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

        (reset_ddp if resets else begin_afresh)(model)


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
    for name, each in holding(variables, ddp_modules_here(), once=True).items():
        from monarch._tensors.ddp_compat import is_unfinished, parameters_of_all

        unfinished = unfinished or any(map(is_unfinished, each))
        with suppress(Exception):
            parts = [_of_tensor(tensor) for model in each for tensor in parameters_of_all(model)]
            if parts and None not in parts:
                models[name] = str(zlib.crc32(repr(parts).encode()))
    return Steps(models, values, unfinished)


def _chosen(variables: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    # In one step: another thread may delete one.
    now = dict(variables)
    return now if names is None else {name: now[name] for name in names if name in now}


def _print_of(value: Any) -> str | None:
    """Return what tells whether a value is the same on another rank; None for a value of which a look says nothing."""
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
    if numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject:
        return f"{value.shape} {value.dtype} {zlib.crc32(value.flat[:_SAMPLE].tobytes())}"
    return None


def _of_tensor(tensor: Any) -> str | None:
    """Return the same for a tensor, which copies few of its elements; None for one of another kind.

    A part of a tensor that is divided among ranks would be a collective.
    """
    torch: Any = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    with torch.no_grad():
        part, room = tensor.detach(), _SAMPLE
        for axis in reversed(range(part.dim())):
            part = part.narrow(axis, 0, min(part.shape[axis], room))
            room = max(1, room // max(1, part.shape[axis]))
        data = part.contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(data)}"
