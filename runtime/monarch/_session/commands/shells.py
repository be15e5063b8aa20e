"""An interactive shell on a host, in the terminal of this program."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from monarch._actors.actor import Actor
from monarch._actors.endpoint import concurrent_endpoint
from monarch._actors.ports import Channel
from monarch._meshes.host_mesh import HostMesh
from monarch._python.threads import new_thread
from monarch.exceptions import ArgumentError, CallTimeoutError, MonarchError

_LEAVE = b"~."
"""At the beginning of a line, ends a shell whose host does not answer, as in ssh."""
_START = """
import os, signal, sys
# This program may have been started where they are ignored, or blocked.
for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGHUP):
    signal.signal(each, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
# The first terminal that the leader of a session opens controls it.
terminal = os.open(sys.argv[1], os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
os.execvp(sys.argv[2], [sys.argv[2], "-i"])
"""
"""Python that becomes a shell in a terminal: the arguments are both."""
_TURN = 0.1
"""Seconds between looks whether the shell has ended without a last output."""
_CLOSING = 5.0
"""Seconds for a shell to end that is hung up."""


def shell(host_mesh: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> int:
    """Run an interactive shell on a host, in the terminal of this program; return its exit code.

    All keys go to the shell, including Ctrl-C. Enter, ``~`` and ``.`` end a shell whose host does not answer.

    Args:
        host_mesh: one host, such as ``hosts.slice(hosts=2)``.
        env: additional environment variables.
        workdir: working directory; by default that of this program, where it exists.

    Raises:
        ArgumentError: there are several hosts, or this program has no terminal.
        SupervisionError: the host was lost.
    """
    if len(host_mesh) != 1:
        raise ArgumentError(
            f"host_mesh: expected one host, got {len(host_mesh)}; select one, as in hosts.slice(hosts=0)"
        )
    if not (_has_terminal(0) and _has_terminal(1)):
        raise ArgumentError(
            "shell: this program has no terminal; use !COMMAND in a %%mesh cell of a notebook, or call exec_command()"
        )
    procs = host_mesh.spawn_procs(name="shell")
    try:
        there: Any = procs.spawn("shell", Shell)
        port, output = Channel[bytes].open()
        # Not as shutil has it: its variables may be older than the window.
        size = os.get_terminal_size(0)
        term = os.environ.get("TERM", "xterm")
        running = there.run.call_one({"TERM": term, **(env or {})}, workdir, os.getcwd(), [*size], port)
        with _raw_terminal(there):
            return _show(running, output)
    finally:
        procs.stop().get(_CLOSING)


def _has_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False


def _show(running: Any, output: Any) -> int:
    """Write what the shell writes, until it ends."""
    written = output.recv()
    while True:
        try:
            data: bytes = written.get(_TURN)
        except CallTimeoutError:
            if running.done:
                return running.get()
            continue
        if not data:
            return running.get()
        os.write(1, data)
        written = output.recv()


@contextmanager
def _raw_terminal(there: Any) -> Generator[None]:
    """Send all keys, and changes of the window's size, to the shell."""
    before = termios.tcgetattr(0)
    wake, woken = os.pipe()
    keys = new_thread("monarch-shell", _send_keys, there, wake)
    on_main = threading.current_thread() is threading.main_thread()
    resized = signal.signal(signal.SIGWINCH, lambda number, frame: _resize(there)) if on_main else None
    try:
        tty.setraw(0)
        keys.start()
        yield
    finally:
        if on_main:
            signal.signal(signal.SIGWINCH, resized)
        os.close(woken)
        keys.join()
        os.close(wake)
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _resize(there: Any) -> None:
    there.resize.broadcast([*os.get_terminal_size(0)])


def _send_keys(there: Any, wake: int) -> None:
    """Send keys until the other end of a pipe is closed."""
    line = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        keys = os.read(0, 4096) if wake not in ready else b""
        # Without keys, the terminal is gone.
        leaves = bool(keys) and _leaves(line, keys)
        with suppress(MonarchError):
            # A lost host: told by the call of the shell.
            there.write.broadcast(keys) if keys and not leaves else there.hang_up.broadcast()
        if not keys or leaves:
            return
        line = (line + keys)[-len(_LEAVE) - 1 :]


def _leaves(before: bytes, keys: bytes) -> bool:
    """Return whether keys end the shell; ``before`` are the ones in front of them."""
    typed = before + keys
    return typed.endswith((b"\r" + _LEAVE, b"\n" + _LEAVE)) or (not before and typed == _LEAVE)


class Shell(Actor):
    """Runs a shell in a pseudo-terminal of its host. Used by its event loop only."""

    def __init__(self) -> None:
        self._master = -1
        self._keys = bytearray()
        """Keys for which the terminal has no room yet, since no program reads them."""
        self._process: subprocess.Popen[bytes] | None = None

    @concurrent_endpoint
    async def run(self, env: dict[str, str], workdir: str | None, here: str, size: list[int], port: Any) -> int:
        """Run the shell to its end, and return its exit code; what it writes goes to a port, nothing at the end."""
        self._master, slave = pty.openpty()
        # A program that reads no keys must not keep the shell from being hung up.
        os.set_blocking(self._master, False)
        self._set_size(size)
        command = [sys.executable, "-I", "-S", "-c", _START, os.ttyname(slave), os.environ.get("SHELL") or "/bin/sh"]
        folder = workdir or (here if os.path.isdir(here) else None)
        self._process = process = subprocess.Popen(
            command, env={**os.environ, **env}, cwd=folder, start_new_session=True
        )
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def take() -> None:
            try:
                data = os.read(self._master, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                # No process has the terminal open any longer.
                data = b""
            if data:
                port.send(data)
            else:
                loop.remove_reader(self._master)
                ended.set()

        loop.add_reader(self._master, take)
        leader = loop.run_in_executor(None, process.wait)
        # Until the shell has opened the terminal, this keeps it from being over.
        leader.add_done_callback(lambda _: os.close(slave))
        try:
            code = await leader
            # Its background processes may keep the terminal open.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended.wait(), _TURN)
        finally:
            self._end()
            loop.remove_reader(self._master)
            loop.remove_writer(self._master)
            os.close(self._master)
            self._master = -1
        port.send(b"")
        return code if code >= 0 else 128 - code

    @concurrent_endpoint
    async def write(self, keys: bytes) -> None:
        """Give the shell keys."""
        if self._master >= 0:
            self._keys += keys
            self._write_keys()

    @concurrent_endpoint
    async def resize(self, size: list[int]) -> None:
        """Tell the shell columns and lines of the window."""
        if self._master >= 0:
            self._set_size(size)

    @concurrent_endpoint
    async def hang_up(self) -> None:
        """End the shell, as a terminal that is closed does."""
        self._end()

    def _write_keys(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            del self._keys[: os.write(self._master, self._keys)]
        except BlockingIOError:
            pass
        except OSError:
            # The shell has ended.
            self._keys.clear()
        if self._keys:
            loop.add_writer(self._master, self._write_keys)
        else:
            loop.remove_writer(self._master)

    def _set_size(self, size: list[int]) -> None:
        columns, lines = size
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGHUP)
