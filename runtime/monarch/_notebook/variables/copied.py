"""Variables of a notebook's namespace on their way from one rank to others."""

from __future__ import annotations

import io
import socket
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch._node.services.registry import service
from monarch._notebook.namespace import Namespace
from monarch._notebook.variables.names import names_here
from monarch._wire.pickling import dumps
from monarch.exceptions import SerializationError

_DEFINED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
"""Definitions of cells, which are rerun instead of copied, so that they belong to the rank."""

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


class Copied(NamedTuple):
    """The outcome of a copy of a rank's variables."""

    names: list[str]
    """Those that were copied."""
    left: dict[str, str]
    """Those that were not, with the reason."""
    unwrapped: list[str]
    """Those whose module was copied alone, without its DistributedDataParallel."""
    in_step: bool
    """Whether modules in DistributedDataParallel are among or inside them, which all ranks must begin afresh."""


@service("replicas.give", "actor")
def give(namespace: Namespace, names: Sequence[str]) -> tuple[dict[str, Any], Copied]:
    """Pack variables on their rank, together so that shared objects stay shared: an optimizer has the parameters of its
    model.

    Args:
        namespace: the namespace of this rank.
        names: the variables; none for all that cells made and that can be copied.

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
        wanted = {name: value for name, value in wanted.items() if not isinstance(value, _DEFINED)}
    unwrapped = [name for name, value in wanted.items() if _is_ddp(value) and not _goes_along(value)]
    wanted.update({name: wanted[name].module for name in unwrapped})
    left = {name: why for name, value in wanted.items() if (why := _of_its_cell(value) or _of_its_rank(value))}
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
    return wanted, Copied(
        sorted(wanted), left, sorted(name for name in unwrapped if name in wanted), bool(_ddp_modules_in(wanted))
    )


@service("replicas.take", "actor")
def take(namespace: Namespace, state: dict[str, Any]) -> None:
    """Set the variables on the other ranks."""
    namespace.variables.update(state)
    for model in _ddp_modules_in(state):
        from monarch._tensors.ddp_compat import settle

        settle(model)
    begin_afresh(namespace, [*state])


@service("replicas.begin_afresh", "actor")
def begin_afresh(namespace: Namespace, names: Sequence[str]) -> None:
    """Let modules in DistributedDataParallel begin afresh, as their copies on other ranks do.

    Args:
        namespace: the namespace of this rank.
        names: the variables that were copied.
    """
    variables = namespace.variables
    for model in _ddp_modules_in({name: variables[name] for name in names if name in variables}):
        from monarch._tensors.ddp_compat import begin_afresh

        begin_afresh(model)


@service("replicas.copyable_here", "threaded")
def copyable_here() -> list[str]:
    """Service: return the variables of cells that ``give`` copies if none is named, as far as their types tell.

    Nothing is pickled, which may take long for large values.
    """
    variables = sys.modules["__main__"].__dict__
    return [name for name in names_here() if name in variables and _is_copyable(variables[name])]


def _is_copyable(value: Any) -> bool:
    if issubclass(type(value), (*_DEFINED, *_BOUND)):
        return False
    try:
        return not _of_its_rank(value.module if _is_ddp(value) else value)
    except Exception:
        # Another thread changes it, or code of its class raises.
        return True


def _is_ddp(value: Any) -> bool:
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and isinstance(value, parallel.DistributedDataParallel)


def _ddp_modules_in(variables: dict[str, Any]) -> list[Any]:
    # Where nobody has imported it, there are none.
    if "torch.nn.parallel.distributed" not in sys.modules:
        return []
    from monarch._tensors.ddp_compat import ddp_modules_in

    return ddp_modules_in(variables.values())


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


def _of_its_cell(value: Any) -> str:
    """Return why a definition is not copied; empty for other values, and for what a module defines."""
    if not issubclass(type(value), (types.FunctionType, type)) or value.__module__ != "__main__":
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
    # Where nobody has imported it, nothing is of it.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if isinstance(value, kind) or (
        isinstance(value, torch.nn.Module) and any(isinstance(each, kind) for each in value.parameters())
    ):
        return "each rank has a different shard of its tensors; use a checkpoint instead"
    return ""
