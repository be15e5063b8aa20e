"""The limit of memory of this process, such as one by ``ulimit -v``."""

from __future__ import annotations

import mmap
import resource

from monarch.exceptions import LimitError

NEED = 96 << 20
"""Bytes of address space for the threads of a session; ZeroMQ aborts the process if one cannot be started."""


def check_memory() -> None:
    """Refuse to continue if this process may not allocate enough memory for a session. Allocates none.

    Raises:
        LimitError: with what the limit is.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        mmap.mmap(-1, NEED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise LimitError(
            f"cannot start a session: this process may use {limit >> 20} MiB of memory (ulimit -v), and less than "
            f"{NEED >> 20} MiB of it is left; raise the limit before the program starts",
            limit=limit,
            need=NEED,
        ) from error
