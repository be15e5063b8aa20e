"""The packages of a lock file on another host: installed once, on top of the Python that is there.

The first program of a host loads this from the runtime's zip, and it uses the standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_DONE = "monarch-complete"
"""A file in an environment that is whole."""
_LOOK_S = 0.2
"""Seconds between checks whether the program has hung up."""
_LINES = 4
"""Lines of an installer that an error shows."""
_UV = ("~/.local/bin/uv", "~/.cargo/bin/uv")
_PR_SET_PDEATHSIG = 1


class InstallError(Exception):
    """The packages could not be installed; the text says why."""


def prepare(packages: Mapping[str, Any], cache: Callable[[], str], say: Callable[..., None]) -> str:
    """Return the Python of an environment with the packages.

    Args:
        packages: ``name`` and ``text`` of requirements with a ``digest``, or ``packed``, the path of an archive.
        cache: returns a folder that only this user can write to.
        say: reports to the launcher.

    Raises:
        InstallError: that failed.
        OSError: there is no room, or no archive.
    """
    packed = packages.get("packed", "")
    if packed:
        known = os.stat(packed)
        what = f"{packed} {known.st_size} {known.st_mtime_ns}"
    else:
        what = f"{packages['digest']} {sys.version} {sys.prefix}"
    target = os.path.join(cache(), "packages-" + hashlib.sha256(what.encode()).hexdigest()[:16])
    python = os.path.join(target, "bin", "python")
    with open(target + ".lock", "w") as lock:
        # Other hosts with the same home wait for the first one.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(os.path.join(target, _DONE)):
            shutil.rmtree(target, ignore_errors=True)
            try:
                if packed:
                    say("installing", what=os.path.basename(packed), by="unpacking")
                    _unpack(packed, target)
                else:
                    _install(packages, target, python, say)
            except BaseException:
                shutil.rmtree(target, ignore_errors=True)
                raise
            with open(os.path.join(target, _DONE), "w"):
                pass
        os.utime(target)
    if not os.access(python, os.X_OK):
        raise InstallError(f"{packed or packages['name']} has no bin/python")
    return python


def _install(packages: Mapping[str, Any], target: str, python: str, say: Callable[..., None]) -> None:
    uv = shutil.which("uv") or next(filter(os.path.exists, map(os.path.expanduser, _UV)), "")
    say("installing", what=packages["name"], by="uv" if uv else "pip")
    _run([sys.executable, "-m", "venv", "--without-pip", target])
    folders = [each for each in [*site.getsitepackages(), site.getusersitepackages()] if os.path.isdir(each)]
    (own,) = [os.path.join(target, "lib", each, "site-packages") for each in os.listdir(os.path.join(target, "lib"))]
    with open(os.path.join(own, "monarch-base.pth"), "w") as file:
        # The host's Python has the rest. Packages of the lock file come first.
        file.write("import site; " + "; ".join(f"site.addsitedir({each!r})" for each in folders) + "\n")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(packages["text"])
        file.flush()
        if uv:
            _run([uv, "pip", "install", "--quiet", "--python", python, "-r", file.name])
        else:
            more = ["--quiet", "--disable-pip-version-check", "--no-input"]
            _run([sys.executable, "-m", "pip", "--python", python, "install", *more, "-r", file.name])


def _unpack(packed: str, target: str) -> None:
    os.makedirs(target)
    if zipfile.is_zipfile(packed):
        # The module zipfile forgets which files are executable.
        _run(["unzip", "-q", packed, "-d", target])
    else:
        with tarfile.open(packed) as archive:
            archive.extractall(target)
    unpack = os.path.join(target, "bin", "conda-unpack")
    if os.path.exists(unpack):
        _run([os.path.join(target, "bin", "python"), unpack])


def _run(command: Sequence[str]) -> None:
    """Run a command; end it when the program hangs up, or when this process dies.

    Raises:
        InstallError: it has failed.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise InstallError(f"cannot run {command[0]}: {error.strerror}") from error
        while process.poll() is None:
            ready, _, _ = select.select([0], [], [], _LOOK_S)
            if ready and not os.read(0, 4096):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise InstallError("the program has ended")
        if process.returncode:
            output.seek(0)
            lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
            name = "pip" if command[1:3] == ["-m", "pip"] else os.path.basename(command[0])
            raise InstallError(f"{name} failed with code {process.returncode}: {'; '.join(lines[-_LINES:])}")


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
