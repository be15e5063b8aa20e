"""Modules in DistributedDataParallel that begin afresh, together on all ranks: after a failure, and on a new rank.

Ranks whose buckets differ reduce different tensors in one collective. So all make a new reducer before their next pass,
and copy the parameters of one rank.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from monarch._tensors import ddp_compat
from monarch._tensors.ddp_optimizers import check_optimizers, gathered
from monarch._tensors.tensor_prints import print_of_tensor
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
    told = gathered(model, int(known.remakes), int(is_new))
    remakes, source = any(row[0] for row in told), now.source(model.process_group)
    if remakes and bound:
        raise GroupError(
            f"a model in DistributedDataParallel cannot begin with a new rank, because of the {bound}; wrap it again "
            f"on all ranks: model = DDP(model.module, ...)"
        )
    check_optimizers(model, is_new)
    if remakes:
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
    _drop_gradients(model)
    with _lock:
        # Last: what is cut short begins again.
        if _waiting[model].asked == known.asked:
            del _waiting[model]
            _begun.add(model)
            known.hook.remove()


def _drop_gradients(model: Any) -> None:
    """Drop the gradients of all ranks if these differ, since the next pass would add to them; a collective.

    They are of a pass that was broken off, or a new rank has none. Without a word: most loops drop them anyway.
    """
    parameters = ddp_compat.trained_parameters(model)
    prints = [each.grad is not None and print_of_tensor(each.grad) for each in parameters]
    if len({row[0] for row in gathered(model, zlib.crc32(repr(prints).encode()))}) > 1:
        for each in parameters:
            each.grad = None
