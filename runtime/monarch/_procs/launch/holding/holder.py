"""The process that holds the hosts of a detached mesh: it asks a launcher for them, and outlives its program.

It runs as ``python -m monarch._procs.launch.holding.holder``. Its folder has the record of the mesh, and a socket for
programs of its user. The hosts end with it: when the lease ends, when a program says so, at SIGTERM, and when it is
killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from monarch._procs.agent.detached_records import Record, RecordedHost, publish, write
from monarch._procs.agent.leased import boot_time
from monarch._procs.launch.holding import messages as h
from monarch._procs.launch.interface import Failed, HostRequest, Joined, Launch
from monarch._procs.launch.registry import make_launcher
from monarch._procs.os.orphans import unmark
from monarch._procs.os.posix import proc_start_time, set_comm
from monarch._procs.session_folder import host_of, make_folder, remove_folder, sweep
from monarch._wire.tcp import unreachable
from monarch.exceptions import DetachedMeshInUseError, MonarchError

_LOOK = 30.0
"""Seconds between looks at the clock, which runs while the machine sleeps, unlike a poll."""
_CLAIM_S = 10.0
"""Seconds in which the program that started it must connect."""
_TIDY_S = (0.5, 5.0)
"""Seconds after the end of a program's connection in which it has ended, if it was killed."""
_NEWS = 50
"""The most news in one answer."""
_decoder = msgspec.msgpack.Decoder(tuple[int, h.Request])


class _User:
    """A connected program."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = h.peer_pid(connection)
        # A fork of the program may have the connection open, too.
        self.pidfd = os.pidfd_open(self.pid)

    def close(self) -> None:
        os.close(self.pidfd)
        self.connection.close()


class Holder:
    """The state of the process.

    Args:
        order: the order of the program.
        folder: the folder of this process.
    """

    def __init__(self, order: h.HoldOrder, folder: str) -> None:
        pid = os.getpid()
        assert order.agent.keys is not None
        self._order = order
        self._folder = folder
        self.path = f"{folder}/holder"
        start = proc_start_time(pid) or 0
        self.record = Record(
            order.name, [], *order.agent.keys, pid, start, time.time(), order.seconds, order.pid, holder=self.path
        )
        self.over = False
        self._selector = selectors.DefaultSelector()
        self._users: list[_User] = []
        self._joined: dict[int, Joined] = {}
        self._news: list[list[Any]] = []
        """Packed news that nobody has asked for."""
        self._stays = False
        self._ends = boot_time() + _CLAIM_S
        self._tidies: list[float] = []
        """When to remove the leftovers of killed programs, in monotonic seconds."""
        self._next_look = 0.0
        """When to look again whether the hosts are there, in monotonic seconds."""
        self._launch: Launch | None = None

    def begin(self) -> None:
        """Publish the record and ask for the hosts.

        Raises:
            MonarchError: a mesh of this name exists, or the launcher refuses.
        """
        order = self._order
        publish(self._folder, self.record)
        self._listener = h.listen(self.path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        self._selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))
        launcher = make_launcher(order.where, order.count, order.options)
        self._launch = launcher.ask(HostRequest(order.count, order.agent, order.name))
        # That may have taken its time, as a cluster that is started does.
        self._ends = boot_time() + _CLAIM_S

    def _on_term(self, *_: object) -> None:
        self.over = True

    def run(self) -> None:
        """Serve programs until the end of the lease, or of the hosts."""
        while not self.over:
            left = self._ends - boot_time()
            if left <= 0:
                break
            for key, _ in self._selector.select(min(left, _LOOK, self._until_tidy())):
                key.data()
            self._look_at_hosts()

    def _look_at_hosts(self) -> None:
        """End if all agents have ended while no program is attached, as at the end of an allocation."""
        now = time.monotonic()
        if self._users or not self._stays or now < self._next_look:
            return
        self._next_look = now + _LOOK
        # The addresses of forwarded hosts are not for this machine.
        if self._launch is None or self._launch.forwarded:
            return
        # A SIGTERM meanwhile also sets it.
        addresses = [host.address for host in self.record.hosts]
        reasons = unreachable(addresses)
        # One that does not answer may be back.
        if all(address in reasons and reasons[address].refused for address in addresses):
            self.over = True

    def close(self) -> None:
        """End the hosts; those that wait for it see the end of this process."""
        if self._launch is not None:
            self._launch.end()
        with suppress(OSError):
            sweep(Path(self._folder).parent)
        remove_folder(self._folder)

    def _until_tidy(self) -> float:
        """Remove the leftovers of killed programs when it is time; return the seconds until then."""
        now = time.monotonic()
        if self._tidies and self._tidies[0] <= now:
            self._tidies = [at for at in self._tidies if at > now]
            self._next_look = now
            with suppress(OSError):
                # No host needs to be on this machine, so nobody else may see them.
                sweep(Path(self._folder).parent)
        return self._tidies[0] - now if self._tidies else _LOOK

    # Programs

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(True)
            try:
                user = _User(connection)
            except OSError:
                connection.close()
                return
            if not self._stays and user.pid != self._order.pid:
                self._refuse(user)
                return
            self._users.append(user)
            self._ends = float("inf")
            self._selector.register(user.connection, selectors.EVENT_READ, lambda: self._serve(user))
            self._selector.register(user.pidfd, selectors.EVENT_READ, lambda: self._part(user))
            self._note_user()
            launch, order = self._launch, self._order
            assert launch is not None
            joined = h.pack_news(list(self._joined.values()))
            held = h.Held(launch.expected, launch.forwarded, joined, order.where, order.count, order.options)
            self._send(user, 0, held)

    def _refuse(self, user: _User) -> None:
        error = DetachedMeshInUseError(
            f"detached mesh {self._order.name!r} is being started by process {self._order.pid}; attach it once that "
            f"process has ended"
        )
        self._send(user, 0, h.problem_of(error))
        user.close()

    def _dismiss(self, user: _User, error: MonarchError) -> None:
        """Part from a program, and tell it why."""
        with suppress(OSError):
            # One that is stopped may have no room for it.
            user.connection.send(msgspec.msgpack.encode((h.LAST, h.problem_of(error))), socket.MSG_DONTWAIT)
        self._part(user)

    def _part(self, user: _User) -> None:
        if user not in self._users:
            return
        self._users.remove(user)
        self._tidies = sorted([*self._tidies, *(time.monotonic() + seconds for seconds in _TIDY_S)])
        self._selector.unregister(user.connection)
        self._selector.unregister(user.pidfd)
        user.close()
        if self._users:
            self._note_user()
        elif self._stays:
            self._ends = boot_time() + self.record.seconds
            self._note_user()
        else:
            # It has not got to using them.
            self.over = True

    def _note_user(self) -> None:
        self.record.user = self._users[-1].pid if self._users else 0
        self.record.until = 0.0 if self._users else time.time() + self.record.seconds
        self._write()

    def _write(self) -> str:
        """Write the record; return why that failed, empty if it did not. The old one still has the key then."""
        try:
            write(self._folder, self.record)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _send(self, user: _User, number: int, reply: h.Reply) -> None:
        try:
            user.connection.send(msgspec.msgpack.encode((number, reply)))
        except OSError:
            self._part(user)

    def _serve(self, user: _User) -> None:
        if user not in self._users:
            return
        try:
            packet = user.connection.recv(h.PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._part(user)
            return
        try:
            number, request = _decoder.decode(packet)
        except msgspec.DecodeError as error:
            # A program of another version must not end the ranks.
            pid = os.getpid()
            problem = MonarchError(
                f"process {pid}, which holds the hosts, runs another monarch version ({error}); attach the mesh with "
                f"that version, or end it: 'kill {pid}' ends it with its hosts"
            )
            self._dismiss(user, problem)
            return
        self._send(user, number, self._answer(user, request))

    def _answer(self, user: _User, request: h.Request) -> h.Reply:
        try:
            return h.Answer(self._do(user, request))
        except MonarchError as error:
            return h.problem_of(error)
        except Exception as error:
            # A bug of a launcher must not end the ranks.
            return h.Problem(MonarchError.__name__, f"{type(error).__name__}: {error}")

    def _do(self, user: _User, request: h.Request) -> Any:
        launch = self._launch
        assert launch is not None
        if isinstance(request, h.Watch):
            return self._watch(launch, request.timeout)
        if isinstance(request, h.Connect):
            route = launch.connect(self._joined[request.index], request.here)
            return [route.address, dict(route.here)]
        if isinstance(request, h.Stay):
            self._stay(launch, user)
            return None
        if isinstance(request, h.Left):
            return launch.left()
        self.over = True
        return None

    def _stay(self, launch: Launch, user: _User) -> None:
        if not self._stays:
            launch.settle()
            self._stays = True
            # Where the launcher has read its files; nothing may keep the file system busy.
            os.chdir("/")
        # The agents have one controller: the others have lost their connections to them, such as a stopped program.
        error = DetachedMeshInUseError(
            f"detached mesh {self._order.name!r} is in use by process {user.pid}; attach it once that process has "
            f"ended or lost its connection"
        )
        for other in [each for each in self._users if each is not user]:
            self._dismiss(other, error)

    def _watch(self, launch: Launch, timeout: float) -> list[list[Any]]:
        if not self._news:
            news = [*launch.watch(timeout)]
            for at, each in enumerate(news):
                if isinstance(each, Joined):
                    host = RecordedHost(host_of(each.listening.src), each.host, each.listening.owner_address)
                    # Ranks follow the order of the hosts, not that in which they come.
                    self.record.hosts.insert(sum(index < each.index for index in self._joined), host)
                    self._joined[each.index] = each
                    problem = self._write()
                    if problem:
                        # Nobody could attach this host later.
                        news[at] = Failed(each.host, f"its record cannot be written to {self._folder}: {problem}")
            self._news = h.pack_news(news)
        first, self._news = self._news[:_NEWS], self._news[_NEWS:]
        return first


def main() -> None:
    """Entry point: it continues in an orphaned child, so that nobody has to reap it."""
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=h.HoldOrder)
    if os.fork():
        os._exit(0)
    unmark()
    set_comm("monarch-holder")
    folder = make_folder()
    holder = Holder(order, folder)
    try:
        try:
            holder.begin()
        except MonarchError as error:
            _say(h.problem_of(error))
            return
        _say(h.Answer(holder.path))
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        os.close(null)
        holder.run()
    finally:
        holder.close()


def _say(reply: h.Reply) -> None:
    # The program may have ended.
    with suppress(OSError):
        os.write(1, msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
