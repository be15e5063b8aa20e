"""Modules that communicate, after the groups that they use got new connections: their next step begins afresh."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

from monarch._tensors.torch_compat import fsdp_state_class, reset_ddp, reset_fsdp


def reset_wrappers(renewed: Sequence[Any]) -> None:
    """Reset the modules in DDP or with ``fully_shard`` whose last pass was broken off.

    Every rank does this as it forms the groups, so before their next collective.

    Args:
        renewed: the groups.
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    ddp, fsdp = getattr(parallel, "DistributedDataParallel", None), fsdp_state_class()
    kinds = tuple(kind for kind in (ddp, fsdp) if kind is not None)
    if not renewed or not kinds:
        return
    # Neither keeps a list of its modules. Not isinstance, which asks objects of the user for their class.
    for each in [each for each in gc.get_objects() if issubclass(type(each), kinds)]:
        if fsdp is not None and issubclass(type(each), fsdp):
            reset_fsdp(each)
        # One whose constructor was broken off has no reducer, and cannot be used.
        elif "reducer" in vars(each) and any(each.process_group is group for group in renewed):
            reset_ddp(each)
