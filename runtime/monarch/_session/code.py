"""Python files of a program's working directory on the hosts of its ranks: a host gets those that it lacks."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from monarch._node.current import current_node
from monarch._node.services.once import is_first
from monarch._node.services.registry import service
from monarch.exceptions import ArgumentError

MOST = 5000
"""Python files of a working directory."""
MOST_ENTRIES = 50_000
"""Files and folders that are looked at below a working directory, before each cell: about half a second."""
_LARGE = 4 << 20
"""Bytes of a file that is too large to be code."""
_NOT_CODE = {"__pycache__", "node_modules", "site-packages"}
_lock = threading.Lock()
_known: dict[str, tuple[int, int, str]] = {}
"""Time of change, size and digest of each file, by its path. Under ``_lock``."""
_refusals: dict[str, str] = {}
"""Why folders were not looked into to their end, by folder. Under ``_lock``."""


class Lacking(NamedTuple):
    """The answer of a rank.

    Attributes:
        host: the same for all ranks of a host.
        names: files that the host lacks.
    """

    host: str
    names: list[str]


def code_files(folder: str, again: bool = False) -> dict[str, str]:
    """Return the digests of the Python files below a folder, by their paths in it.

    Args:
        folder: the working directory.
        again: look into it even if it had too many before.

    Raises:
        ArgumentError: there are too many, or too many other files among them.
    """
    with _lock:
        refusal = "" if again else _refusals.get(folder, "")
    if refusal:
        raise ArgumentError(refusal)
    try:
        files = _code_files(folder)
    except ArgumentError as error:
        with _lock:
            _refusals[folder] = str(error)
        raise
    with _lock:
        _refusals.pop(folder, None)
    return files


def _code_files(folder: str) -> dict[str, str]:
    files: dict[str, str] = {}
    for name in _python_files(folder):
        digest = _digest(os.path.join(folder, name))
        if digest:
            files[name] = digest
        if len(files) > MOST:
            raise ArgumentError(_refusal(folder, f"{MOST} Python files"))
    return files


def read_code(folder: str, names: list[str]) -> dict[str, bytes]:
    """Return the contents of files; those that have gone meanwhile are left out."""
    contents: dict[str, bytes] = {}
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                contents[name] = file.read()
        except OSError:
            continue
    return contents


def _python_files(folder: str) -> Iterator[str]:
    visited = 0
    for here, folders, files in os.walk(folder):
        visited += len(folders) + len(files)
        if visited > MOST_ENTRIES:
            raise ArgumentError(_refusal(folder, f"{MOST_ENTRIES} files and folders"))
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NOT_CODE
            and not os.path.exists(os.path.join(here, name, "pyvenv.cfg"))
        )
        for name in sorted(files):
            if name.endswith(".py"):
                yield os.path.relpath(os.path.join(here, name), folder)


def _refusal(folder: str, what: str) -> str:
    return (
        f"{folder} has more than {what}, so its Python files are not copied to the hosts; start Jupyter in the folder "
        f"of your project, and run %mesh sync to look again"
    )


def _digest(path: str) -> str:
    """Return the digest of a file; empty if it cannot be read or is too large."""
    try:
        found = os.stat(path)
        with _lock:
            known = _known.get(path)
        if known is not None and known[:2] == (found.st_mtime_ns, found.st_size):
            return known[2]
        if found.st_size > _LARGE:
            return ""
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
    with _lock:
        _known[path] = (found.st_mtime_ns, found.st_size, digest)
    return digest


def _matches(folder: str, files: Mapping[str, str]) -> bool:
    return all(_digest(os.path.join(folder, name)) == digest for name, digest in files.items())


def _copies() -> str:
    """Return the folder of this host with the files of its program. It is removed with the session."""
    return os.path.join(current_node().folder, "code")


@service("code.lacking", "threaded")
def lacking(folder: str, files: dict[str, str]) -> Lacking:
    """Return which files the host of this rank lacks; none if it shares the folder.

    Args:
        folder: the working directory of the program.
        files: digests of its files, by their paths in it.
    """
    host = current_node().folder
    if _matches(folder, files):
        return Lacking(host, [])
    copies = _copies()
    return Lacking(host, [name for name, digest in files.items() if _digest(os.path.join(copies, name)) != digest])


@service("code.keep_code", "threaded")
def keep_code(contents: dict[str, bytes], key: str) -> None:
    """Write files to the copy of this host, each at once.

    Args:
        contents: by name.
        key: the key of the request, which may come again after newer files.
    """
    if not is_first(key):
        return
    copies = _copies()
    for name, content in contents.items():
        target = os.path.normpath(os.path.join(copies, name))
        if not target.startswith(copies + os.sep):
            raise ArgumentError(f"expected a path inside the working directory, got {name!r}")
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".new-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(made, target)


@service("code.use_code", "threaded")
def use_code(folder: str, files: dict[str, str]) -> list[str]:
    """Import from the copy of this host, unless it shares the folder; return the modules that are imported from there.

    Args:
        folder: the working directory of the program, whose place among the folders for imports the copy takes.
        files: as for ``lacking``.
    """
    copies = _copies()
    if _matches(folder, files) or not os.path.isdir(copies):
        return []
    for name in _python_files(copies):
        if name not in files:
            # Another rank of the host may be first.
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(copies, name))
    if copies not in sys.path:
        places = [place for place, path in enumerate(sys.path) if path in ("", folder)]
        sys.path.insert(places[0] if places else 0, copies)
    importlib.invalidate_caches()
    mine = copies + os.sep
    return sorted(
        name for name, module in [*sys.modules.items()] if str(getattr(module, "__file__", None) or "").startswith(mine)
    )
