"""Modules in DistributedDataParallel that begin afresh, together on all ranks: after a failure, and on a new rank.

Ranks whose buckets differ reduce different tensors in one collective. So all make a new reducer before their next pass,
and copy the parameters of one rank.
"""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
import zlib
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from monarch._core.shapes.ranks import describe_ranks
from monarch._python.objects import instances_of
from monarch._tensors import ddp_compat
from monarch.exceptions import GroupError


def _first(_: Any) -> int:
    return 0


class Generation(NamedTuple):
    """A generation of process groups, for modules in DDP."""

    source: Callable[[Any], int] = _first
    """Returns the rank in a group whose state is copied."""
    has_new: bool = False
    """Whether a rank lacks the state that others have."""
    is_new: bool = False
    """Whether this rank lacks it, for each module that has not begun yet."""


class _Waiting(NamedTuple):
    """A module that waits for its next pass to begin afresh."""

    hook: Any
    """Its hook; torch's handle."""
    asked: int
    """How often it was asked to, so that a failure in the middle is not lost."""
    remakes: bool
    """Whether it makes a new reducer also with communication hooks, since the module of a rank is new."""
    is_alone: bool
    """Whether its constructor has left out its collectives."""


_now = Generation()
"""Replaced as a whole as a generation forms, before the code that asked for its groups goes on."""
_waiting: WeakKeyDictionary[Any, _Waiting] = WeakKeyDictionary()
"""By module. Lock: ``_lock``."""
_begun: WeakSet[Any] = WeakSet()
"""The modules that have begun afresh here, and so have the state of the others. Lock: ``_lock``."""
_lock = Lock()
"""No code of the program runs in it."""


def use(now: Generation, runs_alone: Callable[[Any], bool]) -> None:
    """Note a new generation.

    Args:
        now: the generation.
        runs_alone: returns whether the constructor of a module with a group runs on this rank alone.
    """
    global _now
    _now = now
    ddp_compat.hook_constructors(runs_alone, _begin_alone, _begin_copy)


def have_begun() -> bool:
    """Return whether this process has modules in DDP, and none still has to begin afresh."""
    models = ddp_compat.ddp_modules()
    with _lock:
        return bool(models) and not any(model in _waiting for model in models)


def is_any_alone() -> bool:
    """Return whether a module of this process that was constructed on this rank alone has not begun yet."""
    models = ddp_compat.ddp_modules()
    with _lock:
        return any(model in _waiting and _waiting[model].is_alone for model in models)


def reset_ddp(model: Any, remakes: bool = False) -> None:
    """Give up the last pass of a module in DDP, and let the next one begin afresh.

    An interrupt may have reached the ranks in different steps, and the middle of a backward pass.

    Args:
        model: the module.
        remakes: whether to make a new reducer in any case.
    """
    ddp_compat.reset(model)
    begin_afresh(model, remakes or _now.has_new)


def begin_afresh(model: Any, has_new: bool = True, is_alone: bool = False) -> None:
    """Let the next forward pass of a module in DDP make a new reducer and copy the state of a rank of its group.

    All ranks of its group must do this before their next pass. To do it twice is the same as once.

    Args:
        model: the module.
        has_new: whether the module of a rank is new. Else one with communication hooks keeps its reducer, since these
            may have a state for each bucket.
        is_alone: whether its constructor has left out its collectives.
    """
    with _lock:
        known = _waiting.get(model)
        if known is None:
            known = _Waiting(model.register_forward_pre_hook(_begin), 0, False, False)
        _waiting[model] = _Waiting(known.hook, known.asked + 1, known.remakes or has_new, known.is_alone or is_alone)


def _begin_alone(model: Any) -> None:
    begin_afresh(model, is_alone=True)


def _begin_copy(model: Any) -> None:
    """Let a copy begin afresh that a program has made of a module which waits; all ranks make it."""
    begin_afresh(model, not ddp_compat.why_bound(model))


def _begin(model: Any, _: Any) -> None:
    """Begin afresh, as a hook before the forward pass of a module in DDP."""
    if "torch._dynamo" in sys.modules:
        # It is no part of the program's graph.
        sys.modules["torch"].compiler.disable(_begin_now)(model)
    else:
        _begin_now(model)


def _begin_now(model: Any) -> None:
    """Make a new reducer and copy the state of a rank: a collective of all ranks of the group."""
    torch: Any = sys.modules["torch"]
    with _lock:
        known, has_begun = _waiting.get(model), model in _begun
    if known is None or not torch.is_grad_enabled():
        # Also in an evaluation, which one rank may do alone.
        return
    now = _now
    is_new = known.is_alone or (now.is_new and not has_begun)
    bound = ddp_compat.why_bound(model)
    # A rank may have been asked by a failure only, and others by a copy.
    told = _gathered(model, int(known.remakes), int(is_new))
    remakes, source = any(row[0] for row in told), now.source(model.process_group)
    if remakes:
        if bound:
            raise GroupError(
                f"a model in DistributedDataParallel cannot begin with a new rank, because of the {bound}; wrap it "
                f"again on all ranks: model = DDP(model.module, ...)"
            )
        _check_optimizers(model, is_new)
        news = [row[1] for row in told]
        source = news.index(0) if 0 in news else 0
        for name in ddp_compat.own_hooks(model):
            warnings.warn(
                f"a rank is new, so the communication hook {name} gets other buckets; if it keeps a state for each "
                f"bucket, empty that on all ranks",
                RuntimeWarning,
                stacklevel=2,
            )
    if not bound and (remakes or not ddp_compat.is_hooked(model)):
        ddp_compat.make_reducer(model)
    ddp_compat.copy_state(model, source, is_new, remakes)
    with _lock:
        # Last: what is cut short begins again.
        if _waiting[model].asked == known.asked:
            del _waiting[model]
            _begun.add(model)
            known.hook.remove()


def _gathered(model: Any, *mine: int) -> list[list[int]]:
    """Return some numbers of each rank of the group of a module; a collective."""
    torch: Any = sys.modules["torch"]
    dist: Any = importlib.import_module("torch.distributed")
    row = torch.tensor(mine, dtype=torch.int64, device=model.device)
    rows = [torch.zeros_like(row) for _ in range(model.process_group.size())]
    dist.all_gather(rows, row, group=model.process_group)
    return [each.tolist() for each in rows]


def _check_optimizers(model: Any, is_new: bool) -> None:
    """Check that the optimizers of all ranks have a state of the same parameters; a collective.

    Args:
        model: the module in DDP.
        is_new: whether this rank lacks the state of the module.

    Raises:
        GroupError: those of some ranks have one that others lack. The ranks would train apart, as each step would
            change the parameters in another way.
    """
    states = _states_of_optimizers(model, is_new)
    if _differ(states):
        # It may be an optimizer that the program has dropped, which is in a cycle.
        gc.collect()
        states = _states_of_optimizers(model, is_new)
    if not _differ(states):
        return
    dist: Any = importlib.import_module("torch.distributed")
    ranks = dist.get_process_group_ranks(model.process_group)
    most = max(states)
    having = [rank for rank, state in zip(ranks, states, strict=True) if state == most]
    lacking = [rank for rank, state in zip(ranks, states, strict=True) if state not in (most, _UNKNOWN)]
    raise GroupError(
        f"the optimizer of a model in DistributedDataParallel has a state on {describe_ranks(having)} which "
        f"{describe_ranks(lacking)} {'lacks' if len(lacking) == 1 else 'lack'}, so they would train apart; copy it "
        f"(%mesh heal --copy-from {having[0]}, or load_state_dict on all ranks), or clear it on all ranks "
        f"(optimizer.state.clear())"
    )


_UNKNOWN = (-1, 0)
"""Of a rank without an optimizer of the parameters."""


def _states_of_optimizers(model: Any, is_new: bool) -> list[tuple[int, int]]:
    """Return what the optimizers of each rank of a group have, as ``_state_of_optimizers`` does; a collective."""
    count, which = _state_of_optimizers(model)
    if is_new and (count, which) == _UNKNOWN:
        # It makes one later, without a state.
        count = 0
    return [(row[0], row[1]) for row in _gathered(model, count, which)]


def _differ(states: list[tuple[int, int]]) -> bool:
    """Return whether optimizers of some ranks have a state of parameters of which those of others have none."""
    known = {each for each in states if each != _UNKNOWN}
    return len(known) > 1 and max(known)[0] > 0


def _state_of_optimizers(model: Any) -> tuple[int, int]:
    """Return of how many parameters of a module optimizers of this process have a state, and of which, as a number."""
    kind = getattr(sys.modules.get("torch.optim"), "Optimizer", None)
    parameters = [*model.parameters()]
    own, held, found = set(map(id, parameters)), set[int](), False
    for each in instances_of(kind, lambda one: "param_groups" in vars(one)) if kind is not None else ():
        mine = [one for group in each.param_groups for one in group["params"] if id(one) in own]
        found = found or bool(mine)
        held.update(id(one) for one in mine if any(value is not None for value in each.state.get(one, {}).values()))
    if not found:
        return _UNKNOWN
    return len(held), zlib.crc32(bytes(id(each) in held for each in parameters))
