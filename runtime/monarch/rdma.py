"""One-sided access to memory that actors export: reads and writes do not need the owner's Python, which may be busy."""

from __future__ import annotations

from monarch._state.rdma.action import RDMAAction
from monarch._state.rdma.backends import (
    RDMAReadTransferWarning,
    RDMATcpFallbackWarning,
    RDMAWriteTransferWarning,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)
from monarch._state.rdma.buffer import RDMABuffer

__all__ = [
    "RDMAAction",
    "RDMABuffer",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMAWriteTransferWarning",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
]
