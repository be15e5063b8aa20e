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

from monarch._python.frames import caller

_OF_THE_PROCESS = (types.ModuleType, type, types.FrameType, types.CodeType, str, bytes, bytearray, int, float)
"""Types of objects that refer to nothing of a value, or to all of the process."""


def _is_of_all(_: Any) -> bool:
    return False


def _first_rank(_: Any) -> int:
    return 0


# Replaced as a generation of groups forms.
_source: Callable[[Any], int] = _first_rank
"""Returns the rank in a group from which a module that begins afresh gets its state."""
_joins: Callable[[Any], bool] = _is_of_all
"""Returns whether the constructor of a module with a group runs on this rank alone."""


def use(source: Callable[[Any], int], joins: Callable[[Any], bool]) -> None:
    """Set who has the state of a group's modules, and which constructors run on one rank alone, by the group.

    Such a constructor leaves its collectives out, and its module begins afresh.
    """
    global _source, _joins
    _source, _joins = source, joins
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

    sync_unless_alone.monarch = True  # type: ignore[attr-defined]
    parallel._verify_param_shape_across_processes = verify_unless_alone
    parallel._sync_module_states = sync_unless_alone


def has_pending() -> bool:
    """Return whether a module in DDP of this process still has to begin afresh."""
    return any(_begin in model._forward_pre_hooks.values() for model in ddp_modules())


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


def ddp_modules_in(values: Iterable[object]) -> list[Any]:
    """Return the modules in DDP among some values, and inside."""
    known = {id(each): each for each in ddp_modules()}
    found: dict[int, Any] = {}
    left, seen = list(values) if known else [], set[int]()
    while left:
        value = left.pop()
        if id(value) in seen or issubclass(type(value), _OF_THE_PROCESS):
            continue
        seen.add(id(value))
        if id(value) in known:
            found[id(value)] = value
        if isinstance(value, types.FunctionType):
            # Not its globals.
            left += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        else:
            left += gc.get_referents(value)
    return list(found.values())


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
    begin_afresh(model)


def begin_afresh(model: Any) -> None:
    """Let the next forward pass of a module in DDP make a new reducer and copy the state of the group's first rank.

    All ranks of its group must do this before their next pass. To do it twice is the same as once.
    """
    if _begin not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin)


def goes_along(model: Any) -> bool:
    """Return whether a module in DDP can be pickled as it is: torch restores its group and its reducer then."""
    try:
        model._check_default_group()
    except RuntimeError:
        return False
    # Neither built-in hooks nor those of parameters are restored.
    return not (_builtin_hook(model) or model._delay_all_reduce_params)


def settle(model: Any) -> None:
    """Use the device of the parameters, after a copy from another rank."""
    first = next(model.module.parameters())
    model.device = first.device
    if model.device_ids:
        model.device_ids = [first.device.index]
        model.output_device = first.device.index


def _begin(model: Any, _: Any) -> None:
    # By its function, so that a copy of the module has the hook too.
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _begin:
            del model._forward_pre_hooks[key]
    if not _builtin_hook(model):
        _make_reducer(model)
    utils: Any = importlib.import_module("torch.distributed.utils")
    utils._sync_module_states(
        module=model.module,
        process_group=model.process_group,
        broadcast_bucket_size=model.broadcast_bucket_size,
        src=_source(model.process_group),
        params_and_buffers_to_ignore=model.parameters_to_ignore,
    )


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
        model.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(model.reducer, state, hook)


def _builtin_hook(model: Any) -> bool:
    return not model._comm_hooks and bool(model._get_ddp_logging_data().get("comm_hook"))
