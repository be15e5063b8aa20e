"""Modules in DistributedDataParallel that begin afresh, together on all ranks: after a failure, and on a new rank.

A reducer divides the gradients into buckets, at first by size and then in the order in which a backward pass had them.
Ranks whose buckets differ reduce different tensors in one collective. So all make a new reducer before their next pass.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet

from monarch._python.frames import caller
from monarch._tensors.torch_compat import default_group

_OF_THE_PROCESS = (types.ModuleType, type, types.FrameType)
"""Types of objects that refer to much of the process."""
_MOST = 500_000
"""Objects that a search looks at, which takes a second."""


def _is_of_all(_: Any) -> bool:
    return False


def _first_rank(_: Any) -> int:
    return 0


# Replaced as a generation of groups forms.
_source: Callable[[Any], int] = _first_rank
"""Returns the rank in a group from which a module that begins afresh gets its state."""
_joins: Callable[[Any], bool] = _is_of_all
"""Returns whether the constructor of a module with a group runs on this rank alone."""
_has_new = False
"""Whether a rank lacks the modules that others have."""
_remade: WeakSet[Any] = WeakSet()
"""The modules that make a new reducer in their next pass. Single operations."""


def use(source: Callable[[Any], int], joins: Callable[[Any], bool], has_new: bool) -> None:
    """Set who has the state of a group's modules, and which constructors run on one rank alone, by the group.

    Such a constructor leaves its collectives out, and its module begins afresh.

    Args:
        source: returns the rank in a group whose state is copied.
        joins: returns whether the constructor of a module with a group runs on this rank alone.
        has_new: whether a rank lacks the modules that others have.
    """
    global _source, _joins, _has_new
    _source, _joins, _has_new = source, joins, has_new
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None or hasattr(parallel._sync_module_states, "monarch"):
        return
    verify, sync = parallel._verify_param_shape_across_processes, parallel._sync_module_states

    @functools.wraps(verify)
    def verify_unless_alone(process_group: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _joins(process_group) else verify(process_group, *args, **kwargs)

    @functools.wraps(sync)
    def sync_unless_alone(module: Any, process_group: Any, *args: Any, **kwargs: Any) -> None:
        if _joins(process_group):
            begin_afresh(caller().f_locals["self"])
        else:
            sync(module, process_group, *args, **kwargs)

    sync_unless_alone.monarch = True  # type: ignore[attr-defined]  # marks it as wrapped
    parallel._verify_param_shape_across_processes = verify_unless_alone
    parallel._sync_module_states = sync_unless_alone


def have_begun() -> bool:
    """Return whether this process has modules in DDP, and none still has to begin afresh."""
    models = ddp_modules()
    return bool(models) and not any(_begin in model._forward_pre_hooks.values() for model in models)


def ddp_modules() -> list[Any]:
    """Return the modules in DDP of this process, without those whose constructor was broken off."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    kind = getattr(parallel, "DistributedDataParallel", None)
    if kind is None:
        return []
    kinds = {*with_subclasses(kind)}
    # Torch keeps no list of them, but each object refers to its class. Not gc.get_objects: a reference to each object
    # of the process would unshare the memory of all with the zygote. Not isinstance: objects tell their class.
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds and "reducer" in vars(each)]


def objects_in(values: Iterable[object], without: type | None = None) -> Iterator[Any]:
    """Yield some values, and the objects inside, each once; of very many, the first.

    Args:
        values: the values.
        without: a class whose objects are left out, with what only they have.
    """
    kinds = _OF_THE_PROCESS if without is None else (*_OF_THE_PROCESS, without)
    left: list[Any] = list(values)
    seen = set[int]()
    while left and len(seen) < _MOST:
        value = left.pop()
        if id(value) in seen or not gc.is_tracked(value) or issubclass(type(value), kinds):
            continue
        seen.add(id(value))
        yield value
        if issubclass(type(value), types.FunctionType):
            # Not its globals.
            left += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        else:
            left += gc.get_referents(value)


def with_subclasses(kind: type) -> Iterator[type]:
    """Yield a class and all classes that inherit from it."""
    yield kind
    for each in type.__subclasses__(kind):
        yield from with_subclasses(each)


def reset_ddp(model: Any) -> None:
    """Give up the last pass of a module in DDP, and let the next one begin afresh.

    An interrupt may have reached the ranks in different steps, and the middle of a backward pass.
    """
    model.reducer._reset_state()
    begin_afresh(model, _has_new)


def begin_afresh(model: Any, has_new: bool = True) -> None:
    """Let the next forward pass of a module in DDP make a new reducer and copy the state of a rank of its group.

    All ranks of its group must do this before their next pass. To do it twice is the same as once.

    Args:
        model: the module.
        has_new: whether the module of a rank is new. Else one with communication hooks keeps its reducer, since these
            may have a state for each bucket.
    """
    if has_new:
        _remade.add(model)
    if _begin not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin)


def parameters_of_all(model: Any) -> list[Any]:
    """Return the parameters of a module in DDP that are alike on all ranks of the mesh; none if it has other ranks."""
    if model.process_group is not default_group():
        return []
    return [each for name, each in model.module.named_parameters() if name not in model.parameters_to_ignore]


def is_unfinished(model: Any) -> bool:
    """Return whether the last backward pass of a module in DDP was broken off, so that the next one would raise."""
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def goes_along(model: Any) -> bool:
    """Return whether a module in DDP can be pickled as it is: torch restores its group and its reducer then."""
    try:
        model._check_default_group()
    except RuntimeError:
        return False
    return not (_keeps_reducer(model) or model._delay_all_reduce_params)


def settle(model: Any) -> None:
    """Use the device of the parameters, after a copy from another rank."""
    first = next(model.module.parameters())
    model.device = first.device
    if model.device_ids:
        model.device_ids = [first.device.index]
        model.output_device = first.device.index


def _begin(model: Any, _: Any) -> None:
    torch: Any = sys.modules["torch"]
    if not torch.is_grad_enabled():
        # An evaluation, which one rank may do alone.
        return
    if not _keeps_reducer(model) and (model in _remade or not model._comm_hooks):
        _make_reducer(model)
    utils: Any = importlib.import_module("torch.distributed.utils")
    utils._sync_module_states(
        module=model.module,
        process_group=model.process_group,
        broadcast_bucket_size=model.broadcast_bucket_size,
        src=_source(model.process_group),
        params_and_buffers_to_ignore=model.parameters_to_ignore,
        broadcast_buffers=model.broadcast_buffers,
    )
    # Last: what is cut short begins again. By its function, so that a copy of the module has the hook too.
    _remade.discard(model)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _begin:
            del model._forward_pre_hooks[key]


def _make_reducer(model: Any) -> None:
    """Make a new reducer, as in a new module: with the first buckets, and the hooks that the program has registered."""
    dist: Any = importlib.import_module("torch.distributed")
    parameters, sparse = model._build_params_for_reducer()
    # Else the gradients of each parameter would go to both.
    model.reducer._remove_autograd_hooks()
    model._ddp_init_helper(parameters, sparse, model._build_debug_param_to_name_mapping(parameters), model.static_graph)
    model._has_rebuilt_buckets = False
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    for hook, state in model._comm_hooks:
        _forget_buckets(state)
        model.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(model.reducer, state, hook)


def _forget_buckets(state: Any) -> None:
    """Let the state of torch's PowerSGD hooks begin again, which is by bucket."""
    if hasattr(state, "start_powerSGD_iter"):
        state.iter = 0
        for each in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            each.clear()


def _keeps_reducer(model: Any) -> bool:
    """Return whether the reducer of a module has settings that a new one would lack."""
    in_backward = any(hasattr(each, "_in_backward_optimizers") for each in model.parameters())
    if in_backward or model.mixed_precision is not None:
        return True
    return not model._comm_hooks and bool(model._get_ddp_logging_data().get("comm_hook"))
