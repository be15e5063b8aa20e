"""The environment variables of torchrun, in each rank of a mesh, for libraries that look for them."""

from __future__ import annotations

import hashlib
import os

from monarch._node.current import current_node

_PORTS = range(20_000, 30_000)
"""Below the ports that Linux gives to connections by itself."""


def set_mesh_variables() -> None:
    """Set RANK, WORLD_SIZE and so on to this rank's place in its mesh, except those that the user has set."""
    config, rank = current_node().config, current_node().rank
    assert config is not None
    size, per_host = config.procs.region().nelements, config.procs.per_host
    local, local_size = rank % per_host, per_host
    if len(os.environ.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1:
        # It sees one GPU, number 0, so a program that counts GPUs takes it for a separate host.
        local, local_size = 0, 1
    found = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": rank // per_host,
        "GROUP_WORLD_SIZE": -(-size // per_host),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": config.addresses[0] if config.addresses else "127.0.0.1",
        "MASTER_PORT": _port_of(config.procs.uid),
    }
    os.environ.update({name: str(value) for name, value in found.items() if name not in config.given})


def _port_of(uid: str) -> int:
    """Return a port for a store that a program serves itself: the same on all ranks of a mesh."""
    digest = hashlib.sha256(uid.encode()).digest()
    return _PORTS[int.from_bytes(digest[:4], "little") % len(_PORTS)]
