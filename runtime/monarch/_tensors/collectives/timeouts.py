"""Groups whose timeout gloo does not see, and the collectives of a group that have not ended here.

gloo's timeout is set to a year and the timeout of the group, so that the latter is known from it. The flight recorder
of torch tells which collectives have ended.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from monarch._tensors.collectives.recorded import operation_in, recorded_by_gloo, records_of
from monarch._tensors.torch_compat import (
    HELD,
    begun_by_gloo,
    default_group,
    forget_recorded_name,
    gloo_timeout,
    groups,
    records_collectives,
    set_gloo_timeout,
)


def hold_timeout(group: Any) -> bool:
    """Give gloo a timeout that never ends; return False if the group has no gloo, or torch does not record it."""
    if not isinstance(group, dist.ProcessGroup):
        # This process is not in the group.
        return False
    timeout = gloo_timeout(group)
    if timeout is None or not records_collectives():
        return False
    forget_recorded_name(group)
    if timeout < HELD:
        set_gloo_timeout(group, timeout + HELD)
    return True


def let_go(group: Any) -> None:
    """Leave the timeout to gloo again, for later collectives."""
    timeout = gloo_timeout(group)
    if timeout is not None and timeout >= HELD:
        set_gloo_timeout(group, timeout - HELD)


def held_groups() -> list[tuple[Any, float]]:
    """Return the groups whose timeout gloo does not see, with the real one in seconds."""
    found = [(group, gloo_timeout(group)) for group in groups()]
    return [(group, (each - HELD).total_seconds()) for group, each in found if each is not None and each >= HELD]


def unended(group: Any) -> str | None:
    """Return a collective of gloo in a group that has not ended here, as in ``all_reduce``; empty if all have.

    Returns:
        None if torch has no record of any.
    """
    records = recorded_by_gloo()
    if not records:
        return None if begun_by_gloo(group) else ""
    return next((operation_in(each) for each in records_of(group, records) if not each["retired"]), "")


def name_of(group: Any) -> str:
    """Return what to call a group."""
    if group is default_group():
        return "the default group"
    return f"the group of ranks {','.join(map(str, dist.get_process_group_ranks(group)))}"
