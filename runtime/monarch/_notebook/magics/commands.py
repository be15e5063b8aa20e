"""Shell commands on a rank: their output arrives live, and an interrupt ends them with all their descendants."""

from __future__ import annotations

import codecs
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from monarch._procs.os.orphans import children
from monarch._python.threads import new_thread

_LOOK = 0.1
"""Seconds between two checks whether a silent command has ended; an interrupt waits no longer."""
_POLITE = 0.3
"""Seconds that an interrupted command has to end by itself."""
_CHUNK = 1 << 16
_TOKEN = "MONARCH_COMMAND"
"""Variable in the environment of a command, by which its descendants are found."""
_SHELLS = {"bash", "dash", "ksh", "sh", "zsh"}
_PLAIN = {"PYTHONUNBUFFERED": "1", "PAGER": "cat", "GIT_PAGER": "cat"}
"""Makes output arrive live, and no program wait for a key."""


def shell_command(text: str) -> list[str]:
    """Return the arguments that run a text in the user's shell."""
    shell = os.environ.get("SHELL", "")
    return [shell if os.path.basename(shell) in _SHELLS and os.access(shell, os.X_OK) else "/bin/sh", "-c", text]


def run_command(arguments: Sequence[str], write: Callable[[str], object], text: str = "") -> int:
    """Run a command to its end; return its exit status, negative for a signal.

    Args:
        arguments: the program and its arguments.
        write: takes the output, stdout and stderr together, as it arrives.
        text: the input of the command.
    """
    command = _Command(arguments, text)
    try:
        process = command.start()
        _copy(process, write)
        return process.wait()
    except BaseException:
        command.stopped = True
        raise
    finally:
        command.over.set()
        # An interrupt may have come before the thread began.
        with suppress(RuntimeError):
            command.thread.join()


class _Command:
    """A command that a thread starts and reaps, so that an interrupt of the caller cannot leave it behind.

    Attributes:
        stopped: whether the thread is to end it; written by the caller before ``over`` is set.
        over: set by the caller when it no longer reads the output.
    """

    def __init__(self, arguments: Sequence[str], text: str) -> None:
        self._arguments = arguments
        self._text = text
        self._begun = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: Exception | None = None
        self.stopped = False
        self.over = threading.Event()
        self.thread = new_thread("monarch-command", self._tend)

    def start(self) -> subprocess.Popen[bytes]:
        """Start it; raise what kept it from starting."""
        self.thread.start()
        self._begun.wait()
        if self._process is None:
            assert self._error is not None
            raise self._error
        return self._process

    def _tend(self) -> None:
        token = uuid.uuid4().hex
        try:
            process = self._popen(token)
        except Exception as error:
            self._error = error
            return
        finally:
            self._begun.set()
        assert process.stdout is not None
        with process.stdout:
            self.over.wait()
            if self.stopped:
                _stop(process, token)

    def _popen(self, token: str) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as source:
            source.write(self._text.encode())
            source.seek(0)
            self._process = subprocess.Popen(
                self._arguments,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**_PLAIN, **os.environ, _TOKEN: token},
                start_new_session=True,
            )
            return self._process


def _copy(process: subprocess.Popen[bytes], write: Callable[[str], object]) -> None:
    """Copy output until the command has ended; a background child may keep the pipe open."""
    assert process.stdout is not None
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    pipe = process.stdout.fileno()
    while True:
        ended = process.poll() is not None
        if select.select([pipe], [], [], 0 if ended else _LOOK)[0]:
            data = os.read(pipe, _CHUNK)
            if data:
                write(decode(data))
                continue
            break
        if ended:
            break
    rest = decode(b"", True)
    if rest:
        write(rest)


def _stop(process: subprocess.Popen[bytes], token: str) -> None:
    """End a command with all its descendants, politely first."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        _drain(process)
    _kill(process, token)


def _drain(process: subprocess.Popen[bytes]) -> None:
    """Discard output meanwhile, since a full pipe would block the command."""
    assert process.stdout is not None
    until = time.monotonic() + _POLITE
    while process.poll() is None and time.monotonic() < until:
        if select.select([process.stdout], [], [], 0.02)[0]:
            os.read(process.stdout.fileno(), _CHUNK)


def _kill(process: subprocess.Popen[bytes], token: str) -> None:
    """Kill a command and its descendants until a search finds none."""
    marker = f"{_TOKEN}={token}".encode()
    while alive := {*_descendants(process.pid), *_marked(marker)} - {process.pid}:
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if process.poll() is None:
            process.kill()
        time.sleep(0.005)
    if process.poll() is None:
        process.kill()
    process.wait()


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process that are not zombies; forks of threads other than the first are missing."""
    found: list[int] = []
    for child in children(pid):
        found += [*([child] if _lives(child) else []), *_descendants(child)]
    return found


def _marked(marker: bytes) -> list[int]:
    """Return the processes with a marker in their environment, which a zombie does not have."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and marker in _read(f"/proc/{name}/environ")]


def _lives(pid: int) -> bool:
    state = _read(f"/proc/{pid}/stat").rpartition(b") ")[2][:1]
    return state not in (b"", b"Z", b"X")


def _read(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
