"""The host agent's side of a zygote: starts it, asks it for ranks, learns of its end. Nothing here waits."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from monarch._procs.os import posix
from monarch._procs.rank import output
from monarch._procs.zygote import fork as forks
from monarch._procs.zygote.environment import environment
from monarch._procs.zygote.fork import RankSpec
from monarch._procs.zygote.main import (
    FDS_A_PACKET,
    LAST,
    MORE,
    Forked,
    ForkFailed,
    ForkRequest,
    Setup,
    Succeeded,
    ZygoteReady,
)
from monarch._procs.zygote.main import main as serve

__all__ = ["ForkFailed", "Forked", "RankSpec", "Succeeded", "Zygote", "ZygoteGone", "ZygoteReady"]

_PACKET = 1 << 20
_STDERR_LINES = 20


class ZygoteGone(msgspec.Struct, frozen=True):
    """The zygote has died; its ranks live on. Every request was answered before this, if only by Failed."""

    reason: str


class Zygote:
    """A zygote process. It must be a child of a single-threaded agent, which this makes a child subreaper.

    Each ``fork`` is answered by one Forked or Failed. Ranks become children of the agent a moment after that answer,
    never before it: reap them by ``waitpid(-1)``, and call ``receive`` after it, so that every reaped pid is known. The
    agent also gets, and reaps, other orphans.

    Args:
        preload: names of modules to import; missing ones are skipped.
        env: changes to this process's environment, None removes a variable; its ranks inherit them.
        session_dir: the folder that the zygote removes if both agent and controller have died.
        controller: pid and start time of the controller; zeros if it is on another host.
        later: modules that ranks need soon: when idle, a successor that has imported them replaces the zygote, and
            ``receive`` returns Succeeded; its pid is ``pid`` from then on.
        python: the interpreter; by default this one.
    """

    def __init__(
        self,
        *,
        preload: list[str],
        env: Mapping[str, str | None] | None = None,
        session_dir: str,
        controller: tuple[int, int],
        later: list[str] | None = None,
        python: str | None = None,
    ) -> None:
        posix.set_child_subreaper()
        environ, restore = environment(env or {})
        setup = Setup(os.getpid(), controller, os.path.abspath(session_dir), preload, restore, later or [])
        theirs = self._begin(setup)
        try:
            with theirs:
                self._queue(msgspec.msgpack.encode(setup), [])
                self._process = subprocess.Popen(
                    [python or sys.executable, "-m", "monarch._procs.zygote.main", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    pass_fds=(theirs.fileno(),),
                    # Not the user's folder: nothing there may be taken for a module of the library.
                    cwd="/",
                    env=environ,
                    # Terminal interrupts are not meant for the zygote and its ranks.
                    start_new_session=True,
                )
        except BaseException:
            self._drop()
            raise
        self.pid = self._process.pid

    def _begin(self, setup: Setup) -> socket.socket:
        """Set up this side; return the other end of the socket."""
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: set[int] = set()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._decoder = msgspec.msgpack.Decoder(ZygoteReady | Succeeded | Forked | ForkFailed)
        self._gone = False
        self._reason = "the zygote was closed"
        self._exit_code: int | None = None
        self._stderr = posix.memfd("monarch-zygote")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        return theirs

    @classmethod
    def forked(
        cls,
        *,
        preload: list[str],
        session_dir: str,
        controller: tuple[int, int],
        later: list[str],
        title: str = "monarch-zygote",
        environ: Mapping[str, str] | None = None,
        restore: dict[str, str | None] | None = None,
    ) -> Zygote:
        """Return a zygote that is a fork of this process, which must be fit to fork: it has this one's imports.

        Args:
            preload: see above; imported where missing here.
            title: name in ``ps``.
            environ: its environment; by default that of this process.
            restore: variables set for the imports only, and their values after that.
        """
        posix.set_child_subreaper()
        zygote = cls.__new__(cls)
        theirs = zygote._begin(Setup(os.getpid(), controller, session_dir, preload, restore or {}, later, title))
        with theirs:
            zygote.pid = os.fork()
            if not zygote.pid:
                _become_zygote(theirs.detach(), zygote._stderr, environ)
            zygote._queue(msgspec.msgpack.encode(zygote._setup), [])
        return zygote

    def spare(self, token: int) -> Zygote:
        """Fork a spare of this zygote, to replace it if it dies; its ``pid`` is that of its Forked."""
        other = Zygote.__new__(Zygote)
        with other._begin(self._setup) as theirs:
            spec = RankSpec({}, None, None, msgspec.msgpack.encode(self._setup), "monarch-spare", [], "/")
            self.fork(token, "monarch._procs.zygote.main:stand_by", [spec], [(theirs.fileno(), other._stderr)])
        other.pid = 0
        return other

    @property
    def session_dir(self) -> str:
        """The folder of its session."""
        return self._setup.session_dir

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``receive`` has something."""
        return self._socket.fileno()

    def fork(self, token: int, entry: str, ranks: list[RankSpec], fds: list[tuple[int, int]]) -> None:
        """Ask for ranks that run ``entry``, each with its files for stdout and stderr.

        The caller may close ``fds`` when this returns. A zygote that is not ready answers when it is.

        Raises:
            ValueError: the numbers of ranks and of file pairs differ.
        """
        if len(ranks) != len(fds):
            raise ValueError(f"expected {len(ranks)} pairs of files, got {len(fds)}")
        self._pending.add(token)
        text = msgspec.msgpack.encode(ForkRequest(token, entry, ranks))
        self._queue(text, [fd for pair in fds for fd in pair])

    def receive(self) -> list[ZygoteReady | Succeeded | Forked | ForkFailed | ZygoteGone]:
        """Return the zygote's messages; empty if none. After Gone, only answers to later ``fork`` calls."""
        reports: list[ZygoteReady | Succeeded | Forked | ForkFailed | ZygoteGone] = []
        ended = False
        while not self._gone and not ended:
            try:
                packet = self._socket.recv(_PACKET)
            except BlockingIOError:
                break
            except ConnectionResetError:
                packet = b""
            ended = not packet
            if packet:
                report = self._decoder.decode(packet)
                if isinstance(report, ZygoteReady):
                    reports.append(report)
                elif isinstance(report, Succeeded):
                    # No wait for the previous process, which had ended when this was sent.
                    if self._process is not None:
                        self._process.returncode = 0
                    self.pid, self._exit_code = report.pid, None
                    reports.append(report)
                elif report.token in self._pending:
                    # The first answer counts: a killed fork helper may have answered before.
                    self._pending.discard(report.token)
                    reports.append(report)
        if ended:
            self._gone = True
            self._reason = self._describe_end()
            self._drop_unsent()
        if self._gone:
            reports += [ForkFailed(token, self._reason, [], lost=True) for token in sorted(self._pending)]
            self._pending.clear()
        if ended:
            reports.append(ZygoteGone(self._reason))
        # The zygote has read its messages, so there may be room for more.
        self.flush()
        return reports

    def wants_write(self) -> bool:
        """Return whether to call ``flush`` once ``fileno`` is writable."""
        return bool(self._unsent) and not self._gone

    def flush(self) -> None:
        """Send messages that waited for room."""
        while self._unsent and not self._gone:
            kind, fds = self._unsent[0]
            if not self._send(kind, fds):
                return
            self._unsent.popleft()
            _close_all(fds)

    def note_exit(self, code: int) -> None:
        """Report the exit code that an agent reaped (negative: the signal), for Gone."""
        self._exit_code = code
        if self._process is not None:
            # Popen would try to reap it again.
            self._process.returncode = code

    def close(self) -> None:
        """End it and reap it. Its ranks live on; open requests are never answered."""
        self._gone = True
        self._pending.clear()
        self._drop()
        if self._exit_code is not None or not self.pid:
            # It has ended; or it has just handed over, and its successor ends with the socket.
            return
        try:
            # Not Popen.kill: a pid that the agent has reaped may belong to another process by now.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.note_exit(os.waitstatus_to_exitcode(status))
        except ChildProcessError:
            self.note_exit(0)

    def _queue(self, text: bytes, fds: list[int]) -> None:
        """Send a request, or queue it until there is room: in a file, so that a packet is small, whole or not."""
        file = posix.memfd("monarch-request")
        try:
            _write_all(file, text)
            rest = [file, *fds]
            while rest:
                now, rest = rest[:FDS_A_PACKET], rest[FDS_A_PACKET:]
                kind = MORE if rest else LAST
                if self._unsent or not self._send(kind, now):
                    self._unsent.append((kind, [os.dup(fd) for fd in now]))
        finally:
            os.close(file)

    def _send(self, kind: bytes, fds: list[int]) -> bool:
        """Return whether it was sent; also True if the zygote is dead, which ``receive`` finds out."""
        if self._gone:
            return True
        try:
            socket.send_fds(self._socket, [kind], fds)
        except (BrokenPipeError, ConnectionResetError):
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            # Too many descriptors in flight, or no memory for them: both pass as the zygote takes some.
            if error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                return False
            raise
        return True

    def _describe_end(self) -> str:
        """Return how the zygote ended, and its last words. Leaves it to be reaped."""
        code = self._exit_code
        if code is None:
            try:
                # Its socket is closed, which only happens at its end: this does not block.
                result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                result = None
            if result is not None:
                code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        if code is None:
            how = "died"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"exited with code {code}"
        words = output.read_tail(self._stderr).data.decode("utf-8", "replace").splitlines()[-_STDERR_LINES:]
        return "\n".join([f"the zygote (pid {self.pid}) {how}", *words])

    def _drop_unsent(self) -> None:
        while self._unsent:
            _close_all(self._unsent.popleft()[1])

    def _drop(self) -> None:
        self._drop_unsent()
        self._socket.close()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1


def _become_zygote(agent: int, stderr: int, environ: Mapping[str, str] | None) -> NoReturn:
    """In a fork that becomes the agent: serve, with nothing left of the agent but its memory, and exit."""
    status = 1
    try:
        os.setsid()
        forks.default_signals()
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (stderr, 1), (stderr, 2)):
            os.dup2(source, target)
        os.closerange(3, agent)
        os.closerange(agent + 1, os.sysconf("SC_OPEN_MAX"))
        if environ is not None:
            os.environ.clear()
            os.environ.update(environ)
        status = serve(agent)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
