"""``dist`` in cells: torch.distributed with a process group over the whole mesh, made when it is first named."""

from __future__ import annotations

import datetime
import os
from types import ModuleType
from typing import Any

# Questions that need no process group, and so make none.
_WITHOUT = {"is_available", "is_initialized", "is_gloo_available", "is_nccl_available", "init_process_group"}


class LazyDist(ModuleType):
    """torch.distributed, with a default process group that the ranks have made together.

    Args:
        rank: of this process in its mesh.
        size: how many ranks the mesh has.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("dist", "torch.distributed; its process group is made before the first cell that names it")
        self.__dict__.update(_rank=rank, _size=size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import torch.distributed as dist

        found = getattr(dist, name)
        if callable(found) and not isinstance(found, type) and name not in _WITHOUT and not dist.is_initialized():
            self._start(dist)
        return found

    def _start(self, dist: Any) -> None:
        raise RuntimeError(
            "the process group of this mesh is not made yet; name dist in the cell itself, so that all ranks make it "
            "before the cell runs, or call dist.init_process_group"
        )

    def _form(self, rendezvous: str) -> None:
        """Makes the process group, anew if there is one that may be broken; all ranks of the mesh do so together."""
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.setdefault("RANK", str(self._rank))
        os.environ.setdefault("WORLD_SIZE", str(self._size))
        cuda = torch.cuda.is_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.FileStore(rendezvous, self._size),  # pyright: ignore[reportPrivateImportUsage]
            rank=self._rank,
            world_size=self._size,
            timeout=datetime.timedelta(minutes=30),
        )

    def __dir__(self) -> list[str]:
        import torch.distributed as dist

        return dir(dist)
