"""Test helpers for programs that use several hosts: real host agents on one machine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from monarch._meshes.host_mesh import HostMesh
from monarch._session.workers import WorkerHosts

__all__ = ["local_hosts"]


@contextmanager
def local_hosts(count: int, silence: float | None = None) -> Generator[HostMesh]:
    """Start host agents on this machine that talk over TCP with CURVE, like agents on different machines.

    Args:
        count: the number of agents.
        silence: seconds without a heartbeat after which an agent counts as lost; None for the default.

    Yields:
        A mesh of the hosts along the axis ``hosts``. They are shut down at the end.

    Raises:
        ValueError: ``count`` or ``silence`` is not positive.
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1 host, got {count!r}")
    workers = WorkerHosts(count, silence=silence)
    try:
        yield workers.mesh
    finally:
        workers.mesh.shutdown().get()
