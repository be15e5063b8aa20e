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
from monarch._notebook.variables.holding import ddp_modules_here, ddp_modules_in, holding, with_attributes
from monarch._notebook.variables.names import actors_here, names_here
from monarch._notebook.variables.random_states import random_prints
from monarch._tensors.tensor_prints import SAMPLE, print_of_tensor

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
    """Prints of modules in DistributedDataParallel, and of what steps them, by variable or actor."""
    values: dict[str, str]
    """Prints of numbers, texts, tensors and arrays, and of lists and dicts of these, by variable."""
    generators: dict[str, str]
    """Prints of the states of the generators of random numbers, by name."""
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
    chosen = ddp_modules_in(_chosen(variables, names).values())
    if chosen and names is not None:
        # Others may be the same on the rank that was copied from. Actors are told apart.
        of_actors = {id(model) for each in holding(actors_here(), ddp_modules_here()).values() for model in each}
        chosen = [model for model in ddp_modules_here() if id(model) not in of_actors]
    for model in chosen:
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
    if every:
        from monarch._tensors.ddp_compat import is_unfinished, parameters_of_all
        from monarch._tensors.ddp_optimizers import print_of_trainer, trainers_here

        parameters = [tensor for model in every for tensor in parameters_of_all(model)]
        known, modules = [*every, *trainers_here(parameters)], set(map(id, every))
        actors = actors_here()
        for name, each in holding({**with_attributes(variables), **actors}, known, once=True).items():
            # Those of actors may be in the middle of a pass.
            unfinished = unfinished or (
                name not in actors and any(id(one) in modules and is_unfinished(one) for one in each)
            )
            with suppress(Exception):
                prints = [print_of_trainer(one, parameters_of_all(one) if id(one) in modules else None) for one in each]
                if prints and None not in prints:
                    models[name] = str(zlib.crc32(repr(prints).encode()))
    return Steps(models, values, random_prints() if has_values else {}, unfinished)


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
        return print_of_tensor(value)
    if torch is not None and kind is torch.Generator:
        return print_of_tensor(value.get_state())
    if numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject:
        return f"{value.shape} {value.dtype} {zlib.crc32(value.flat[:: max(1, value.size // SAMPLE)].tobytes())}"
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
