"""Queries of the transports that this machine has."""

from __future__ import annotations

import os

from monarch._tensors.transports.nixl import is_installed


class RDMAReadTransferWarning(UserWarning):
    """Never given here; for programs of torchmonarch that filter it."""


class RDMAWriteTransferWarning(UserWarning):
    """Likewise."""


class RDMATcpFallbackWarning(UserWarning):
    """Likewise."""


def is_ibverbs_available() -> bool:
    """Return whether this machine has a device for RDMA."""
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


def is_rdma_available() -> bool:
    """Return True: there is always a transport; ``RDMABuffer.backend`` names it, and ``transports`` says why."""
    return True


def get_rdma_backend() -> str:
    """Return the transport between hosts: ``ibverbs`` if NIXL has a device, else ``nixl`` or ``tcp``."""
    if not is_installed():
        return "tcp"
    return "ibverbs" if is_ibverbs_available() else "nixl"
