"""Memory that actors share one-sidedly: the owner's Python takes no part in a read or a write, and may be busy."""

from __future__ import annotations

from monarch._state.rdma.action import RDMAAction
from monarch._state.rdma.backends import get_rdma_backend, is_ibverbs_available, is_rdma_available
from monarch._state.rdma.buffer import RDMABuffer

__all__ = ["RDMAAction", "RDMABuffer", "get_rdma_backend", "is_ibverbs_available", "is_rdma_available"]
