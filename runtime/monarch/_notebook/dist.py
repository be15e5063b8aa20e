"""``dist`` in cells: torch.distributed with a process group over the whole mesh, made when it is first needed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from monarch._groups.convening import ensure_world
from monarch._groups.rendezvous import local_rendezvous

# Questions that need no process group, and so make none.
_WITHOUT = {"is_available", "is_initialized", "is_gloo_available", "is_nccl_available", "init_process_group"}


class LazyDist(ModuleType):
    """torch.distributed, with a default process group that the ranks make together when one of them uses it."""

    def __init__(self) -> None:
        super().__init__("dist", "torch.distributed; its process group is made when it is first used")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import torch.distributed as dist

        found = getattr(dist, name)
        # The members of `group` are read, not called, so what they stand for has to be there.
        if name == "group" or (callable(found) and not isinstance(found, type) and name not in _WITHOUT):
            own = local_rendezvous()
            # A group that the person has made needs none of ours.
            if own.has_default or not dist.is_initialized():
                ensure_world()
        return found

    def __dir__(self) -> list[str]:
        import torch.distributed as dist

        return dir(dist)
