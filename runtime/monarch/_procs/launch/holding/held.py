"""A program's side of hosts that another process holds: a launch by proxy."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from monarch._procs.launch.fork_client import hand_over
from monarch._procs.launch.holding import messages as h
from monarch._procs.launch.interface import HostRoute, Joined, News
from monarch._procs.os.posix import memfd, outlives, proc_start_time
from monarch._procs.os.starting import start_process
from monarch._procs.rank.output import read_tail
from monarch.exceptions import MonarchError, NoDetachedMeshError, SpawnError

_MODULE = "monarch._procs.launch.holding.holder"
_ANSWER_S = 30.0
"""Seconds for the process to answer; a launcher that forwards ports takes a while."""
_SOON_S = 5.0
"""Seconds for it to answer what it knows."""
_END_S = 15.0
_GOING_S = 1.0
"""Seconds for the process to be gone after its connections."""
_BEGIN_S = 180.0
"""Seconds for the process to start and for the launcher to ask; Ray takes more than a minute at most."""
_ENDED = "the process that held its hosts has ended, and its hosts with it"
_decoder = msgspec.msgpack.Decoder(h.Reply)
_numbered = msgspec.msgpack.Decoder(tuple[int, h.Reply])


class HeldLaunch:
    """Hosts that another process holds. It is a ``Launch``.

    Args:
        path: the socket of that process.

    Raises:
        MonarchError: it does not answer.
        NoDetachedMeshError: it has ended.
        DetachedMeshInUseError: another program is starting the mesh.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        """Held during a request and its answer."""
        self._number = 0
        """Of the last request; an interrupt may have left its answer unread. Lock: ``_lock``."""
        self._problem: h.Problem | None = None
        """Why the process has ended the connection, if it has said so. Lock: ``_lock``."""
        self._closed = False
        """Whether this program has ended the connection; single operations only."""
        try:
            self._connection = h.connect(path, _ANSWER_S)
        except (FileNotFoundError, ConnectionRefusedError):
            raise NoDetachedMeshError(_ENDED) from None
        except OSError as error:
            raise MonarchError(f"the process that holds the hosts does not answer at {path}: {error}") from None
        self._pid = h.peer_pid(self._connection)
        """Pid of that process; a closed connection does not tell it."""
        self._start = proc_start_time(self._pid)
        """When that process started; None if it has just ended."""
        try:
            known = self._greeting()
        except BaseException:
            self._connection.close()
            raise
        self.where, self.count, self.options = known.where, known.count, known.options
        """The arguments of ``make_launcher``."""
        self.expected, self.forwarded, self.agent_here = known.expected, known.forwarded, False
        self.joined = [each for each in h.unpack_news(known.joined) if isinstance(each, Joined)]
        """The hosts that had joined before."""

    def watch(self, timeout: float) -> Sequence[News]:
        """Return what happened since the last call; wait up to ``timeout`` seconds for it."""
        return h.unpack_news(self._ask(h.Watch(timeout)))

    def connect(self, joined: Joined, here: Sequence[str]) -> HostRoute:
        """Return how this program and a host reach each other.

        Raises:
            SpawnError: there is no way.
        """
        address, addresses = self._ask(h.Connect(joined.index, list(here)))
        return HostRoute(address, addresses)

    def stay(self) -> None:
        """Wait no longer: end what has not joined. The others belong to this program, and outlive it from now on."""
        self._ask(h.Stay())

    def settle(self) -> None:
        """Do nothing: see ``stay``."""

    def keep_trying(self) -> bool:
        """Return False: hosts that fail are not asked again."""
        return False

    def left(self) -> float | None:
        """Return the seconds until the scheduler takes the hosts back; None if it does not, or not known."""
        try:
            return self._ask(h.Left(), _SOON_S)
        except MonarchError:
            return None

    def leave(self) -> None:
        """Close the connection: the lease of the hosts begins, if they stay. Never waits."""
        self._closed = True
        with suppress(OSError):
            # Another thread may wait for an answer.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def end(self) -> None:
        """End the hosts, and wait until the process has ended them."""
        with self._lock, suppress(OSError, MonarchError):
            if self._connection.fileno() < 0:
                self._connection = h.connect(self._path, _END_S)
                self._receive(0)
            self._connection.send(msgspec.msgpack.encode((self._number + 1, h.End())))
            self._connection.settimeout(_END_S)
            # The answer, and the end of the process.
            while self._connection.recv(h.PACKET):
                pass
        self._closed = True
        self._connection.close()

    def _ask(self, request: h.Request, timeout: float = _ANSWER_S) -> Any:
        with self._lock:
            if self._problem is not None:
                raise h.error_of(self._problem)
            try:
                self._number += 1
                self._connection.settimeout(timeout)
                with suppress(BrokenPipeError, ConnectionResetError):
                    # A connection that has ended still has its last message.
                    self._connection.send(msgspec.msgpack.encode((self._number, request)))
                reply = self._receive(self._number)
            except TimeoutError:
                raise self._silent(timeout) from None
            except OSError as error:
                raise self._parted() from error
        if isinstance(reply, h.Problem):
            raise h.error_of(reply)
        assert isinstance(reply, h.Answer)
        return reply.value

    def _greeting(self) -> h.Held:
        try:
            known = self._receive(0)
        except TimeoutError:
            raise self._silent(_ANSWER_S) from None
        except OSError as error:
            raise self._parted() from error
        if isinstance(known, h.Problem):
            raise h.error_of(known)
        assert isinstance(known, h.Held)
        return known

    def _silent(self, seconds: float) -> MonarchError:
        pid = self._pid
        return MonarchError(
            f"process {pid}, which holds the hosts, has not answered for {seconds:g} s; 'kill -CONT {pid}' resumes "
            f"it if it is suspended, and 'kill -9 {pid}' ends it with its hosts"
        )

    def _parted(self) -> MonarchError:
        """Return the error about a connection that has ended, without a reason from the process."""
        if self._closed:
            return MonarchError(
                f"this program has disconnected from process {self._pid}, which holds the hosts; attach the mesh again"
            )
        if self._start is not None and outlives(self._pid, self._start, _GOING_S):
            return MonarchError(
                f"process {self._pid}, which holds the hosts, has closed the connection; attach the mesh again"
            )
        return NoDetachedMeshError(_ENDED)

    def _receive(self, number: int) -> h.Reply:
        """Return the answer to a request."""
        while True:
            packet = self._packet()
            if not packet:
                raise self._parted()
            try:
                known, reply = _numbered.decode(packet)
            except msgspec.DecodeError as error:
                raise MonarchError(
                    f"the process that holds the hosts runs another monarch version ({error}); attach the mesh with "
                    f"that version, or end it: 'kill {self._pid}' ends it with its hosts"
                ) from None
            if known == h.LAST and isinstance(reply, h.Problem):
                self._problem = reply
                raise h.error_of(reply)
            if known == number:
                return reply

    def _packet(self) -> bytes:
        """Return the next message; empty after the last."""
        try:
            return self._connection.recv(h.PACKET)
        except ConnectionResetError:
            # It has ended the connection with a request unread. The error comes once, before what it sent.
            return self._connection.recv(h.PACKET)


def hold(order: h.HoldOrder) -> HeldLaunch:
    """Start a process that asks for hosts and holds them; return the connection to it.

    Raises:
        MonarchError: a detached mesh of this name exists, the launcher refuses, or the process ends.
        ArgumentError: the launcher does not take these arguments.
    """
    errors = memfd("holder-stderr")
    try:
        process = start_process(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            return _begun(process, order, errors)
        except MonarchError:
            # It ends by itself, and removes its folder.
            raise
        except BaseException:
            # After an interrupt, nobody will connect to it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
    finally:
        os.close(errors)


def _begun(process: subprocess.Popen[bytes], order: h.HoldOrder, errors: int) -> HeldLaunch:
    """Return the connection to a process that was just started, which writes its errors to a file."""
    assert process.stdout is not None
    with process.stdout:
        hand_over(process, msgspec.msgpack.encode(order))
        poller = select.poll()
        poller.register(process.stdout, select.POLLIN)
        if not poller.poll(_BEGIN_S * 1000):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise SpawnError(f"the launcher {order.where!r} did not request hosts within {_BEGIN_S:g} s")
        # It prints one message, and continues in a child.
        packet = process.stdout.read()
    process.wait()
    if not packet:
        output = read_tail(errors, 4096).data.decode(errors="replace").strip().splitlines()
        raise SpawnError(f"the process that holds the hosts ended during startup: {' '.join(output[-1:])}")
    reply = _decoder.decode(packet)
    if isinstance(reply, h.Problem):
        raise h.error_of(reply)
    assert isinstance(reply, h.Answer)
    return HeldLaunch(reply.value)
