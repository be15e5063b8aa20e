"""A process's connection to the fork server that it shares with the sessions of this user and environment."""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from monarch._procs.agent.request import (
    READY,
    AgentConfig,
    AgentHasEnded,
    AgentLaunched,
    LaunchRefused,
    Report,
    Setting,
    claims,
    launch,
)
from monarch._procs.os import posix
from monarch._procs.os.starting import start_process
from monarch._procs.session_folder import base_folder, remove_folder
from monarch._procs.zygote.environment import environment
from monarch._procs.zygote.identity import session_key, tells_apart
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
_CLAIM_MS = 2
"""Milliseconds between looks for the claim of an agent, which is the first thing that it does."""
_REAPED = 1.0
"""Seconds that it may take to report the status of an agent that has ended."""
_START = 2.0
"""Seconds that a process may take to start one."""
_TICK = 0.05
_PACKET = 1 << 16


class ForkServerClient:
    """A connection to a fork server that was asked for an agent.

    Args:
        connection: to the server.
        folder: the server's.
        ticket: see ``request.LaunchAgent``.
        claim: see ``request.LaunchAgent``.
        starter: the process that has started the server, if this process did.
    """

    def __init__(
        self, connection: socket.socket, folder: str, ticket: str, claim: str, starter: subprocess.Popen[bytes] | None
    ) -> None:
        self._connection = connection
        self._folder = folder
        self._ticket = ticket
        self._claim = claim
        self._starter = starter

    @classmethod
    def reach(
        cls, config: AgentConfig, module: str, out: int, errors: int, env: Mapping[str, str], stays: bool
    ) -> ForkServerClient | None:
        """Return a connection to a fork server that was asked for an agent, starting one if needed.

        Args:
            config: configuration of the agent.
            module: its module, see ``request.LaunchAgent``.
            out: descriptor for its stdout.
            errors: descriptor for its stderr.
            env: additional environment variables.
            stays: whether it outlives this process.

        Returns:
            None if that fails, or a fork of a server could not be the same as a process of its own.
        """
        if {**os.environ, **env}.get(VARIABLE) == "0" or any(map(tells_apart, env)):
            return None
        connection = starter = None
        ticket = ""
        try:
            base = os.path.dirname(config.folder) if config.folder else str(base_folder())
            key = session_key(config.preload, config.later)
            server = _connect(base, key)
            if server is None:
                server, starter = _start_server(base, key, config)
            connection, folder = server
            name = secrets.token_hex(4)
            ticket = f"{config.folder or folder}/ticket-{name}"
            claim = f"{config.folder}/pid-" if config.folder else f"{folder}/taken-{name}-"
            os.close(os.open(ticket, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            _send(connection, msgspec.msgpack.encode(launch(config, module, ticket, claim, env, stays)), out, errors)
        except (OSError, ValueError):
            # Whatever it is, an own agent is always possible, or reports the problem.
            if connection is not None:
                connection.close()
            with suppress(OSError):
                os.unlink(ticket)
            if starter is not None:
                starter.wait()
            return None
        return cls(connection, folder, ticket, claim, starter)

    def answer(self, closing: threading.Event) -> int:
        """Return the pid of the agent; 0 if there will be none, or none in time.

        Args:
            closing: no agent is wanted any more once it is set.
        """
        latest = time.monotonic() + _IMPORT
        while not closing.is_set() and time.monotonic() < latest:
            report = self._receive(wait=_TICK)
            self._reap()
            if isinstance(report, AgentLaunched):
                return report.pid if self._is_claimed(report.pid) else 0
            if report is None or isinstance(report, LaunchRefused) or self._is_stopped():
                break
            if os.path.exists(f"{self._folder}/{READY}"):
                latest = min(latest, time.monotonic() + _ANSWER)
        return 0

    def _is_claimed(self, pid: int) -> bool:
        """Wait until an agent has claimed the request; return False if it has died before, as with its server."""
        try:
            agent = os.pidfd_open(pid)
        except OSError:
            return not os.path.exists(self._ticket)
        try:
            poller = select.poll()
            poller.register(agent, select.POLLIN)
            latest = time.monotonic() + _ANSWER
            while os.path.exists(self._ticket) and time.monotonic() < latest:
                if poller.poll(_CLAIM_MS):
                    break
        finally:
            os.close(agent)
        return not os.path.exists(self._ticket)

    def _receive(self, wait: float) -> Report | bool | None:
        """Return the server's message; False if none in time, None if it has ended."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        if not poller.poll(wait * 1000):
            return False
        try:
            packet = self._connection.recv(_PACKET)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        return _decoder.decode(packet) if packet else None

    def take_back(self) -> int | None:
        """Withdraw the request.

        Returns:
            None if no agent will come from there. Otherwise one has claimed the request: its pid, or 0 if it is dead.
        """
        try:
            os.unlink(self._ticket)
            return None
        except FileNotFoundError:
            found = claims(self._claim)
        # Without a claim somebody has removed the folder, and the ticket cannot be claimed any more.
        return max(pid for _, pid in found) if found else None

    def status(self) -> int | None:
        """Return the status of an agent that has just ended, as ``waitpid`` returns it; None if unknown."""
        while True:
            report = self._receive(wait=_REAPED)
            if isinstance(report, AgentHasEnded):
                return report.status
            if not report:
                return None

    def forget_claim(self) -> None:
        """Remove the file of the claim, unless it marks an agent as a user of the session's folder."""
        if self._claim.endswith("/pid-"):
            return
        for path, _ in claims(self._claim):
            with suppress(OSError):
                os.unlink(path)

    def _is_stopped(self) -> bool:
        pid = max((pid for _, pid in claims(f"{self._folder}/pid-")), default=0)
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        return False

    def _reap(self) -> None:
        # It ends as soon as its child, the server, is orphaned.
        if self._starter is not None and self._starter.poll() is not None:
            self._starter = None

    def close(self) -> None:
        """Close the connection, once: the server ends the agent some seconds later, unless that stays."""
        if self._connection.fileno() < 0:
            return
        self._reap()
        self.forget_claim()
        while (report := self._receive(wait=0.0)) is not False:
            if report is None:
                # It has ended; if it was killed, it has left its folder.
                remove_folder(self._folder)
                break
        with suppress(OSError):
            # A fork of this process may have it open too.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._starter is not None:
            with suppress(subprocess.TimeoutExpired):
                self._starter.wait(_START)


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
        with suppress(subprocess.TimeoutExpired):
            process.wait(_START)
        code = "" if process.returncode is None else f" with code {process.returncode}"
        raise SpawnError(f"the host agent exited during startup{code}; see its output") from error


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
            starter = start_process(
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


def _send(connection: socket.socket, request: bytes, out: int, errors: int) -> None:
    # In a file, since packets have a size limit.
    file = posix.memfd("monarch-launch")
    try:
        view = memoryview(request)
        while view:
            view = view[os.write(file, view) :]
        socket.send_fds(connection, [b"."], [file, out, errors])
    finally:
        os.close(file)
