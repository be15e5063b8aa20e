"""For tests of programs that use several hosts: real host agents on one machine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from monarch._actors.hostmesh import HostMesh
from monarch._actors.workers import WorkerHosts

__all__ = ["local_hosts"]


@contextmanager
def local_hosts(count: int) -> Generator[HostMesh]:
    """Starts host agents on this machine that talk over tcp with CURVE, as agents of different machines do.

    Args:
        count: how many.

    Yields:
        A mesh of them along the axis ``hosts``. At the end they are shut down.

    Raises:
        ValueError: the count is not positive.
    """
    if count < 1:
        raise ValueError(f"local_hosts needs at least 1 host, not {count!r}")
    workers = WorkerHosts(count)
    try:
        yield workers.mesh
    finally:
        workers.mesh.shutdown().get()
