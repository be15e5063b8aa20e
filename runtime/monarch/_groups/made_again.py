"""Actors of a mesh of which another one was made again in its living process: their modules in DDP begin afresh."""

from __future__ import annotations

import sys
from typing import Any

from monarch._node.services.registry import service


@service("made_again.begin_afresh", "actor")
def begin_afresh(actor: Any) -> None:
    """Let the modules in DistributedDataParallel of an actor begin afresh, with those of the new one."""
    if "torch.nn.parallel.distributed" not in sys.modules:
        return
    from monarch._tensors import ddp_afresh
    from monarch._tensors.ddp_compat import ddp_modules_in

    for each in ddp_modules_in([actor]):
        ddp_afresh.begin_afresh(each)
