"""The environment variables of torchrun, in each rank of a mesh, for libraries that look for them."""

from __future__ import annotations

import os
import sys
import zlib
from typing import TYPE_CHECKING

from monarch._node.current import current_node

if TYPE_CHECKING:
    from monarch._tensors.own_gpu import OwnGpu

_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
"""Lets ranks live on after their NCCL groups are aborted, or while they are paused: by default torch's watchdog ends a
process whose communicator reports an error, and its monitor one that does not move for eight minutes. The end of a
group waits for the watchdog, which leaves others four times the last value for their reports: a minute by default."""
_CUDA = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""CUDA's own order has the fastest GPU first, but nvidia-smi, and the GPUs given to meshes, count by the bus."""
_last: dict[str, str] = {}
"""The variables of this rank's place, as they were set last. Main thread only."""
_count = 0
"""How many variables there were at the last look for missing ones. Main thread only."""
_PORTS = range(20_000, 30_000)
"""Below the ports that Linux gives to connections by itself."""


def set_mesh_variables() -> None:
    """Set RANK, WORLD_SIZE and so on to this rank's place in its mesh, except those that the user has set."""
    _last.clear()
    _last.update(_mesh_variables())
    os.environ.update(_last)
    for name, text in (_NCCL | _CUDA).items():
        os.environ.setdefault(name, text)


def restore_mesh_variables() -> None:
    """Set those that are missing: the teardown of Lightning's trainer deletes WORLD_SIZE, which the next cell needs."""
    global _count
    # A look at each of them takes longer than the rest of an empty cell.
    if len(os.environ) < _count or "WORLD_SIZE" not in os.environ:
        for name, text in _last.items():
            if name not in os.environ:
                os.environ[name] = text
    _count = len(os.environ)


def _mesh_variables() -> dict[str, str]:
    config, rank = current_node().config, current_node().rank
    assert config is not None
    size, per_host = config.procs.region().nelements, config.procs.per_host
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % per_host,
        "LOCAL_WORLD_SIZE": per_host,
        "GROUP_RANK": rank // per_host,
        "GROUP_WORLD_SIZE": -(-size // per_host),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": config.addresses[0] if config.addresses else "127.0.0.1",
        "MASTER_PORT": _port_of(config.procs.uid),
    }
    return {name: str(value) for name, value in variables.items() if name not in config.given}


def rank_gpu() -> OwnGpu:
    """Return this rank's GPU, the one with its LOCAL_RANK. CUDA begins with it from the first call on."""
    from monarch._tensors.own_gpu import own_gpu

    return own_gpu(_local_rank)


def _local_rank() -> int:
    # A spare takes its rank later.
    node = current_node()
    return node.rank % node.config.procs.per_host if node.config is not None else 0


def use_own_gpu() -> None:
    """Make this rank's GPU the current device of this thread, if the program has begun to use CUDA."""
    # Before torch is imported, nothing has.
    module = sys.modules.get("monarch._tensors.own_gpu")
    gpu = module.known_gpu() if module is not None else None
    if gpu is not None:
        gpu.use_if_begun()


def _port_of(uid: str) -> int:
    """Return a port for a store that a program serves itself: the same on all ranks of a mesh."""
    return _PORTS[zlib.crc32(uid.encode()) % len(_PORTS)]
