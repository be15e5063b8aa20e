"""The fork server: shared by the sessions of one user and environment, it imports torch once for all of them.

Run as ``python -m monarch._procs.zygote.fork_server FD FOLDER`` by the first session that needs it, with a listening
socket, and a Setting on its standard input. It imports nothing large itself: its zygote does, and forks host agents,
each for one connection. A connection stands for a session; when none is left the server ends.

Agents are children of the server, and do not end with it. The descendants of a killed agent come to the server, which
is its subreaper; it ends them, and removes the folder of a session whose controller is dead too, even if there was no
agent yet. An agent whose connection ends is ended soon, unless it was requested to stay.
"""

from __future__ import annotations

import glob
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from monarch._procs.agent import launched
from monarch._procs.agent.request import (
    READY,
    AgentHasEnded,
    AgentLaunched,
    LaunchAgent,
    LaunchRefused,
    Report,
    Setting,
)
from monarch._procs.agent.zygotes import Forked, ForkFailed, Succeeded, Zygote, ZygoteGone, ZygoteReady
from monarch._procs.os import posix
from monarch._procs.os.orphans import TRACKER_GRACE, children, end_orphans, is_tracker, unmark
from monarch._procs.session_folder import claim, is_alive, is_deserted, remove_folder, sweep
from monarch._procs.zygote.environment import environment
from monarch._procs.zygote.fork import RankSpec

_PACKET = 1 << 16
_END = 3.0
"""Seconds in which an agent that lost its controller ends."""
_TICK = 0.02
_REAP = 0.5
"""Seconds for killed children to end."""
_EXIT = 5.0
"""Seconds in which a killed process ends after the system has closed its files."""


@dataclass
class _Session:
    """One connection, and its purpose."""

    connection: socket.socket
    controller: int
    """A pidfd of the process at the other end."""
    folder: str = ""
    files: tuple[str, ...] = ()
    """Its files in the server's folder: a request that nobody has claimed, and the start of names of claims."""
    stays: bool = False
    """Whether the agent continues when the connection ends."""
    agent: int = 0
    """Pid; 0 before its start and after its end."""
    token: int = 0
    """The fork under way."""
    connected: bool = True
    deadline: float = 0.0
    """When to kill the agent after the end of the connection."""

    def controller_died(self) -> bool:
        poller = select.poll()
        poller.register(self.controller, select.POLLIN)
        return bool(poller.poll(0))

    def tell(self, report: Report) -> None:
        with suppress(OSError):
            self.connection.send(msgspec.msgpack.encode(report))


class ForkServer:
    """The fork server.

    Args:
        listening: accepts sessions.
        folder: the server's; its socket is there.
        setting: what to import.
    """

    def __init__(self, listening: socket.socket, folder: str, setting: Setting) -> None:
        self._listening: socket.socket | None = listening
        self._folder = folder
        self._sessions: list[_Session] = []
        self._token = 0
        self._unfit = ""
        self._early: dict[int, int] = {}
        """Statuses of children that ended before the zygote reported which session they are for."""
        self._staying: set[int] = set()
        """Pids of agents that continue without a session."""
        self._dead: list[int] = []
        """Pids of dead agents that have made their folders themselves."""
        self._untidy = 0.0
        """Deadline for cleanup processes of a dead agent."""
        environ, restore = environment({})
        self._zygote: Zygote | None = Zygote.forked(
            preload=[*setting.preload, launched.__name__],
            session_dir=folder,
            controller=(0, 0),
            later=setting.later,
            title="monarch-image",
            environ=environ,
            restore=restore,
        )
        self._zygotes = {self._zygote.pid}

    def run(self) -> None:
        """Serve until no session is left."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # The session that started it connected before it sent its Setting.
        self._accept()
        while self._sessions or self._last_call():
            poller = select.poll()
            for fd in (reader, *self._watched()):
                poller.register(fd, select.POLLIN)
            if self._zygote is not None and self._zygote.wants_write():
                poller.register(self._zygote.fileno(), select.POLLIN | select.POLLOUT)
            timeout = self._next_timeout()
            ready = {fd for fd, _ in poller.poll(None if timeout is None else timeout * 1000)}
            if reader in ready:
                with suppress(BlockingIOError):
                    os.read(reader, 4096)
            # Before the zygote's reports of pids: each is known when its end is.
            self._hear_zygote()
            self._reap()
            if self._listening is not None and self._listening.fileno() in ready:
                self._accept()
            for session in list(self._sessions):
                if session.connection.fileno() in ready:
                    self._hear(session)
                elif session.connected and session.controller in ready:
                    self._part(session)
            self._tidy()

    def close(self) -> None:
        """End the zygote, and remove the folder."""
        if self._zygote is not None:
            self._zygote.close()
        self._reap_last()
        _sweep_beside(self._folder)
        remove_folder(self._folder)

    def _watched(self) -> list[int]:
        fds = [self._listening.fileno()] if self._listening is not None else []
        fds += [self._zygote.fileno()] if self._zygote is not None else []
        for session in self._sessions:
            if session.connected:
                fds += [session.connection.fileno(), session.controller]
        return fds

    def _next_timeout(self) -> float | None:
        if self._untidy or any(not session.connected for session in self._sessions):
            return _TICK
        return None

    def _last_call(self) -> bool:
        """Stop listening; return whether a session has just connected."""
        if self._listening is not None:
            with suppress(OSError):
                os.unlink(self._listening.getsockname())
            self._accept()
            self._listening.close()
            self._listening = None
        return bool(self._sessions)

    # Sessions

    def _accept(self) -> None:
        assert self._listening is not None
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                # Nobody more, or too many files: the waiting session starts an agent itself.
                return
            try:
                pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if uid != os.geteuid():
                    raise PermissionError
            except OSError:
                connection.close()
                continue
            try:
                controller = os.pidfd_open(pid)
            except OSError:
                # It is dead, and readable as this is; its request shows what it has left.
                controller = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            connection.setblocking(False)
            self._sessions.append(_Session(connection, controller))

    def _hear(self, session: _Session) -> None:
        try:
            text, fds, _, _ = socket.recv_fds(session.connection, _PACKET, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            text, fds = b"", []
        if not text:
            self._part(session)
            return
        try:
            self._launch(session, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _launch(self, session: _Session, fds: list[int]) -> None:
        if len(fds) != 3 or session.token or session.agent:
            session.tell(LaunchRefused("the request is incomplete"))
            return
        request, out, errors = fds
        config = os.pread(request, os.fstat(request).st_size, 0)
        wanted = msgspec.msgpack.decode(config, type=LaunchAgent)
        session.folder, session.stays = wanted.folder, wanted.stays
        session.files = () if wanted.folder else (wanted.ticket, wanted.claim)
        if self._unfit or self._zygote is None:
            session.tell(LaunchRefused(self._unfit))
        elif not session.controller_died():
            self._token += 1
            session.token = self._token
            spec = RankSpec({}, wanted.cores, None, config, "monarch-agent", [], wanted.cwd, leads=True)
            self._zygote.fork(self._token, launched.ENTRY, [spec], [(out, errors)])

    def _part(self, session: _Session) -> None:
        """Its controller has ended, or does not want its agent any more."""
        session.connected = False
        session.connection.close()
        session.deadline = time.monotonic() + _END

    def _finish(self, session: _Session, now: float) -> None:
        if session.folder and os.path.isdir(session.folder):
            if not session.controller_died() and now < session.deadline:
                # It removes the folder itself, or is about to die: its files are closed a moment before that.
                return
            if session.controller_died() or is_deserted(session.folder):
                remove_folder(session.folder)
        if session.controller_died():
            # Its own folder has no agent if those that it requested are extra hosts, or if it died before their start.
            _sweep_beside(self._folder)
        for start in session.files:
            for path in glob.glob(f"{glob.escape(start)}*"):
                with suppress(OSError):
                    os.unlink(path)
        os.close(session.controller)
        self._sessions.remove(session)

    # Processes

    def _hear_zygote(self) -> None:
        if self._zygote is None:
            return
        for event in self._zygote.receive():
            if isinstance(event, ZygoteReady):
                if not event.fit:
                    self._give_up("\n".join(event.problems))
                with suppress(OSError):
                    open(os.path.join(self._folder, READY), "x").close()
            elif isinstance(event, Succeeded):
                self._zygotes.add(event.pid)
            elif isinstance(event, ZygoteGone):
                self._give_up(event.reason)
                self._zygote.close()
                self._zygote = None
                return
            else:
                self._answer(event)

    def _answer(self, event: Forked | ForkFailed) -> None:
        session = next((each for each in self._sessions if each.token == event.token), None)
        if session is None:
            self._untidy = time.monotonic()
            return
        session.token = 0
        if isinstance(event, Forked):
            (session.agent,) = event.pids
            session.tell(AgentLaunched(session.agent))
            if session.agent in self._early:
                self._ended(session, self._early.pop(session.agent))
        else:
            session.tell(LaunchRefused(event.reason))

    def _give_up(self, reason: str) -> None:
        """Running sessions continue; others must find another server."""
        self._unfit = reason or "the fork server has failed without a reason"
        self._last_call()
        for session in self._sessions:
            if not session.agent:
                session.tell(LaunchRefused(self._unfit))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._zygote is not None and pid == self._zygote.pid:
                self._zygote.note_exit(os.waitstatus_to_exitcode(status))
            if pid in self._staying:
                self._staying.remove(pid)
                # Its zygote removes its folder, but may be killed below before it is done.
                self._dead.append(pid)
                self._untidy = time.monotonic()
                continue
            session = next((each for each in self._sessions if each.agent == pid), None)
            if session is not None:
                self._ended(session, status)
            elif any(each.token for each in self._sessions):
                self._early[pid] = status

    def _ended(self, session: _Session, status: int) -> None:
        if not session.folder and not session.stays:
            self._dead.append(session.agent)
        session.agent = 0
        session.tell(AgentHasEnded(status))
        self._untidy = time.monotonic()

    def _reap_last(self) -> None:
        """Reap what ended with the zygote, like its successor: init of a container may be slow, or never reap."""
        deadline = time.monotonic() + _REAP
        for pid in children(os.getpid()):
            start = posix.proc_start_time(pid)
            if pid in self._staying or (
                start is not None and posix.outlives(pid, start, max(0.0, deadline - time.monotonic()))
            ):
                continue
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _tidy(self) -> None:
        """End leftovers of agents, and abandoned agents."""
        now = time.monotonic()
        if not any(session.connected or session.agent for session in self._sessions):
            for session in self._sessions:
                # The zygote may still be importing, and ends with the server: nobody waits for its future forks.
                if session.token:
                    session.token, self._untidy = 0, now
        for session in [each for each in self._sessions if not each.connected]:
            if session.agent and session.stays:
                self._staying.add(session.agent)
                session.agent = 0
            if session.agent and now > session.deadline:
                with suppress(ProcessLookupError):
                    os.kill(session.agent, signal.SIGKILL)
            elif not session.agent and not session.token and not self._left():
                self._finish(session, now)
        if self._untidy:
            left = self._left()
            for pid in left:
                if now > self._untidy + TRACKER_GRACE or not is_tracker(pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if not left and not any(session.token for session in self._sessions):
                self._untidy = 0.0
                end_orphans()
                self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove what dead agents have left, which may have been killed with all that knew of their folders.

        A folder with the record of a detached mesh stays, for whoever asks for the mesh.
        """
        for pid in self._dead:
            for path in Path(self._folder).parent.glob(f"s*-{pid}-*"):
                if not is_alive(pid, int(path.name.rpartition("-")[2])) and not any(path.glob("detached-*")):
                    remove_folder(str(path))
        self._dead.clear()

    def _left(self) -> list[int]:
        """Return children that came from dead agents."""
        if any(session.token for session in self._sessions):
            # One of them may be an agent that is not known yet.
            return []
        known = {session.agent for session in self._sessions} | self._staying | self._zygotes
        if self._zygote is not None:
            known.add(self._zygote.pid)
        return [pid for pid in children(os.getpid()) if pid not in known]


def _sweep_beside(folder: str) -> None:
    """Remove the folders of dead sessions that lie beside a folder."""
    with suppress(OSError):
        sweep(Path(folder).parent)


def main(fd: int, folder: str) -> None:
    """Entry point of the process."""
    try:
        setting = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Setting)
    except msgspec.DecodeError:
        # The session that starts it was killed. Nobody else may know of its folders.
        _, pid, start = folder.rsplit("-", 2)
        if not posix.outlives(int(pid), int(start), _EXIT):
            _sweep_beside(folder)
            remove_folder(folder)
        return
    # It continues as an orphan, so that no session has to reap it.
    if os.fork():
        os._exit(0)
    os.chdir("/")
    unmark()
    posix.set_comm("monarch-server")
    claim(folder)
    listening = socket.socket(fileno=fd)
    listening.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = ForkServer(listening, folder, setting)
    try:
        server.run()
    finally:
        server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
