"""Modules that communicate, after the groups that they use got new connections: their next step begins afresh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch._python.objects import instances_of
from monarch._tensors.ddp_afresh import reset_ddp
from monarch._tensors.ddp_compat import ddp_modules, move
from monarch._tensors.torch_compat import default_group, fsdp_state_class, reset_fsdp


def reset_wrappers(renewed: Sequence[Any], outgrown: Any) -> None:
    """Reset the modules in DDP or with ``fully_shard``, of which the last pass may have been broken off.

    Every rank does this as it forms the groups, so before their next collective.

    Args:
        renewed: the groups.
        outgrown: the former default group of a mesh that has another size now; modules in DDP get the present one.
    """
    for model in ddp_modules():
        if outgrown is not None and model.process_group is outgrown:
            move(model, outgrown, default_group())
            reset_ddp(model, True)
        elif any(model.process_group is group for group in renewed):
            reset_ddp(model)
    if not renewed:
        return
    state = fsdp_state_class()
    if state is not None:
        for each in instances_of(state):
            reset_fsdp(each)
