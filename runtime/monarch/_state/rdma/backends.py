"""What this machine has for transfers, in the words of programs that ask."""

from __future__ import annotations

import os

from monarch._tensors.transports.nixl import is_installed


def is_ibverbs_available() -> bool:
    """Return whether this machine has a device for RDMA."""
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


def is_rdma_available() -> bool:
    """True: there is always a transport; ``RDMABuffer.backend`` says which one is used, and ``transports`` why."""
    return True


def get_rdma_backend() -> str:
    """What is used between hosts: ``ibverbs`` if NIXL is installed and has a device, else ``nixl`` or ``tcp``."""
    if not is_installed():
        return "tcp"
    return "ibverbs" if is_ibverbs_available() else "nixl"
