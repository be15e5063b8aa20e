"""``%pip`` on ranks: once per host, by the first rank that comes; the others wait for it."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from typing import IO, Any

from monarch._node.current import current_node
from monarch._notebook.magics.commands import run_command, shell_command
from monarch._notebook.running.running_cell import RunningCell

_LOOK = 0.05
"""Seconds between two looks whether another rank has ended; an interrupt waits no longer."""
_KEPT = 50
"""Records that are kept."""
_INSTALLED = re.compile(r"^Successfully installed (.+)$", re.M)
_SHELL = re.compile(r"[();<>|&]+")
"""Words of a shell that are not arguments of a program."""


def run_pip(line: str, cell: RunningCell) -> int:
    """Run pip unless another rank of the host has run this line of the cell; return its exit status."""
    cell.installs += 1
    key = f"{cell.name} {cell.installs} {line}"
    with _locked(os.path.join(current_node().folder, "installs")) as file:
        records: list[Any] = json.loads(file.read() or "[]")
        done = [each for each in records if each["key"] == key and each["ended"] >= cell.begun]
        record = done[-1] if done else _run(key, line)
        if not done:
            file.seek(0)
            file.truncate()
            json.dump([*records, record][-_KEPT:], file)
    importlib.invalidate_caches()
    _tell_imported(record["packages"])
    return record["status"]


def pip_line(command: str) -> str:
    """Return the arguments of pip if a shell command only changes the environment of this Python by it, else nothing.

    Args:
        command: such as ``pip install x`` or ``python -m pip install x``.
    """
    words = _words_of(command)
    if words[1:3] == ["-m", "pip"] and (words[0] == sys.executable or re.fullmatch(r"python3?", words[0])):
        words = ["pip", *words[3:]]
    is_pip = words[:1] in (["pip"], ["pip3"]) and words[1:2] in (["install"], ["uninstall"])
    if not is_pip or any(char in command for char in "$`") or any(map(_SHELL.fullmatch, words)):
        return ""
    return shlex.join(words[1:])


def pip_command(line: str) -> list[str]:
    """Return the command of a line of pip, which may pipe its output to others, as in ``list | grep torch``."""
    if "|" in _words_of(line):
        return shell_command(f"{shlex.quote(sys.executable)} -m pip {line}")
    return [sys.executable, "-m", "pip", *shlex.split(line)]


def _words_of(command: str) -> list[str]:
    """Return the words of a shell command, and its operators; nothing if it is not complete."""
    splitter = shlex.shlex(command, posix=True, punctuation_chars=True)
    splitter.whitespace_split, splitter.commenters = True, ""
    try:
        return list(splitter)
    except ValueError:
        return []


def _run(key: str, line: str) -> dict[str, Any]:
    shown: list[str] = []

    def write(text: str) -> None:
        shown.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    print("pip runs once per host, in the environment of its ranks", flush=True)
    status = run_command(pip_command(line), write)
    names = [each.rpartition("-")[0] for each in " ".join(_INSTALLED.findall("".join(shown))).split()]
    return {"key": key, "ended": time.time(), "status": status, "packages": names}


@contextmanager
def _locked(path: str) -> Generator[IO[str]]:
    """Open a file for this process alone; wait for the rank that has it, which gives it back when it dies."""
    with open(path, "a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK)
        file.seek(0)
        yield file


def _tell_imported(packages: list[str]) -> None:
    """Report modules that this process has imported from an earlier version."""
    old = sorted({name for package in packages for name in _modules(package) if name in sys.modules})
    if old:
        print(f"{', '.join(old)}: already imported on this rank; %mesh restart loads the installed version")


def _modules(package: str) -> set[str]:
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        # Installed elsewhere, as with --target.
        return set()
    return {name.removesuffix(".py") for name in (file.parts[0] for file in files) if ".dist-info" not in name}
