"""The process groups that a program makes: held until its variables are gone, and cut if it fails.

The last owner of a group joins gloo's threads. DDP's reducer does so with the GIL held, and deadlocks if one of the
threads needs the GIL to drop its last work; the Python object of the group releases the GIL first.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from monarch._tensors.collectives.connections import open_sockets, shut_down
from monarch._tensors.collectives.made_groups import all_sockets, observe_groups, on_made
from monarch._tensors.collectives.nccl import ABORT_S, abort_nccl, await_aborts


class ProgramGroups:
    """The groups of a program that begins now. Used by the thread that runs it.

    Args:
        hosts: addresses of the hosts of the mesh.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._sockets = open_sockets()
        """Those from before the program."""
        self._held: list[Any] = []
        observe_groups()
        on_made.append(self._hold)

    def _hold(self, group: Any) -> None:
        self._held.append(group)

    def cut(self) -> None:
        """Abort the work of the groups: ending them waits for work in progress."""
        shut_down(all_sockets(self._hosts) - self._sockets)
        abort_nccl()

    def end(self) -> None:
        """Destroy the groups that the program has left, and hold them."""
        on_made.remove(self._hold)
        await_aborts(ABORT_S)
        if dist.is_initialized():
            dist.destroy_process_group()

    def release(self) -> None:
        """Let go of the groups, after the variables of the program; those may refer to each other."""
        gc.collect()
        self._held.clear()
