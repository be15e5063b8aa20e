"""Modules that communicate, after the groups that they use got new connections: their next step begins afresh."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
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
    kinds = {each for kind in (ddp, fsdp) if kind is not None for each in _with_subclasses(kind)}
    if not renewed or not kinds:
        return
    # Neither keeps a list of its modules, but each object refers to its class. Not gc.get_objects: a reference to each
    # object of the process would unshare the memory of all with the zygote. Not isinstance: objects tell their class.
    for each in [each for each in gc.get_referrers(*kinds) if type(each) in kinds]:
        if fsdp is not None and issubclass(type(each), fsdp):
            reset_fsdp(each)
        # One whose constructor was broken off has no reducer, and cannot be used.
        elif "reducer" in vars(each) and any(each.process_group is group for group in renewed):
            reset_ddp(each)


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    for each in type.__subclasses__(kind):
        yield from _with_subclasses(each)
