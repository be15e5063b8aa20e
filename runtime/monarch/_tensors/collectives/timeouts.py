"""Groups whose timeout gloo and NCCL do not see, and the collectives of a group that have not ended here.

Their timeout is set to a year and the timeout of the group, so that the latter is known from it. The flight recorder of
torch tells which collectives have ended.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch.distributed as dist

from monarch._tensors.collectives.recorded import has_ended, operation_in, recorded_by, records_of
from monarch._tensors.torch_compat import (
    DEVICES,
    HELD,
    backend_timeout,
    begun_by,
    default_group,
    forget_recorded_name,
    groups,
    records_collectives,
    set_backend_timeout,
)

_NAMES = {"cpu": "gloo", "cuda": "nccl"}
"""Of the backends, by type of device."""


class UntimedBackend(NamedTuple):
    """A backend of a group whose timeout it does not see."""

    group: Any
    device: str
    """The type of device of its collectives."""


class OpenCollective(NamedTuple):
    """A collective that has not ended here."""

    operation: str
    """As in ``all_reduce``; empty for none."""
    seconds: float
    """Since it has begun."""


def hold_timeout(group: Any) -> bool:
    """Give gloo and NCCL a timeout that never ends; return False if the group has neither, or torch does not record.

    Args:
        group: that has just been made.
    """
    if not isinstance(group, dist.ProcessGroup):
        # This process is not in the group.
        return False
    is_held = False
    for device in DEVICES:
        timeout = backend_timeout(group, device)
        if timeout is None or not records_collectives(device):
            continue
        is_held = True
        forget_recorded_name(group)
        if timeout < HELD:
            set_backend_timeout(group, device, timeout + HELD)
    return is_held


def let_go(held: UntimedBackend) -> None:
    """Leave the timeout to the backend again, for later collectives."""
    timeout = backend_timeout(*held)
    if timeout is not None and timeout >= HELD:
        set_backend_timeout(*held, timeout - HELD)


def held_groups() -> dict[UntimedBackend, float]:
    """Return the groups whose timeout their backends do not see, with the real one in seconds."""
    found = {UntimedBackend(group, device): backend_timeout(group, device) for group in groups() for device in DEVICES}
    return {held: (each - HELD).total_seconds() for held, each in found.items() if each is not None and each >= HELD}


def unended(held: UntimedBackend) -> OpenCollective | None:
    """Return the oldest collective of a group that has not ended here; one without a name if all have.

    Returns:
        None if torch has no record of any.
    """
    records = recorded_by(_NAMES[held.device])
    if not records:
        return None if begun_by(*held) else OpenCollective("", 0.0)
    for each in records_of(held.group, records):
        if not has_ended(each):
            return OpenCollective(operation_in(each), time.time() - each["time_created_ns"] / 1e9)
    return OpenCollective("", 0.0)


def name_of(group: Any) -> str:
    """Return what to call a group."""
    if group is default_group():
        return "the default group"
    return f"the group of ranks {','.join(map(str, dist.get_process_group_ranks(group)))}"
