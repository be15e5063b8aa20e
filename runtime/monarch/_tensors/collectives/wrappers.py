"""Modules that communicate, after the groups that they use got new connections: their next step begins afresh."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from monarch._tensors.ddp_compat import ddp_modules, reset_ddp, with_subclasses
from monarch._tensors.torch_compat import fsdp_state_class, reset_fsdp


def reset_wrappers(renewed: Sequence[Any]) -> None:
    """Reset the modules in DDP or with ``fully_shard``, of which the last pass may have been broken off.

    Every rank does this as it forms the groups, so before their next collective.

    Args:
        renewed: the groups.
    """
    if not renewed:
        return
    for model in ddp_modules():
        if any(model.process_group is group for group in renewed):
            reset_ddp(model)
    state = fsdp_state_class()
    if state is not None:
        kinds = {*with_subclasses(state)}
        for each in [each for each in gc.get_referrers(*kinds) if type(each) in kinds]:
            reset_fsdp(each)
