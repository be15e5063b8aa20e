"""The local launcher: starts the agent of the program's own host, as a fork of the fork server or as a process."""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec

from monarch._procs.agent.request import READY, AgentConfig, Ended, Launched, Refused, Report, Setting, launch
from monarch._procs.os import posix
from monarch._procs.zygote.environment import environment
from monarch._procs.zygote.identity import session_key
from monarch.exceptions import SpawnError

VARIABLE = "MONARCH_SHARED_ZYGOTE"
"""Environment variable; with 0, each session starts its own processes."""
_BACKLOG = 1024
_LOCK = 1.0
"""Seconds to wait for another session that starts a fork server."""
_IMPORT = 60.0
"""Seconds that a fork server may take for its imports."""
_ANSWER = 5.0
"""Seconds that it may take to answer after that."""
_TICK = 0.05
_PACKET = 1 << 16


class HostAgent:
    """The host agent of this program.

    ``attend`` runs in its own thread and owns the fields below until ``_ended`` is set; ``_pidfd`` is only set once,
    under ``_lock``.

    Args:
        config: its configuration.
        errors: the file for its stderr.
    """

    def __init__(self, config: AgentConfig, errors: int) -> None:
        self._config = config
        self._errors = errors
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self.pid = 0
        """0 until known. Set under ``_lock``."""
        self.status: int | None = None
        """As ``waitpid`` returns it, once it has ended; None if unknown."""
        self._server = _Server.reach(config, errors)
        if self._server is None:
            self._start()

    def attend(self) -> None:
        """Start an agent, and wait for its end."""
        try:
            if self._server is not None:
                self._await_launch(self._server)
            if self._pidfd >= 0:
                self._await_end()
        finally:
            if self._process is not None:
                code = self._process.wait()
                self.status = -code if code < 0 else code << 8
            self._ended.set()

    def close(self, timeout: float) -> None:
        """Wait for the end that was asked of it; kill it if it does not come."""
        self._closing.set()
        if not self._ended.wait(timeout):
            self._signal(signal.SIGTERM)
            if not self._ended.wait(2):
                self._signal(signal.SIGKILL)
                self._ended.wait(2)
        self.release()

    def release(self) -> None:
        """Release the fork server. Until then it cleans up after this session, even if all else was killed."""
        if self._server is not None:
            self._server.close()

    def _signal(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def _start(self) -> None:
        """Start it as a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "monarch._procs.agent.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        self._process = process
        self._adopt(process.pid)
        hand_over(process, msgspec.msgpack.encode(self._config))

    def _adopt(self, pid: int) -> None:
        with self._lock, suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)
            self.pid = pid

    def _await_launch(self, server: _Server) -> None:
        pid = server.answer(self._closing)
        if not pid and server.take_back():
            # No other process will start one.
            if not self._closing.is_set():
                self._start()
            return
        # The server may be stuck or dead although it has forked the agent already.
        pid = pid or _claimed_by(self._config.folder)
        if pid:
            self._adopt(pid)

    def _await_end(self) -> None:
        server = self._server
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if server is not None and self._process is None:
            poller.register(server.connection, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll()]
            if server is not None and server.connection.fileno() in ready:
                report = server.receive()
                if isinstance(report, Ended):
                    self.status = report.status
                if report is None:
                    poller.unregister(server.connection)
            if self._pidfd in ready:
                break
        if server is not None and self._process is None and self.status is None:
            report = server.receive(wait=1.0)
            self.status = report.status if isinstance(report, Ended) else None
        with self._lock:
            os.close(self._pidfd)
            self._pidfd = -1


class _Server:
    """A connection to a fork server that was asked for an agent."""

    def __init__(self, connection: socket.socket, folder: str, ticket: str, starter: subprocess.Popen[bytes] | None):
        self.connection = connection
        self._folder = folder
        self._ticket = ticket
        self._starter = starter

    @classmethod
    def reach(cls, config: AgentConfig, errors: int) -> _Server | None:
        """Return a connection to a fork server that was asked for an agent, starting one if needed; None if that
        fails."""
        if os.environ.get(VARIABLE) == "0":
            return None
        connection = starter = None
        ticket = f"{config.folder}/ticket-{secrets.token_hex(4)}"
        try:
            base = os.path.dirname(config.folder)
            key = session_key(config.preload, config.later)
            server = _connect(base, key)
            if server is None:
                server, starter = _start_server(base, key, config)
            connection, folder = server
            os.close(os.open(ticket, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            _send(connection, msgspec.msgpack.encode(launch(config, ticket)), errors)
        except (OSError, ValueError):
            # Whatever it is, an own agent is always possible, or reports the problem.
            if connection is not None:
                connection.close()
            with suppress(OSError):
                os.unlink(ticket)
            if starter is not None:
                starter.wait()
            return None
        return cls(connection, folder, ticket, starter)

    def answer(self, closing: threading.Event) -> int:
        """Return the pid of the agent; 0 if there will be none, or none in time."""
        latest = time.monotonic() + _IMPORT
        while not closing.is_set() and time.monotonic() < latest:
            report = self.receive(wait=_TICK)
            self._reap()
            if isinstance(report, Launched):
                return report.pid
            if report is None or isinstance(report, Refused) or self._is_stopped():
                break
            if os.path.exists(f"{self._folder}/{READY}"):
                latest = min(latest, time.monotonic() + _ANSWER)
        return 0

    def receive(self, wait: float = 0.0) -> Report | bool | None:
        """Return the server's message; False if none in time, None if it has ended."""
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        if not poller.poll(wait * 1000):
            return False
        try:
            packet = self.connection.recv(_PACKET)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        return _decoder.decode(packet) if packet else None

    def take_back(self) -> bool:
        """Return whether no agent will come from there; otherwise one exists by now."""
        try:
            os.unlink(self._ticket)
        except FileNotFoundError:
            return False
        return True

    def _is_stopped(self) -> bool:
        pid = _claimed_by(self._folder)
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        return False

    def _reap(self) -> None:
        # It ends as soon as its child, the server, is orphaned.
        if self._starter is not None and self._starter.poll() is not None:
            self._starter = None

    def close(self) -> None:
        self._reap()
        with suppress(OSError):
            # A fork of this process may have it open too.
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


_decoder = msgspec.msgpack.Decoder(Report)


def hand_over(process: subprocess.Popen[bytes], config: bytes) -> None:
    """Send a process its configuration on standard input: keys must not appear in a process list.

    Raises:
        SpawnError: it has ended.
    """
    assert process.stdin is not None
    try:
        process.stdin.write(config)
        process.stdin.close()
    except BrokenPipeError as error:
        raise SpawnError("the host agent ended during startup") from error


def _connect(base: str, key: str) -> tuple[socket.socket, str] | None:
    """Return a connection to a running fork server, and its folder."""
    for folder in sorted(glob.glob(f"{glob.escape(base)}/f{key}*")):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(f"{folder}/socket")
        except OSError:
            connection.close()
            continue
        return connection, folder
    return None


def _start_server(
    base: str, key: str, config: AgentConfig
) -> tuple[tuple[socket.socket, str], subprocess.Popen[bytes] | None]:
    """Return a connection to a new fork server, or to one that another session has just started.

    Raises:
        OSError: it cannot be started.
    """
    lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _take(lock)
        server = _connect(base, key)
        if server is not None:
            return server, None
        own = os.getpid()
        folder = f"{base}/f{key}{secrets.token_hex(2)}-{own}-{posix.proc_start_time(own)}"
        os.mkdir(folder, 0o700)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            # It listens before there is a server, so that nobody has to retry.
            listening.bind(f"{folder}/socket")
            listening.listen(_BACKLOG)
            starter = subprocess.Popen(
                [sys.executable, "-m", "monarch._procs.zygote.fork_server", str(listening.fileno()), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(listening.fileno(),),
                cwd="/",
                env=environment({})[0],
                start_new_session=True,
            )
        # Connect before it begins, which it does on its Setting: it ends when nobody is connected.
        server = _connect(base, key)
        with suppress(SpawnError):
            hand_over(starter, msgspec.msgpack.encode(Setting(config.preload, config.later)))
        if server is None:
            starter.wait()
            raise ConnectionError("the fork server ended during startup")
        return server, starter
    finally:
        os.close(lock)


def _take(lock: int) -> None:
    deadline = time.monotonic() + _LOCK
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _send(connection: socket.socket, request: bytes, errors: int) -> None:
    # In a file, since packets have a size limit.
    file, null = posix.memfd("monarch-launch"), os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        view = memoryview(request)
        while view:
            view = view[os.write(file, view) :]
        socket.send_fds(connection, [b"."], [file, null, errors])
    finally:
        os.close(file)
        os.close(null)


def _claimed_by(folder: str) -> int:
    """Return the pid of the live process that has claimed a folder, or 0."""
    for path in glob.glob(f"{glob.escape(folder)}/pid-*-*"):
        _, pid, start = os.path.basename(path).split("-")
        if posix.proc_start_time(int(pid)) == int(start):
            return int(pid)
    return 0
