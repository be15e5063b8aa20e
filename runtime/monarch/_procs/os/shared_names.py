"""Names of shared memory and semaphores of a rank, as files that outlive it, so that they can be removed for it.

multiprocessing has a resource tracker for that, which is a process too: killed together with its rank, it removes
nothing. Each name that the tracker of a rank knows has a file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from monarch._procs.os.shared_files import FOLDER

_SUFFIX = ".names"
_PREFIXES = {"shared_memory": "", "semaphore": "sem."}
"""File name prefixes, by kind of resource; the tracker's others are not in memory."""


def keep_names(folder: str, proc: str) -> None:
    """Record the names that this process and its forks register with multiprocessing's resource tracker.

    Args:
        folder: the folder of the session.
        proc: this process.
    """
    from multiprocessing.resource_tracker import ResourceTracker

    own = _folder_of(folder, proc)
    tracker: Any = ResourceTracker
    send = getattr(tracker, "_send", None)
    if send is None:
        # A Python version with another layout: a rank can do without.
        return

    def keep(self: Any, command: str, name: str, kind: str) -> None:
        if kind in _PREFIXES:
            # If there is no room for it, the program continues.
            with suppress(OSError):
                _note(own, command, _PREFIXES[kind] + name.lstrip("/"))
        send(self, command, name, kind)

    tracker._send = keep


def _note(own: Path, command: str, name: str) -> None:
    if command == "REGISTER":
        own.mkdir(mode=0o700, exist_ok=True)
        (own / name).touch()
    elif command == "UNREGISTER":
        (own / name).unlink()


def remove_names(folder: str, living: Collection[str] = (), memory: str = FOLDER) -> None:
    """Remove the leftovers of dead processes; call it when their trackers have ended.

    Args:
        folder: the folder of the session.
        living: processes that keep theirs.
        memory: folder of the system's names.
    """
    kept = {_folder_of(folder, proc) for proc in living}
    for own in Path(folder).glob(f"*{_SUFFIX}"):
        if own not in kept:
            for each in own.iterdir():
                _remove(Path(memory, each.name))
            shutil.rmtree(own, ignore_errors=True)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.lstat().st_uid == os.geteuid():
            path.unlink()


def _folder_of(folder: str, proc: str) -> Path:
    return Path(folder, proc.partition("/")[2] + _SUFFIX)
