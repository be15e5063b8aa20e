"""The private names of torch's DistributedDataParallel that the package uses: what was built how, and how to again.

A reducer divides the gradients into buckets, at first by size and then in the order in which a backward pass had them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Generator, Iterable
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, ref

from monarch._python.objects import Search, instances_of
from monarch._tensors.torch_compat import default_group

_PARAMETERS, _BUFFERS = "_first_parameters", "_first_buffers"
"""Attributes of a module in DDP, which go along with copies: which parameters its first reducer had, by name, and
whether its constructor gave all ranks the same buffers."""
_WAITED = "_begins_afresh"
"""The same of a copy only: whether the module had a hook of this package."""
_modules: dict[int, ref[Any]] = {}
"""The modules in DDP of this process, by id. Single operations."""
_constructed = False
"""Whether this process has ever had one. Set once."""
_synced: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""By module that DDP is about to wrap, whether buffers were copied. In the thread of its constructor."""
_lock = RLock()
"""Held while the hooks are put in."""


def hook_constructors(
    runs_alone: Callable[[Any], bool], on_alone: Callable[[Any], None], on_copy: Callable[[Any], None]
) -> None:
    """Note the modules in DDP that are constructed from now on; once.

    Args:
        runs_alone: returns whether this thread constructs a module with a group on this rank alone. Such a constructor
            leaves its collectives out.
        on_alone: called with the module then.
        on_copy: called with a copy of a module that had a hook of this package.
    """
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    with _lock:
        if parallel is None or hasattr(parallel._sync_module_states, "_is_hooked"):
            return
        for each in instances_of(parallel.DistributedDataParallel, lambda model: "reducer" in vars(model)):
            _note(each)
        _hook_collectives(parallel, runs_alone)
        _hook_class(parallel.DistributedDataParallel, runs_alone, on_alone, on_copy)


def _hook_collectives(parallel: Any, runs_alone: Callable[[Any], bool]) -> None:
    verify, sync = parallel._verify_param_shape_across_processes, parallel._sync_module_states

    @functools.wraps(verify)
    def verify_unless_alone(process_group: Any, *args: Any, **kwargs: Any) -> Any:
        return None if runs_alone(process_group) else verify(process_group, *args, **kwargs)

    @functools.wraps(sync)
    def sync_unless_alone(
        module: Any, process_group: Any, *args: Any, broadcast_buffers: Any = True, **kw: Any
    ) -> None:
        _synced[module] = bool(broadcast_buffers)
        if not runs_alone(process_group):
            sync(module, process_group, *args, broadcast_buffers=broadcast_buffers, **kw)

    vars(sync_unless_alone)["_is_hooked"] = True
    parallel._verify_param_shape_across_processes = verify_unless_alone
    parallel._sync_module_states = sync_unless_alone


def _hook_class(
    kind: Any, runs_alone: Callable[[Any], bool], on_alone: Callable[[Any], None], on_copy: Callable[[Any], None]
) -> None:
    build, init, getstate = kind._build_params_for_reducer, kind._ddp_init_helper, kind.__getstate__
    names = kind._build_debug_param_to_name_mapping

    @functools.wraps(build)
    def build_as_at_first(model: Any) -> Any:
        if _PARAMETERS not in vars(model):
            named = model.module.named_parameters()
            vars(model)[_PARAMETERS] = {name: each.requires_grad for name, each in named}
        with _as_at_first(model):
            return build(model)

    @functools.wraps(names)
    def names_as_at_first(model: Any, parameters: Any) -> Any:
        with _as_at_first(model):
            return names(model, parameters)

    @functools.wraps(init)
    def init_and_note(model: Any, *args: Any, **kwargs: Any) -> None:
        alone = id(model) not in _modules and runs_alone(model.process_group)
        with _as_at_first(model):
            init(model, *args, **kwargs)
        own = model.__dict__
        own.setdefault(_BUFFERS, _synced.pop(model.module, True))
        if id(model) not in _modules:
            _note(model)
            if own.pop(_WAITED, False):
                on_copy(model)
            elif alone:
                on_alone(model)

    @functools.wraps(getstate)
    def getstate_without_hook(model: Any) -> Any:
        state = getstate(model)
        hooks = state.get("_forward_pre_hooks", {})
        # A file must be readable where this package is not installed.
        ours = [key for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("monarch.")]
        if ours:
            state[_WAITED] = True
            state["_forward_pre_hooks"] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in ours)
        return state

    kind._build_params_for_reducer, kind._ddp_init_helper = build_as_at_first, init_and_note
    kind._build_debug_param_to_name_mapping, kind.__getstate__ = names_as_at_first, getstate_without_hook


def _note(model: Any) -> None:
    global _constructed
    _constructed = True
    key = id(model)

    def forget(dead: ref[Any]) -> None:
        if _modules.get(key) is dead:
            del _modules[key]

    _modules[key] = ref(model, forget)


@contextlib.contextmanager
def _as_at_first(model: Any) -> Generator[None]:
    """Let those parameters require gradients that did so as the first reducer was made; a program may freeze some."""
    own = model.__dict__
    first = own.get(_PARAMETERS, {})
    named = model.module.named_parameters() if first else ()
    # Programs may also rename some, for example to prune them.
    changed = [each for name, each in named if each.requires_grad != first.get(name, each.requires_grad)]
    for each in changed:
        each.requires_grad_(not each.requires_grad)
    try:
        yield
    finally:
        for each in changed:
            each.requires_grad_(not each.requires_grad)


def ddp_modules() -> list[Any]:
    """Return the modules in DDP of this process, without those whose constructor was broken off."""
    return [model for each in list(_modules.values()) if (model := each()) is not None]


def ddp_modules_in(values: Iterable[Any]) -> list[Any]:
    """Return the modules in DDP among values, and inside, each once.

    Where values are too large for a search, all of the process.
    """
    known = {id(each): each for each in ddp_modules()}
    found: dict[int, Any] = {}
    search = Search()
    for each in search.objects_in(values) if known else ():
        if id(each) in known:
            found[id(each)] = each
            if len(found) == len(known):
                break
    return list(found.values()) if search.is_whole else list(known.values())


def has_constructed() -> bool:
    """Return whether this process has ever had a module in DDP."""
    return _constructed


def trained_parameters(model: Any) -> list[Any]:
    """Return the parameters that a module in DDP keeps alike on the ranks of its group."""
    return [each for name, each in model.module.named_parameters() if name not in model.parameters_to_ignore]


def parameters_of_all(model: Any) -> list[Any]:
    """Return the parameters of a module in DDP that are alike on all ranks of the mesh; none if it has other ranks."""
    return trained_parameters(model) if model.process_group is default_group() else []


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
    return not (why_bound(model) or _builtin_hook(model) or model._delay_all_reduce_params)


def settle(model: Any) -> None:
    """Use the device of the parameters, after a copy from another rank."""
    first = next(model.module.parameters())
    model.device = first.device
    if model.device_ids:
        model.device_ids = [first.device.index]
        model.output_device = first.device.index


def reset(model: Any) -> None:
    """Give up the last pass of a module in DDP."""
    model.reducer._reset_state()


def move(model: Any, old: Any, new: Any) -> None:
    """Give a module in DDP another group, also in the states of its communication hooks."""
    model.process_group = new
    for at, (hook, state) in enumerate(model._comm_hooks):
        if state is old:
            model._comm_hooks[at] = hook, new
        elif getattr(state, "process_group", None) is old:
            state.process_group = new


def why_bound(model: Any) -> str:
    """Return what binds a module in DDP to its reducer, which a new one would lack; empty if nothing does."""
    if any(hasattr(each, "_in_backward_optimizers") for each in model.parameters()):
        return "optimizers in its backward pass"
    return "mixed precision" if model.mixed_precision is not None else ""


def is_hooked(model: Any) -> bool:
    """Return whether a module in DDP has communication hooks, which may have a state for each bucket."""
    return bool(model._comm_hooks or _builtin_hook(model))


def own_hooks(model: Any) -> list[str]:
    """Return the names of the communication hooks of a module in DDP that are not torch's."""
    hooks = [hook for hook, _ in model._comm_hooks]
    return [each.__qualname__ for each in hooks if not each.__module__.startswith("torch.")]


def make_reducer(model: Any) -> None:
    """Make a new reducer, as in a new module: with the first buckets, and the hooks that the program has registered."""
    dist: Any = importlib.import_module("torch.distributed")
    builtin = _builtin_hook(model)
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
    if builtin:
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, builtin))


def copy_state(model: Any, source: int, is_new: bool, has_new: bool) -> None:
    """Copy the parameters and buffers of one rank of a group to the others.

    Args:
        model: the module in DDP.
        source: the rank in the group.
        is_new: whether this rank has no buffers of its own yet.
        has_new: whether some rank has none.
    """
    torch: Any = sys.modules["torch"]
    utils: Any = importlib.import_module("torch.distributed.utils")
    kept: list[tuple[Any, Any]] = []
    buffers = model.forward_sync_buffers
    own = model.__dict__
    if not buffers and has_new and own.get(_BUFFERS):
        # Each rank has buffers of its own since its first step.
        buffers = True
        kept = [] if is_new else [(each, each.clone()) for each in model.module.buffers()]
    utils._sync_module_states(
        module=model.module,
        process_group=model.process_group,
        broadcast_bucket_size=model.broadcast_bucket_size,
        src=source,
        params_and_buffers_to_ignore=model.parameters_to_ignore,
        broadcast_buffers=buffers,
    )
    with torch.no_grad():
        for each, value in kept:
            each.copy_(value)


def _builtin_hook(model: Any) -> str:
    """Return the name of torch's communication hook in C++ that a module has; empty for none."""
    name = "" if model._comm_hooks else str(model._get_ddp_logging_data().get("comm_hook", ""))
    return name.rpartition(".")[2] if name.startswith("BuiltinCommHookType.") else ""


def _forget_buckets(state: Any) -> None:
    """Let the state of torch's PowerSGD hooks begin again, which is by bucket."""
    if hasattr(state, "start_powerSGD_iter"):
        state.iter = 0
        for each in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            each.clear()
