"""Variables of a notebook's namespace on their way from one rank to others."""

from __future__ import annotations

import io
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from monarch._node.services.registry import service
from monarch._notebook.namespace import Namespace
from monarch._notebook.variables.afresh import begin_now
from monarch._notebook.variables.attached import Attached, attach, attached_to
from monarch._notebook.variables.holding import ddp_modules_here, ddp_modules_in, holding
from monarch._notebook.variables.names import names_here
from monarch._notebook.variables.parted import left_behind, parted
from monarch._notebook.variables.random_states import random_states, set_random_states
from monarch._notebook.variables.rebound import rebind
from monarch._python.objects import Search, instances_of
from monarch._wire.pickling import dumps
from monarch.exceptions import SerializationError

_BOUND = (
    types.GeneratorType,
    types.CoroutineType,
    type(threading.Lock()),
    type(threading.RLock()),
    socket.socket,
    io.FileIO,
    io.BufferedReader,
    io.BufferedWriter,
    io.TextIOWrapper,
)
"""Types of values that exist in one process only."""
_SHARDED = (
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"),
    ("torch.distributed.tensor", "DTensor"),
)
"""Modules and names of classes of which each rank has another part."""


_ATTACHED, _RANDOM = "gradients and hooks", "random numbers"
"""Keys of what belongs to copied objects, and of generators."""


class Copied(NamedTuple):
    """The outcome of a copy of a rank's variables."""

    names: list[str]
    """Those that were copied, without functions and classes of modules."""
    left: dict[str, str]
    """Those that were not, with the reason."""
    unwrapped: list[str]
    """Those whose module was copied alone, without its DistributedDataParallel."""
    taken: list[str]
    """All that were copied."""
    in_step: bool
    """Whether modules in DistributedDataParallel are among or inside them, which all ranks must begin afresh."""


@service("replicas.give", "actor")
def give(
    namespace: Namespace, names: Sequence[str], to_living: bool = False, alike: Sequence[str] = ()
) -> tuple[dict[str, Any], Copied]:
    """Pack variables on their rank, together so that shared objects stay shared: an optimizer has the parameters of its
    model.

    Args:
        namespace: the namespace of this rank.
        names: the variables; none for all that cells made and that can be copied.
        to_living: whether the receivers have variables of their own.
        alike: the generators of random numbers that are in the same state on all other ranks.

    Raises:
        NameError: a variable does not exist.
    """
    variables = namespace.variables
    missing = [name for name in names if name not in variables]
    if missing:
        known = ", ".join(name for name, _ in namespace.names_of()) or "no variables"
        raise NameError(f"rank {namespace.point.rank} has no variable {missing[0]!r}; it has {known}")
    wanted = {name: variables[name] for name in names or (name for name, _ in namespace.names_of())}
    if not names:
        wanted = {name: value for name, value in wanted.items() if not _is_defined(value, name)}
    unwrapped = [name for name, value in wanted.items() if _is_ddp(value) and not _goes_along(value)]
    wanted.update({name: wanted[name].module for name in unwrapped})
    inside = holding(wanted, [*ddp_modules_here(), *_sharded_here()])
    left = {name: why for name, value in wanted.items() if (why := _why_left(value, name, inside.get(name, [])))}
    wanted = {name: value for name, value in wanted.items() if name not in left}
    try:
        dumps(wanted, here=True)
    except SerializationError:
        for name, value in list(wanted.items()):
            if why := _unpicklable(value, name):
                if _is_ddp(value) and not _unpicklable(value.module, name):
                    wanted[name] = value.module
                    unwrapped.append(name)
                else:
                    left[name] = why
                    del wanted[name]
    every = {name: variables[name] for name, _ in namespace.names_of()}
    for name, why in {
        **parted(wanted, every),
        **(left_behind(wanted, every, bool(names)) if to_living else {}),
    }.items():
        left[name] = why
        del wanted[name]
    unwrapped = sorted(name for name in unwrapped if name in wanted)
    # Imports go along without a word.
    told = sorted(name for name, value in wanted.items() if name in names or not _is_imported(value))
    copied = Copied(told, left, unwrapped, [*wanted], bool(ddp_modules_in(wanted.values())))
    # Under keys that are no names of variables.
    return {**wanted, _ATTACHED: _attached(wanted), _RANDOM: random_states(alike)}, copied


def _attached(wanted: Mapping[str, Any]) -> list[Attached]:
    """Return what belongs to objects inside of values, as far as it can be pickled."""
    attached = attached_to(wanted.values(), lambda value: "")
    if not attached or not _unpicklable(attached, "hooks"):
        return attached
    return attached_to(wanted.values(), lambda value: _unpicklable(value, "a hook"))


@service("replicas.take", "actor")
def take(namespace: Namespace, state: dict[str, Any]) -> None:
    """Set the variables on the other ranks."""
    attach(state.pop(_ATTACHED), lambda value: _of_here(value, namespace.variables))
    set_random_states(state.pop(_RANDOM))
    copied = {name: _of_here(value, namespace.variables) for name, value in state.items()}
    before = {name: namespace.variables[name] for name in copied if name in namespace.variables}
    namespace.variables.update(copied)
    rebind(namespace.variables, before, copied)
    if "torch" in sys.modules:
        _settle(state, namespace.point.rank, namespace.point.extent.nelements)
    begin_now(namespace.variables, [*state], False)


def _of_here(value: Any, variables: dict[str, Any]) -> Any:
    """Return a function of a cell with the variables of this rank as its globals, and other values as they are."""
    if type(value) is partial:
        return partial(_of_here(value.func, variables), *value.args, **value.keywords)
    if type(value) is not types.FunctionType or value.__module__ != "__main__":
        return value
    made = types.FunctionType(value.__code__, variables, value.__name__, value.__defaults__, value.__closure__)
    made.__dict__.update(value.__dict__)
    made.__kwdefaults__, made.__qualname__, made.__doc__ = value.__kwdefaults__, value.__qualname__, value.__doc__
    made.__annotations__ = value.__annotations__
    return made


def _settle(state: dict[str, Any], rank: int, size: int) -> None:
    """Give what belongs to the rank of the sender the number and the device of this one."""
    from monarch._tensors.ddp_compat import settle

    sampler: Any = getattr(sys.modules.get("torch.utils.data.distributed"), "DistributedSampler", None)
    if sampler is not None:
        for each in Search().objects_in(state.values()):
            if issubclass(type(each), sampler) and each.__dict__.get("num_replicas") == size:
                each.rank = rank
    for model in ddp_modules_in(state.values()):
        settle(model)


@service("replicas.copyable_here", "threaded")
def copyable_here() -> list[str]:
    """Service: return the variables of cells that ``give`` copies if none is named, as far as their types tell.

    Nothing is pickled, which may take long for large values.
    """
    variables = sys.modules["__main__"].__dict__
    return [name for name in names_here() if name in variables and _is_copyable(variables[name], name)]


def _is_copyable(value: Any, name: str) -> bool:
    if issubclass(type(value), _BOUND) or _is_defined(value, name):
        return False
    try:
        return not _is_imported(value) and not _of_its_rank(value.module if _is_ddp(value) else value)
    except Exception:
        # Another thread changes it, or code of its class raises.
        return True


def _is_ddp(value: Any) -> bool:
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and isinstance(value, parallel.DistributedDataParallel)


def _goes_along(model: Any) -> bool:
    from monarch._tensors.ddp_compat import goes_along

    return goes_along(model)


def _unpicklable(value: Any, name: str) -> str:
    """Return why a value cannot be pickled; empty if it can."""
    try:
        dumps(value, name, here=True)
    except SerializationError as error:
        return str(error).partition("\n")[0]
    return ""


def _is_defined(value: Any, name: str) -> bool:
    """Return whether a cell defines a value under this name, so that it is rerun and belongs to its rank."""
    if issubclass(type(value), types.ModuleType):
        return True
    if not issubclass(type(value), (types.FunctionType, type)):
        return False
    return value.__module__ == "__main__" and value.__qualname__ == name


def _is_imported(value: Any) -> bool:
    """Return whether a value is a function or class of a module."""
    kinds = (types.FunctionType, types.BuiltinFunctionType, type)
    return issubclass(type(value), kinds) and value.__module__ != "__main__"


def _sharded_here() -> list[Any]:
    """Return the objects of this process of which each rank has a part: optimizers, and tensors of a DTensor."""
    kinds = [kind for module, name in _SHARDED if (kind := getattr(sys.modules.get(module), name, None)) is not None]
    return [each for kind in kinds for each in instances_of(kind)]


def _why_left(value: Any, name: str, inside: list[Any]) -> str:
    """Return why a value is not copied; empty if it may be.

    Args:
        value: the value.
        name: of its variable.
        inside: the modules in DistributedDataParallel and the parts of sharded objects that it has.
    """
    for each in inside:
        if _is_ddp(each):
            if each is not value and not _goes_along(each):
                return (
                    "it has a model in DistributedDataParallel with a group or a built-in hook of its own; run its "
                    "cell again"
                )
        elif why := _of_its_rank(each):
            return why
    return _of_its_cell(value, name) or _of_its_rank(value)


def _of_its_cell(value: Any, name: str) -> str:
    """Return why a definition is not copied; empty for other values, and for what a module defines."""
    if not _is_defined(value, name) or issubclass(type(value), types.ModuleType):
        return ""
    return f"a {'class' if isinstance(value, type) else 'function'} defined in a cell; run that cell again"


def _of_its_rank(value: Any) -> str:
    """Return why a value is useless to another rank; empty if it is useful."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    distributed = torch.distributed
    if not distributed.is_available():
        return ""
    if isinstance(value, distributed.ProcessGroup):
        return "a process group belongs to its rank"
    sharded = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", ())
    if isinstance(value, sharded):
        return "each rank has a part of its state; make it again on all ranks"
    # Where nobody has imported it, nothing is of it.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if isinstance(value, kind) or (
        isinstance(value, torch.nn.Module) and any(isinstance(each, kind) for each in value.parameters())
    ):
        return "each rank has a different shard of its tensors; use a checkpoint instead"
    return ""
