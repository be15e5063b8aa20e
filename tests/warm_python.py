"""Python with imports done: a process that forks for each kernel, which then starts as by its command line.

A kernel spends a second of CPU on imports before it is ready, four fifths of its start. Run as a script, this file is
the process that forks. Everything after the imports is the kernel's own: the same module runs as ``__main__`` with the
same arguments, environment, folder and standard streams, as the leader of its own session.
"""

from __future__ import annotations

import array
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

KERNEL = (
    *("ipykernel.kernelapp", "monarch_kernel.kernel", "ipykernel.zmqshell", "IPython.core.completer", "debugpy"),
    *("monarch_kernel.magics.mesh", "monarch_kernel.cells.advice", "monarch_kernel.views.shown"),
)
"""What each kernel imports before its first cell."""
_STREAMS = 3
_PACKET = 1 << 20
_OF_A_TEST = ("PYTEST_CURRENT_TEST",)
"""Changes with each test, and no kernel reads it."""
_PARENT = "JPY_PARENT_PID"
_UNKNOWN = 255
"""The status of a process whose parent has ended before it was asked."""


class Forked:
    """A process that was forked, with what ``Popen`` offers of it."""

    stdin = stdout = stderr = None

    def __init__(self, server: WarmPython, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its status if it has ended."""
        if self.returncode is None and self._waited(0):
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its status once it has ended."""
        if self.returncode is None:
            if not self._waited(timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            os.close(self._ended)
            self.returncode = self._server.status(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _waited(self, timeout: float | None) -> bool:
        poller = select.poll()
        poller.register(self._ended, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1000))


class WarmPython:
    """The process that forks, and its connection; it ends when that is closed.

    Args:
        modules: what it imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environ = _comparable(os.environ)
        self._folder = os.getcwd()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno()), *modules],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        if self._connection.recv(_PACKET) != b"ready":
            self._process.wait()
            raise RuntimeError(f"the process that forks has ended with status {self._process.returncode}")

    def can(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether a fork is as good as a new process: it differs in nothing that an import may have read."""
        same = _comparable(env) == self._environ and os.getcwd() == self._folder
        return same and argv[:3] == [sys.executable, "-m", "monarch_kernel"]

    def start(self, argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> Forked:
        """Start a process.

        Args:
            argv: Python, ``-m``, a module, and its arguments.
            env: its environment.
            stdout: descriptor for its output.
            stderr: descriptor for its errors.
        """
        request = {"argv": argv[2:], "env": {**env, _PARENT: str(self._process.pid)}}
        with open(os.devnull) as nothing:
            descriptors = array.array("i", [nothing.fileno(), stdout, stderr])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
            self._connection.sendmsg([json.dumps(request).encode()], ancillary)
        return Forked(self, int(self._connection.recv(_PACKET)))

    def status(self, pid: int) -> int:
        """Return the status of a process that has ended."""
        if self._connection.fileno() < 0:
            return _UNKNOWN
        self._connection.send(json.dumps({"pid": pid}).encode())
        return int(self._connection.recv(_PACKET))

    def close(self) -> None:
        """End the process that forks."""
        self._connection.close()
        self._process.wait()


kernels: WarmPython | None = None
"""What starts kernels, while a fixture holds it."""


@contextmanager
def held_for_kernels() -> Iterator[None]:
    """Start what forks for kernels, for as long as this is entered."""
    global kernels
    before = kernels
    kernels = made = WarmPython(KERNEL)
    try:
        yield
    finally:
        kernels = before
        made.close()


def _comparable(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key not in (*_OF_A_TEST, _PARENT)}


def _serve(connection: socket.socket) -> list[str] | None:
    """Fork for each request; return in each child its module and arguments, and None at the end."""
    while True:
        text, ancillary, _, _ = connection.recvmsg(_PACKET, socket.CMSG_SPACE(_STREAMS * array.array("i").itemsize))
        if not text:
            return None
        request = json.loads(text)
        if "pid" in request:
            _, status = os.waitpid(request["pid"], 0)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        streams = array.array("i", ancillary[0][2])
        if os.fork():
            for each in streams:
                os.close(each)
            continue
        os.setsid()
        connection.send(str(os.getpid()).encode())
        connection.close()
        for number, each in enumerate(streams):
            os.dup2(each, number)
            os.close(each)
        os.environ.clear()
        os.environ.update(request["env"])
        # As ``-m`` does.
        sys.path.insert(0, os.getcwd())
        return request["argv"]


def _main() -> None:
    # Not the folder of the tests, which is no part of a kernel.
    del sys.path[0]
    connection = socket.socket(fileno=int(sys.argv[1]))
    # ipykernel reads it when it is imported: a kernel ends with its parent.
    os.environ[_PARENT] = str(os.getpid())
    for name in sys.argv[2:]:
        __import__(name)
    # No fork has to copy these to look through them.
    gc.collect()
    gc.freeze()
    connection.send(b"ready")
    argv = _serve(connection)
    if argv is not None:
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
