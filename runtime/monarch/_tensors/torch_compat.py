"""Every private name of torch that the package uses, except those of ``_wire/tensor_compat.py``.

Nothing of torch is imported before a function needs it: rank processes import this file before torch. Tests call each
function, so a torch version without one of the names fails there and not in a training run.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

_C10D = "torch.distributed.distributed_c10d"
_MAKER = "_new_process_group_helper"
"""The function that creates each group: ``init_process_group``, ``new_group`` and DeviceMesh call it."""


def _c10d() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return c10d


def group_names() -> list[tuple[Any, str]]:
    """Return the process groups of this process with their names."""
    return list(_c10d()._world.pg_names.items())


def groups() -> list[Any]:
    """Return the process groups of this process."""
    return list(_c10d()._world.pg_map)


def begun(group: Any) -> int:
    """Return how many collectives this process has begun in a group.

    Raises:
        RuntimeError: the backend of the group does not count.
    """
    return int(group._get_sequence_number_for_group())


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
        timeout: of its collectives.
    """
    c10d = _c10d()
    group, _ = c10d._new_process_group_helper(
        len(members), members.index(rank), members, c10d.Backend(backend), store, cast("Any", name), timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
    return group


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


def local_box(shape: Iterable[int], mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(cast("Any", shape), mesh, placements)
    return tuple(local), tuple(offset)
