"""Shows the meshes of a program to other programs of its user: to ``monarch top``, and to notebooks.

They connect to a socket in the session folder, which only this user can enter. One thread answers one after another,
and each answer has a bound, so that a suspended asker holds up the others briefly and this program never.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import msgspec

from monarch._node.services.registry import declared
from monarch._python.threads import new_thread
from monarch._telemetry.exchange import LARGEST_REQUEST, NAME, VERSION, MeshesAnswer, News, receive, request_of, send
from monarch._telemetry.mesh_telemetry import MeshTelemetry

REQUEST_S, ANSWER_S = 0.5, 2.0
"""Seconds for one asker to send its request, and to take the answer, which is large for a thousand ranks."""
MOST_ENTRIES = 2000
"""Entries of a mesh in an answer; beyond it, the state itself is shorter."""
_WAITING = 32
"""Askers that may wait for their turn."""
_TEND = 5.0
"""Seconds between two looks whether the socket is still there."""
_AGAIN = 0.2
"""Seconds until a failed accept is retried, for example when the process had no descriptor left."""


@declared("attached.serve")
def debug(connection: socket.socket) -> None:
    """Serve a session of the debugger."""
    raise NotImplementedError


class Caption(NamedTuple):
    """The name of a program for people, and the Jupyter server that has started it."""

    title: str
    server: str = ""


_caption: Caption | None = None


def set_caption(caption: Caption) -> None:
    """Set how others call this program; by default, by the name of its file."""
    global _caption
    _caption = caption


def caption() -> Caption:
    """Return how others call this program."""
    return _caption or Caption(os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python")


class TelemetryServer:
    """Answers the requests of other programs until it is closed.

    Args:
        folder: the folder of the session.
        logs: returns the logs of the meshes that run, up to date.

    Raises:
        OSError: the folder cannot hold a socket.
    """

    def __init__(self, folder: str, logs: Callable[[], Iterable[MeshTelemetry]]) -> None:
        self._logs = logs
        self._path = os.path.join(folder, NAME)
        self._closed = threading.Event()
        self._listener = _listener(self._path)
        """Replaced by the thread only."""
        self._thread = new_thread("monarch-shown", self._run)
        try:
            self._thread.start()
        except BaseException:
            self._listener.close()
            os.unlink(self._path)
            raise

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._tend()
                continue
            except OSError:
                self._closed.wait(_AGAIN)
                continue
            # An asker that is gone, suspended or of another version has no claim to an answer.
            with connection, suppress(OSError, msgspec.MsgspecError):
                if not self._closed.is_set():
                    self._serve(connection)

    def _tend(self) -> None:
        """Listen again if the socket was removed, as with the folder at the death of the host agent."""
        if not os.path.exists(self._path):
            with suppress(OSError):
                new = _listener(self._path)
                self._listener.close()
                self._listener = new

    def _serve(self, connection: socket.socket) -> None:
        request = request_of(receive(connection, LARGEST_REQUEST, time.monotonic() + REQUEST_S))
        if request.debug:
            # In a thread of its own; this one closes its end.
            debug(connection.dup())
            return
        # An asker of another version sees by the answer that it is one.
        logs = self._logs() if request.version == VERSION else ()
        meshes = [news_of(log, request.known.get(log.uid, 0)) for log in logs]
        send(connection, MeshesAnswer(VERSION, *caption(), meshes), time.monotonic() + ANSWER_S)

    def close(self) -> None:
        """End the thread and remove the socket."""
        self._closed.set()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waker:
            # This wakes the thread, on each kernel, unlike a shutdown of the listener.
            waker.setblocking(False)
            waker.connect(self._path)
        self._thread.join(REQUEST_S + ANSWER_S)
        self._listener.close()
        with suppress(OSError):
            os.unlink(self._path)


def _listener(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(path)
        made.listen(_WAITING)
        made.settimeout(_TEND)
    except OSError:
        made.close()
        raise
    return made


def news_of(log: MeshTelemetry, known: int) -> News:
    """Return what an asker lacks of a mesh.

    Args:
        log: the log of the mesh.
        known: number of the newest entry that the asker has; 0 for none.
    """
    if 0 < known <= log.number:
        entries = list(islice(log.since(known), MOST_ENTRIES + 1))
        if len(entries) <= MOST_ENTRIES and (not entries or entries[0].number == known + 1):
            return News(log.uid, None, entries)
    return News(log.uid, log.model(), [])
