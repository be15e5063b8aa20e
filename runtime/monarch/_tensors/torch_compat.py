"""Every private name of torch that the package uses, except those of ``ddp_compat.py``,
``training_compat.py`` and ``_wire/tensor_compat.py``.

Nothing of torch is imported before a function needs it: rank processes import this file before torch. Tests call each
function, so a torch version without one of the names fails there and not in a training run.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, cast

from monarch._python.frames import caller

_C10D = "torch.distributed.distributed_c10d"
_OWN_TYPES = 40
"""The first of the numbers of backend types that no backend of torch has; the last is 255."""
HELD = datetime.timedelta(days=365)
"""Added to the timeout of a backend that this package watches instead, so that it never ends a collective."""
DEVICES = ("cpu", "cuda")
"""The types of devices whose collectives have timeouts."""
_CLASSES = {"cpu": "ProcessGroupGloo", "cuda": "ProcessGroupNCCL"}
"""By type of device, the class of its backend."""
WORKERS_S = 0.2
"""Seconds for the workers of a data loader that a failed or stopped call has left, before torch ends them."""
_recorded_as: dict[str, str] = {}
"""By name of a group with new connections, the one that these had when they were made: torch records it. Single
operations."""
_first_names: dict[str, str] = {}
"""By name of a group with new connections, the one that it had before the first renewal. Single operations."""
_kept_names: set[str] = set()
"""Those of them that the group has in torch's registry beside its present one. Single operations."""
_MAKER = "_new_process_group_helper"
"""The function that creates each group: ``init_process_group``, ``new_group`` and DeviceMesh call it."""


def _c10d() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return c10d


def group_names() -> list[tuple[Any, str]]:
    """Return the process groups of this process with their names; without those that are not complete yet."""
    world = _c10d()._world
    return [(group, name) for group, name in list(world.pg_names.items()) if group in world.pg_group_ranks]


def groups() -> list[Any]:
    """Return the process groups of this process."""
    return list(_c10d()._world.pg_map)


def begun(group: Any) -> int:
    """Return how many collectives this process has begun in a group.

    Raises:
        RuntimeError: the backend of the group does not count.
    """
    backends = {id(each): each for each in map(group._get_backend, group._device_types)}
    return sum(int(each._get_sequence_number_for_group()) for each in backends.values())


def type_of_work(work: Any) -> int:
    """Return torch's number of the type of an operation; -1 if this version does not tell."""
    kind = getattr(work, "_get_op_type", None)
    return int(kind()) if kind is not None else -1


def backend_of(group: Any, device: str) -> Any:
    """Return the backend of a group for a type of device; None if it has none."""
    import torch

    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def make_group(
    members: Sequence[int], rank: int, backend: str, store: Any, name: str, timeout: datetime.timedelta
) -> Any:
    """Create a process group of some ranks of the default one, like ``dist.new_group``, under a given name.

    Args:
        members: ranks in the default group.
        rank: that of this process, one of them.
        backend: as ``dist.new_group`` takes it.
        store: for the rendezvous of the members.
        name: the same on all members.
        timeout: the timeout of its collectives.
    """
    c10d = _c10d()
    group, _ = c10d._new_process_group_helper(
        len(members), members.index(rank), members, c10d.Backend(backend), store, cast("Any", name), timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
    return group


def backends_of(group: Any) -> str:
    """Return the backends of a group by type of device, as ``dist.new_group`` takes them."""
    return str(_c10d()._world.pg_backend_config[group])


def group_count() -> int:
    """Return how many groups torch has named by numbers since the default group was made."""
    return int(_c10d()._world.group_count)


def set_group_count(count: int) -> None:
    """Set that number, which must be the same on all ranks that make a group together."""
    _c10d()._world.group_count = count


def replace_backends(old: Any, new: Any, number: int) -> None:
    """Give an old group, which is not registered any longer, the connections and the place of a new one.

    Whatever has kept the old group, such as DDP or a DeviceMesh, works on with the new connections.

    Args:
        old: the group that stays.
        new: a group of the same ranks, which is not used otherwise.
        number: another one each time, from 1 to 100.
    """
    from torch._C import _distributed_c10d

    registry: Any = _distributed_c10d
    c10d, timeout, before = _c10d(), datetime.timedelta(seconds=timeout_of(old)), str(old.group_name)
    held = [device for device in DEVICES if (backend_timeout(new, device) or datetime.timedelta()) >= HELD]
    # A group keeps the first backend of each type, so each time has types of its own, for CPUs and others.
    for device in new._device_types:
        kind = c10d.ProcessGroup.BackendType(_OWN_TYPES + 2 * number + (device.type == "cpu"))
        old._register_backend(device, kind, new._get_backend(device))
    old.set_timeout(timeout)
    for device in held:
        set_backend_timeout(old, device, timeout + HELD)
    _recorded_as[old.group_name] = new.group_name
    world = c10d._world
    registry._unregister_process_group(new.group_name)
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        if new in known:
            known[old] = known.pop(new)
    for tagged in world.tags_to_pg.values():
        tagged[:] = [old if each is new else each for each in tagged]
    world.pg_names[old] = old.group_name
    registry._register_process_group(old.group_name, old)
    first = _first_names.pop(before, before)
    if first != old.group_name:
        # A DeviceMesh looks its groups up by the names that they had.
        release_name(first)
        _first_names[old.group_name] = first
        registry._register_process_group(first, old)
        _kept_names.add(first)
    if default_group() is new:
        c10d._update_default_pg(old)


def release_name(name: str) -> None:
    """Take a name that a renewed group has kept out of torch's registry, since a new group may get it."""
    if name in _kept_names:
        from torch._C import _distributed_c10d

        registry: Any = _distributed_c10d
        _kept_names.discard(name)
        registry._unregister_process_group(name)


def release_names() -> None:
    """Take all such names of groups that torch has forgotten out of its registry."""
    present = {name for _, name in group_names()}
    for name, first in list(_first_names.items()):
        if name not in present:
            release_name(first)


def fsdp_state_class() -> type | None:
    """Return the class of the state that ``fully_shard`` keeps for a module; None where it is not in use."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return getattr(module, "FSDPState", None)


def reset_fsdp(state: Any) -> None:
    """Let the next forward pass of a module with ``fully_shard`` begin afresh: with its parameters in shards."""
    idle = cast("Any", type(state._training_state)).IDLE
    state._training_state = idle
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    # These come with the first forward pass.
    passing: Any = state._comm_ctx
    if hasattr(passing, "post_forward_order"):
        passing.post_forward_order.clear()
        passing.reduce_scatter_states.clear()
        passing.all_gather_state = None
    for group in state._fsdp_param_groups:
        group._training_state = idle
        group._post_forward_indices.clear()
        for name in (
            "_all_gather_result",
            "_post_reduce_event",
            "_reshard_after_forward_event",
            "_partial_reduce_output",
            "_all_reduce_state",
        ):
            setattr(group, name, None)
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
        group._to_sharded()


def wrap_group_maker(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace the function that creates each process group by ``wrap`` of it, once.

    Returns:
        Whether it is replaced; False where torch.distributed is not imported yet, or has no such function.
    """
    c10d: Any = sys.modules.get(_C10D)
    make = getattr(c10d, _MAKER, None)
    if make is None:
        return False
    if not hasattr(make, "__wrapped__"):
        setattr(c10d, _MAKER, wrap(make))
    return True


def wrap_any_receive(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace the function that begins receives from any rank by ``wrap`` of it, once.

    Returns:
        Whether it is replaced; False where torch.distributed is not imported yet.
    """
    kind: Any = getattr(sys.modules.get(_C10D), "ProcessGroup", None)
    if kind is None:
        return False
    if not hasattr(kind.recv_anysource, "__wrapped__"):
        kind.recv_anysource = wrap(kind.recv_anysource)
    return True


def wrap_messages(send: Callable[..., Any], receive: Callable[..., Any]) -> None:
    """Replace the methods of process groups that begin messages to and from a rank by wrappers of them, once.

    Args:
        send: returns a wrapper of the method.
        receive: likewise.
    """
    kind: Any = getattr(sys.modules.get(_C10D), "ProcessGroup", None)
    for name, wrap in (("send", send), ("recv", receive)) if kind is not None else ():
        if not hasattr(getattr(kind, name), "__wrapped__"):
            setattr(kind, name, wrap(getattr(kind, name)))


class _Hidden(threading.local):
    """Whether this thread reads the default group without its hook."""

    depth = 0


_hidden = _Hidden()


@contextmanager
def as_it_is() -> Generator[None]:
    """Read the default group without its hook in this thread: this code makes the group, or ends it."""
    _hidden.depth += 1
    try:
        yield
    finally:
        _hidden.depth -= 1


def default_group() -> Any:
    """Return the default process group of this process as it is, without a hook, or None."""
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None:
        return None
    kind = cast("Any", type(c10d._world))
    return getattr(kind, "_unhooked", kind).default_pg.fget(c10d._world)


def hook_default_group(hook: Callable[[Any, FrameType], Any]) -> bool:
    """Ask a function for the default process group whenever Python code reads it, once.

    Every function of torch.distributed reads it there, and so do DDP, FSDP and DeviceMesh, under any name of import.

    Args:
        hook: called with the group as it is, and the frame that reads it; returns the group to read.

    Returns:
        Whether the hook is in place; False where torch.distributed is not imported yet.
    """
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None:
        return False
    plain = cast("Any", type(c10d._world))
    if hasattr(plain, "_unhooked"):
        return True

    def read(world: Any) -> Any:
        if _hidden.depth:
            return plain.default_pg.fget(world)
        # The frames: this function, the property group.WORLD, and the code that reads that.
        return hook(plain.default_pg.fget(world), caller(2))

    def write(world: Any, group: Any) -> None:
        plain.default_pg.fset(world, group)

    c10d._world.__class__ = type("_World", (plain,), {"_unhooked": plain, "default_pg": property(read, write)})
    return True


def wrap_function(name: str, wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Replace a function of torch.distributed by ``wrap`` of it, once, under the names that torch has for it."""
    import torch.distributed as dist
    from torch.distributed import device_mesh

    plain = getattr(_c10d(), name)
    if not hasattr(plain, "monarch"):
        wrapped: Any = wrap(plain)
        wrapped.monarch = True
        for module in (_c10d(), dist, device_mesh):
            if hasattr(module, name):
                setattr(module, name, wrapped)


def uses_default(frame: FrameType | None) -> bool:
    """Return whether the function of torch.distributed that reads the default group in a frame works on it.

    False for a function that was given another group, and for torch's log of an error.
    """
    c10d, folder = _c10d().__file__, os.path.dirname(_c10d().__file__)
    found: FrameType | None = None
    while frame is not None and frame.f_code.co_filename.startswith(folder):
        if frame.f_code.co_name == "_get_msg_dict":
            return False
        found = frame if frame.f_code.co_filename == c10d else found
        frame = frame.f_back
    values = found.f_locals if found is not None else {}
    return all(values.get(name) is None for name in ("group", "pg"))


def only_asks(frame: FrameType) -> bool:
    """Return whether code only asks if there is a default group, rather than for a group that it needs."""
    before = frame.f_back.f_code.co_name if frame.f_back is not None else ""
    return frame.f_code.co_name == "is_initialized" and before != "_get_default_group"


def is_of_torch(frame: FrameType) -> bool:
    """Return whether torch reads the default group in a frame for itself: as it is imported, for a log or a compiler.

    A group made then would wait for the import, and torch would wait for the group.
    """
    c10d, caller = _c10d().__file__, frame
    while caller.f_code.co_filename == c10d and caller.f_back is not None:
        caller = caller.f_back
    file, folder = caller.f_code.co_filename, os.path.dirname(os.path.dirname(c10d))
    if not file.startswith(folder):
        return False
    uses = tuple(os.path.join(folder, part) for part in ("distributed", os.path.join("nn", "parallel")))
    asks_only = frame.f_code.co_name == "is_initialized" and not file.startswith(uses)
    return asks_only or caller.f_code.co_name == "<module>"


def set_timeout(group: Any, timeout: datetime.timedelta) -> None:
    """Set the timeout of later collectives of a group."""
    _c10d()._set_pg_timeout(timeout, group)


def store_of(group: Any) -> Any:
    """Return the store of a process group; None if torch does not know it."""
    return _c10d()._world.pg_map.get(group, (None, None))[1]


def timeout_of(group: Any) -> float:
    """Return the timeout of collectives of a group, in seconds."""
    options = _options_of(group)
    timeout: datetime.timedelta = options[0]._timeout if options else _c10d().default_pg_timeout
    return (timeout - HELD if timeout >= HELD else timeout).total_seconds()


def _options_of(group: Any) -> list[Any]:
    found = [backend_of(group, each.type) for each in group._device_types]
    return [each.options for each in found if each is not None and hasattr(each, "options")]


def recorded_name(group: Any) -> str:
    """Return the name under which torch records the collectives of a group."""
    name = str(group.group_name)
    return _recorded_as.get(name, name)


def backend_timeout(group: Any, device: str) -> datetime.timedelta | None:
    """Return the timeout that gloo or NCCL has for collectives of a group; None without it, or where it is wrapped."""
    backend = backend_of(group, device)
    return backend.options._timeout if type(backend).__name__ == _CLASSES[device] else None


def set_backend_timeout(group: Any, device: str, timeout: datetime.timedelta) -> None:
    """Set the timeout that it has for later collectives of a group; other backends keep theirs."""
    backend_of(group, device)._set_default_timeout(timeout)


def begun_by(group: Any, device: str) -> int:
    """Return how many collectives of the backend for a type of device this process has begun in a group.

    Raises:
        RuntimeError: the group has no such backend, or is being destroyed.
    """
    backend = backend_of(group, device)
    if backend is None:
        raise RuntimeError(f"the group has no backend for {device}")
    return int(backend._get_sequence_number_for_group())


def forget_recorded_name(group: Any) -> None:
    """Note that a group has just been made, with connections of its own name."""
    _recorded_as.pop(group.group_name, None)


def recorded_collectives() -> list[str]:
    """Return what torch has recorded of the last collectives, as JSON; empty if this version does not tell."""
    return [bytes(dump(True, False)).decode() for dump in _dumps()]


def records_collectives(device: str) -> bool:
    """Return whether this version of torch records the last collectives on a type of device."""
    return any(device == "cuda" or "nccl" not in dump.__name__ for dump in _dumps())


def _dumps() -> list[Any]:
    """Return the functions that tell; some versions have one for all, others one more for NCCL."""
    from torch._C import _distributed_c10d

    found = [getattr(_distributed_c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return [each for each in found if each is not None]


def group_named(name: Any) -> Any:
    """Return the process group that an operator of ``torch.ops._c10d_functional`` names, or takes as it is."""
    return _c10d()._resolve_process_group(name) if isinstance(name, str) else name


def group_of_operator(values: dict[str, Any]) -> Any:
    """Return the process group among the arguments of an operator of ``torch.ops.c10d``."""
    return _c10d().ProcessGroup.unbox(values["process_group"])


def before_backends(checks: dict[str, Callable[[str, dict[str, Any]], object]]) -> Callable[[], object]:
    """Call functions before operators of ``torch.ops.c10d`` reach the backends of their process groups.

    The key of this dispatch is in use for all tensors, also in inference mode, and in C++.

    Args:
        checks: by operator; called with its name and its arguments by name. An error keeps it from running.

    Returns:
        A function that removes them.
    """
    import torch

    library: Any = torch.library.Library("c10d", "IMPL")
    key: Any = cast("Any", torch)._C.DispatchKey.BackendSelect
    for name, check in checks.items():
        overloads: Any = getattr(torch.ops.c10d, name, None)
        if overloads is None:
            # Not in this version of torch.
            continue
        library.impl(name, _checked_kernel(name, overloads.default, check, key), key.name, with_keyset=True)
    return library._destroy


def _checked_kernel(name: str, operator: Any, check: Callable[[str, dict[str, Any]], object], key: Any) -> Any:
    names = [each.name for each in operator._schema.arguments]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # Arguments that have their defaults are left out.
        check(name, dict(zip(names, args, strict=False)) | kwargs)
        return operator.redispatch(keys.remove(key), *args, **kwargs)

    return kernel


def before_cuda(action: Callable[[], object]) -> None:
    """Call an action in the thread that first uses CUDA, as its first use; now if CUDA is in use already."""
    import torch

    cuda: Any = torch.cuda
    if torch.cuda.is_initialized():
        action()
    else:
        # torch's own function also formats the stack, which reads source files.
        cuda._queued_calls.append((action, []))


def discard_group(group: Any) -> None:
    """Let torch forget a group whose creation has failed after torch knew it."""
    c10d = _c10d()
    c10d._world.pg_group_ranks.setdefault(group, {})
    with suppress(RuntimeError, ValueError):
        c10d.destroy_process_group(group)


def stream_handle(gpu: int) -> int:
    """Return the driver's handle of the stream that this thread uses on a GPU, where CUDA has begun."""
    import torch

    return cast("Any", torch)._C._cuda_getCurrentRawStream(gpu)


def local_box(shape: Iterable[int], mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(cast("Any", shape), mesh, placements)
    return tuple(local), tuple(offset)


def hasten_loaders(module: Any, is_left_behind: Callable[[], bool]) -> None:
    """Wait only briefly for workers that are no longer needed: torch waits 5 s for one in the middle of an item.

    Args:
        module: ``torch.utils.data.dataloader``.
        is_left_behind: whether an iterator that ends now was left behind by a call that failed or was stopped.
    """
    iterator = module._MultiProcessingDataLoaderIter
    shut_down: Callable[[Any], None] = iterator._shutdown_workers

    def _shutdown_workers(self: Any) -> None:
        if is_left_behind() and not getattr(self, "_shutdown", True):
            deadline = time.monotonic() + WORKERS_S
            workers: list[Any] = self.__dict__.get("_workers", [])
            for worker in workers:
                worker.join = _join_until(worker, deadline)
        shut_down(self)

    iterator._shutdown_workers = _shutdown_workers


def _join_until(worker: Any, deadline: float) -> Callable[..., None]:
    """Return a ``join`` of a worker for once: after it, torch terminates the worker, and joins it again."""

    def join(timeout: float | None = None) -> None:
        del worker.join
        left = max(0.0, deadline - time.monotonic())
        worker.join(left if timeout is None else min(timeout, left))

    return join
