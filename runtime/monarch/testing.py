"""For tests of programs that use several hosts: real host agents on one machine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from monarch._meshes.host_mesh import HostMesh
from monarch._session.workers import WorkerHosts

__all__ = ["local_hosts"]


@contextmanager
def local_hosts(count: int, silence: float | None = None) -> Generator[HostMesh]:
    """Start host agents on this machine that talk over tcp with CURVE, as agents of different machines do.

    Args:
        count: how many.
        silence: seconds after which one that is not heard of counts as lost; None for what is usual.

    Yields:
        A mesh of them along the axis ``hosts``. At the end they are shut down.

    Raises:
        ValueError: the count is not positive, or the silence none.
    """
    if count < 1:
        raise ValueError(f"local_hosts needs at least 1 host, not {count!r}")
    workers = WorkerHosts(count, silence=silence)
    try:
        yield workers.mesh
    finally:
        workers.mesh.shutdown().get()
