"""Host agents on this machine: forks of the fork server, or processes of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BufferedReader

import msgspec

from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.fork_client import ForkServerClient, hand_over
from monarch._procs.os.starting import start_process
from monarch.exceptions import SpawnError

_MODULE = "monarch._procs.agent.main"
_STDERR = 2
_PATIENCE = 2.0
"""Seconds that an agent gets to end after each signal."""


class HostAgent:
    """A host agent on this machine. Any thread may use it.

    It is requested at once, and starts in ``begin``, which waits for that.

    Args:
        config: its configuration.
        errors: the file for its stderr; by default that of this process.
        announces: whether it prints a line, see ``first_line``.
        prefix: a command to start it under, such as one that enters a network namespace.
        env: additional environment variables.
        module: the module that runs it.
        stays: whether it outlives this process; its module then runs it in an orphan.
    """

    def __init__(
        self,
        config: AgentConfig,
        errors: int | None = None,
        *,
        announces: bool = False,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        module: str = _MODULE,
        stays: bool = False,
    ) -> None:
        self._config = config
        self._errors = errors
        self._prefix = prefix
        self._env = dict(env or {})
        self._module = module
        self._closing = threading.Event()
        self._beginning = threading.Lock()
        """Held while an agent is waited for; by ``_closing`` that ends soon."""
        self._begun = False
        """Under ``_beginning``."""
        self._process: subprocess.Popen[bytes] | None = None
        """Set once, before ``_begun``."""
        self._lock = threading.Lock()
        # These under _lock; single reads of pid need none.
        self._pidfd = -1
        self.pid = 0
        """0 until known."""
        self._status: int | None = None
        self._announces = announces
        self._lines: BufferedReader | None = None
        """Its standard output. Set before ``_begun``."""
        self._out = -1
        """The other end of that."""
        self._server: ForkServerClient | None = None
        try:
            self._open()
            if not prefix:
                file = _STDERR if errors is None else errors
                self._server = ForkServerClient.reach(config, module, self._out, file, self._env, stays)
            if self._server is None:
                self._start()
        except BaseException:
            self._shut()
            raise

    def begin(self) -> None:
        """Wait until it has started; one that has been closed before does not start."""
        with self._beginning:
            if self._begun:
                return
            # An interrupt may end this; then the request is withdrawn by the next call, after the end was asked for.
            if self._server is not None:
                self._await_fork(self._server)
            os.close(self._out)
            self._out = -1
            self._begun = True

    def first_line(self, patience: float | None = None) -> bytes | None:
        """Start it, and return the first line that it prints; empty if it has ended before, None if it is not in time.

        Args:
            patience: seconds to wait for the line; without end if None.
        """
        self.begin()
        line = b""
        if self._lines is not None:
            poller = select.poll()
            poller.register(self._lines, select.POLLIN)
            if not poller.poll(None if patience is None else max(0.0, patience) * 1000):
                return None
            line = self._lines.readline()
        if self._server is not None:
            self._server.forget_claim()
        return line

    def fileno(self) -> int:
        """Return the descriptor of what it prints, for polls; it must announce itself and have begun."""
        assert self._lines is not None
        return self._lines.fileno()

    def abandon(self) -> None:
        """Kill it though it has not begun to serve, with the process that was to begin in its place."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            # One that stays is a child of it, in the same group.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; return whether it has ended in time. One that was never started has ended."""
        self.begin()
        with self._lock:
            if self._pidfd < 0:
                return True
            # Another thread may see the end first.
            pidfd = os.dup(self._pidfd)
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not poller.poll(None if timeout is None else max(0.0, timeout) * 1000):
                return False
        finally:
            os.close(pidfd)
        with self._lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
                self._status = self._reap()
        return True

    @property
    def status(self) -> int | None:
        """Its status as ``waitpid`` returns it, once ``wait`` has returned True; None if unknown."""
        with self._lock:
            return self._status

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal, once ``wait`` has returned True; None if unknown."""
        status = self.status
        return None if status is None else os.waitstatus_to_exitcode(status)

    def signal(self, number: int) -> None:
        """Send it a signal; one that has not begun never will."""
        self._closing.set()
        self.begin()
        with self._lock, suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self, timeout: float) -> None:
        """Wait for the end that was asked of it; kill it if it does not come."""
        self._closing.set()
        if not self.wait(timeout):
            self.signal(signal.SIGTERM)
            if not self.wait(_PATIENCE):
                self.signal(signal.SIGKILL)
                self.wait(_PATIENCE)
        self.release()

    def release(self) -> None:
        """Release the fork server, and what it prints. May be repeated.

        Until then the server cleans up after this session, even if all else was killed. Later, it ends the agent,
        unless that stays.
        """
        self._closing.set()
        self.begin()
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._shut()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1

    def part(self) -> None:
        """Release one that stays."""
        self.release()
        if self._process is not None:
            # The agent continues in a child of it.
            self._process.wait()

    def _await_fork(self, server: ForkServerClient) -> None:
        # The server may be stuck or dead although it has forked the agent already.
        pid = server.answer(self._closing) or server.take_back()
        if pid is None:
            # No other process will start one.
            if not self._closing.is_set():
                # A stuck server has the other end of this pipe, and would hide the end of the agent.
                self._shut()
                self._open()
                with suppress(SpawnError):
                    # It has ended already, which its status tells.
                    self._start()
        elif pid:
            self._adopt(pid)

    def _open(self) -> None:
        if self._announces:
            reader, self._out = os.pipe2(os.O_CLOEXEC)
            self._lines = os.fdopen(reader, "rb")
        else:
            self._out = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def _shut(self) -> None:
        if self._lines is not None:
            self._lines.close()
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def _start(self) -> None:
        """Start it as a process of its own."""
        process = start_process(
            [*self._prefix, sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, **self._env},
        )
        self._process = process
        self._adopt(process.pid)
        hand_over(process, msgspec.msgpack.encode(self._config))

    def _adopt(self, pid: int) -> None:
        with self._lock, suppress(ProcessLookupError):
            self.pid = pid
            self._pidfd = os.pidfd_open(pid)

    def _reap(self) -> int | None:
        if self._process is not None:
            code = self._process.wait()
            return -code if code < 0 else code << 8
        return self._server.status() if self._server is not None else None
