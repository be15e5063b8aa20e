"""``dist`` in cells: torch.distributed with a process group over the whole mesh, made when it is first used."""

from __future__ import annotations

import datetime
import os
from types import ModuleType
from typing import Any

# Questions that need no process group, and so make none.
_WITHOUT = {"is_available", "is_initialized", "is_gloo_available", "is_nccl_available", "init_process_group"}


class LazyDist(ModuleType):
    """torch.distributed, with the default process group made on the first use of anything in it.

    Args:
        rank: of this process in its mesh.
        size: how many ranks the mesh has; all of them must come to the first use, as to any collective.
        rendezvous: a file that they share.
    """

    def __init__(self, rank: int, size: int, rendezvous: str) -> None:
        super().__init__("dist", "torch.distributed; its process group is made when it is first used")
        self.__dict__.update(_rank=rank, _size=size, _rendezvous=rendezvous)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import torch.distributed as dist

        found = getattr(dist, name)
        if callable(found) and not isinstance(found, type) and name not in _WITHOUT and not dist.is_initialized():
            self._start(dist)
        return found

    def _start(self, dist: Any) -> None:
        import torch

        os.environ.setdefault("RANK", str(self._rank))
        os.environ.setdefault("WORLD_SIZE", str(self._size))
        cuda = torch.cuda.is_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.FileStore(self._rendezvous, self._size),
            rank=self._rank,
            world_size=self._size,
            timeout=datetime.timedelta(minutes=30),
        )

    def __dir__(self) -> list[str]:
        import torch.distributed as dist

        return dir(dist)
