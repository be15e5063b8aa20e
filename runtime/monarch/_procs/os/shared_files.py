"""Traces of a dead process in /dev/shm: lack of room, and the names that torch has left there for it."""

from __future__ import annotations

import os
from contextlib import suppress

FOLDER = "/dev/shm"
_SCARCE = 64 << 10
"""Free bytes below which the folder counts as full."""


def full_shared_memory(folder: str = FOLDER) -> str:
    """Return the size of the folder if it is full, as in ``64 MiB``; empty if it is not.

    A write to memory that the folder has no room for is killed by SIGBUS, and the kernel gives no reason.
    """
    with suppress(OSError):
        known = os.statvfs(folder)
        if known.f_blocks and known.f_bavail * known.f_frsize < _SCARCE:
            return f"{known.f_blocks * known.f_frsize / (1 << 20):g} MiB"
    return ""


def remove_torn(pid: int, folder: str = FOLDER) -> None:
    """Remove names without memory, which torch leaves for a process that died from lack of room."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(f"torch_{pid}_"):
                known = entry.stat(follow_symlinks=False)
                if known.st_uid == os.geteuid() and not known.st_blocks:
                    os.unlink(entry.path)
