"""The optimizers, schedulers and scalers that ranks step a module in DistributedDataParallel with, compared.

DDP makes gradients equal, and nothing else. Ranks whose optimizers have another state or learning rate train apart:
each step changes the parameters in another way.
"""

from __future__ import annotations

import gc
import importlib
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from monarch._core.kinds import class_of
from monarch._core.shapes.ranks import describe_ranks
from monarch._python.objects import instances_of
from monarch._tensors.ddp_compat import trained_parameters
from monarch._tensors.tensor_prints import print_of_tensor
from monarch._tensors.training_compat import is_scaling
from monarch.exceptions import GroupError

T = TypeVar("T")
_ROOM = 8
"""Objects of a kind that are compared."""
_UNKNOWN = (-1, 0)
"""State of a rank without an optimizer of the parameters."""
_WORDS = 4
"""Settings of a rank that an error names."""
_KINDS = ("the optimizers", "the learning-rate schedulers", "the gradient scalers")
"""The kinds of objects that are compared."""
_SCALERS = 2


class Trainers(NamedTuple):
    """The objects of this process that step a module."""

    state: tuple[int, int]
    """Of how many parameters optimizers have a state, and of which, as a number."""
    prints: tuple[dict[int, list[str]], ...]
    """By kind, the settings of each object: as a number that others can compare, and in words."""
    is_new: bool = False
    """Whether this rank lacks the state of the module."""


def check_optimizers(model: Any, is_new: bool) -> None:
    """Check that all ranks step a module alike; a collective.

    Args:
        model: the module in DDP.
        is_new: whether this rank lacks the state of the module.

    Raises:
        GroupError: they would train apart.
    """
    trainers, rows = _compared(model, is_new)
    if _differ([row.state for row in rows]) or any(_apart(rows, kind) for kind in range(len(_KINDS))):
        # It may be an optimizer that the program has dropped, which is in a cycle.
        gc.collect()
        trainers, rows = _compared(model, is_new)
    dist: Any = importlib.import_module("torch.distributed")
    ranks: list[int] = dist.get_process_group_ranks(model.process_group)
    states = [row.state for row in rows]
    if _differ(states):
        most = max(states)
        having = [rank for rank, state in zip(ranks, states, strict=True) if state == most]
        lacking = [rank for rank, state in zip(ranks, states, strict=True) if state not in (most, _UNKNOWN)]
        raise GroupError(
            f"the optimizer of a model in DistributedDataParallel has a state on {describe_ranks(having)} which "
            f"{describe_ranks(lacking)} {'lacks' if len(lacking) == 1 else 'lack'}, so they would train apart; copy it "
            f"(%mesh heal --copy-from {having[0]}, or load_state_dict on all ranks), or clear it on all ranks "
            f"(optimizer.state.clear())"
        )
    for kind, what in enumerate(_KINDS):
        others = _apart(rows, kind)
        if others:
            first = next(rank for at, rank in enumerate(ranks) if at not in others and rows[at].prints[kind])
            # All ranks have come to this.
            texts: list[list[str]] = [[] for _ in ranks]
            here = [text for words in trainers.prints[kind].values() for text in words]
            dist.all_gather_object(texts, here, group=model.process_group)
            raise GroupError(
                f"{what} of a model in DistributedDataParallel differ: {_differences(texts, ranks)}; the ranks would "
                f"train apart. Copy them (%mesh heal --copy-from {first} --all, or load_state_dict on all ranks), or "
                f"make the model and its optimizer again on all ranks"
            )


def _differences(texts: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Describe which texts not all ranks have."""
    common = set(texts[0]).intersection(*texts[1:])
    by_text: dict[str, list[int]] = {}
    for rank, own in zip(ranks, texts, strict=True):
        words = ", ".join([each for each in dict.fromkeys(own) if each not in common][:_WORDS])
        by_text.setdefault(words or "none", []).append(rank)
    return "; ".join(f"{text} on {describe_ranks(having)}" for text, having in by_text.items())


def _compared(model: Any, is_new: bool) -> tuple[Trainers, list[Trainers]]:
    """Return the objects of this rank, and the numbers of those of each rank of a group; a collective."""
    mine = trainers_of(trained_parameters(model))
    count, which = mine.state
    if is_new and mine.state == _UNKNOWN:
        # It makes one later, without a state.
        count = 0
    numbers = [count, which, int(is_new)]
    for prints in mine.prints:
        # Of more, nothing is compared.
        some = sorted(prints) if len(prints) <= _ROOM else []
        numbers += [*some, *[-1] * (_ROOM - len(some))]
    return mine, [_as_trainers(row) for row in gathered(model, *numbers)]


def _as_trainers(row: Sequence[int]) -> Trainers:
    count, which, is_new, *prints = row
    parts = [prints[at : at + _ROOM] for at in range(0, len(prints), _ROOM)]
    return Trainers(
        (count, which),
        tuple(dict[int, list[str]]((each, []) for each in part if each >= 0) for part in parts),
        bool(is_new),
    )


def gathered(model: Any, *mine: int) -> list[list[int]]:
    """Return some numbers of each rank of the group of a module; a collective."""
    torch: Any = sys.modules["torch"]
    dist: Any = importlib.import_module("torch.distributed")
    row = torch.tensor(mine, dtype=torch.int64, device=model.device)
    rows = [torch.zeros_like(row) for _ in range(model.process_group.size())]
    dist.all_gather(rows, row, group=model.process_group)
    return [each.tolist() for each in rows]


def _differ(states: Sequence[tuple[int, int]]) -> bool:
    """Return whether optimizers of some ranks have a state of parameters of which those of others have none."""
    known = {each for each in states if each != _UNKNOWN}
    return len(known) > 1 and max(known)[0] > 0


def _apart(rows: Sequence[Trainers], kind: int) -> list[int]:
    """Return the positions of ranks whose objects of a kind are all set otherwise than those of the other ranks.

    Ranks may have kept others of earlier trainings.
    """
    found = [frozenset(row.prints[kind]) for row in rows]
    # The most usual ones, rather than those of a new rank.
    order = [(not row.is_new, len(each), found.count(each)) for each, row in zip(found, rows, strict=True)]
    most = found[order.index(max(order))]
    # Of a new rank only: a scaler may be of a model without DDP.
    others: list[frozenset[int]] = [each for each, row in zip(found, rows, strict=True) if each and not row.is_new]
    if kind == _SCALERS and not (len(others) < len(found) and most.intersection(*others)):
        return []
    return [at for at, each in enumerate(found) if each and most and not each & most]


def trainers_of(parameters: Sequence[Any]) -> Trainers:
    """Return the objects of this process that step some parameters."""
    optimizers = optimizers_of(parameters)
    if not optimizers:
        return Trainers(_UNKNOWN, ({}, {}, {}))
    held = {each for some in _each(partial(_held, parameters=parameters), optimizers) for each in some}
    state = len(held), zlib.crc32(bytes(id(each) in held for each in parameters))
    schedulers = [each for each in schedulers_here() if any(each.optimizer is one for one in optimizers)]
    words = (
        _each(partial(_settings, parameters=parameters), optimizers),
        _each(lambda one: [f"{type(one).__name__}.last_epoch={one.last_epoch}"], schedulers),
        _each(lambda one: [f"scale={one.get_scale():g}"], _scalers_here()),
    )
    return Trainers(state, tuple({zlib.crc32(repr(each).encode()): each for each in kind} for kind in words))


def _each(function: Callable[[Any], T], objects: Iterable[Any]) -> list[T]:
    """Return the values of a function for objects, without those where it raises: other ranks wait for this one."""
    values: list[T] = []
    for each in objects:
        # The classes of optimizers may be the program's, and another thread may change them.
        with suppress(Exception):
            values.append(function(each))
    return values


def _held(optimizer: Any, parameters: Sequence[Any]) -> list[int]:
    """Return the ids of the parameters of which an optimizer has a state."""
    states = [(each, optimizer.state.get(each, {})) for each in parameters]
    return [id(each) for each, state in states if any(value is not None for value in state.values())]


def optimizers_of(parameters: Iterable[Any]) -> list[Any]:
    """Return the optimizers of this process with any of some parameters, but for those that divide their state."""
    kind: Any = getattr(sys.modules.get("torch.optim"), "Optimizer", None)
    own = set(map(id, parameters))
    if kind is None:
        return []
    found = instances_of(kind, lambda one: "param_groups" in vars(one))
    divided: Any = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", ())
    # With the optimizers inside, each of which has a part of the state.
    parts = [each for each in found if issubclass(class_of(each), divided)]
    left_out = {*map(id, parts), *(id(each.__dict__.get("optim")) for each in parts)}
    return [each for each in found if id(each) not in left_out and any(id(one) in own for one in _parameters(each))]


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def schedulers_here() -> list[Any]:
    """Return the learning-rate schedulers of this process."""
    kind: Any = getattr(sys.modules.get("torch.optim.lr_scheduler"), "LRScheduler", None)
    return instances_of(kind, lambda one: {"optimizer", "last_epoch"} <= {*vars(one)}) if kind is not None else []


def trainers_here(parameters: Sequence[Any]) -> list[Any]:
    """Return the optimizers of this process with any of some parameters, and their learning-rate schedulers."""
    optimizers = optimizers_of(parameters)
    schedulers = schedulers_here() if optimizers else []
    return [*optimizers, *(each for each in schedulers if any(each.optimizer is one for one in optimizers))]


def print_of_trainer(one: Any, parameters: Sequence[Any] | None) -> str | None:
    """Return what tells whether a module, an optimizer or a scheduler is the same on another rank; None if unknown.

    Args:
        one: the object.
        parameters: the parameters of a module that are alike on all ranks; None for other objects.
    """
    if parameters is not None:
        prints = [print_of_tensor(each) for each in parameters]
        return repr(prints) if prints and None not in prints else None
    if hasattr(one, "last_epoch"):
        return f"{type(one).__name__} {one.last_epoch}"
    own = _parameters(one)
    tensors = [
        (at, key, print_of_tensor(value))
        for at, each in enumerate(own)
        for key, value in sorted(one.state.get(each, {}).items())
        if hasattr(value, "numel")
    ]
    return repr((_settings(one, own), tensors))


def _scalers_here() -> list[Any]:
    kind: Any = getattr(sys.modules.get("torch.amp.grad_scaler"), "GradScaler", None)
    return [each for each in instances_of(kind) if is_scaling(each)] if kind is not None else []


def _settings(optimizer: Any, parameters: Sequence[Any]) -> list[str]:
    """Return the settings of an optimizer for parameters, and how often it has stepped them, in words."""
    own = set(map(id, parameters))
    words: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        if any(id(each) in own for each in group["params"]):
            plain = [(key, _plain(value)) for key, value in group.items() if key != "params"]
            words += [f"{key}={text}{f' (group {number})' if number else ''}" for key, text in sorted(plain) if text]
    steps = [_plain(optimizer.state.get(each, {}).get("step")) for each in parameters]
    counts = [text for text in dict.fromkeys(steps) if text not in ("", "None")]
    return [*sorted(words, key=lambda each: not each.startswith("lr=")), *(f"after {text} steps" for text in counts)]


def _plain(value: Any) -> str:
    """Return a number, text or flag as text, also of a tensor with one element; empty for other values."""
    kind: Any = class_of(value)
    if kind is sys.modules["torch"].Tensor:
        return _plain(value.item()) if value.numel() == 1 else ""
    if kind in (tuple, list):
        return repr([_plain(each) for each in value])
    if kind is float and value.is_integer():
        # One that was copied or loaded may be an integer.
        return repr(int(value))
    return repr(value) if kind in (int, float, str, bool, type(None)) else ""
