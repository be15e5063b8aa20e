"""The other programs of this user on this machine that run meshes, and copies of the state of these meshes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import TypeVar

import msgspec

from monarch._core.telemetry.fold import fold
from monarch._core.telemetry.model import MeshModel
from monarch._procs.session_folder import program_folders
from monarch._telemetry.exchange import (
    LARGEST_ANSWER,
    NAME,
    VERSION,
    MeshesAnswer,
    MeshesRequest,
    News,
    answer_of,
    receive,
    send,
)

T = TypeVar("T")

FIRST_S, PATIENCE_S = 2.0, 0.5
"""Seconds for a program to answer: the first time, with whole states, and later, with what is new."""
OTHER_VERSION = "runs another version of Monarch"
SILENT = "does not answer; this is its last state"


class MeshCopy:
    """The state of a mesh of another program. Thread-safe."""

    def __init__(self, uid: str, model: MeshModel) -> None:
        self.uid = uid
        self._lock = RLock()
        """Guards the model and the callbacks; held briefly, never over code of others."""
        self._model = model
        self._callbacks: tuple[Callable[[], object], ...] = ()

    @property
    def number(self) -> int:
        """Of the newest entry that it contains."""
        return self._model.number

    def read(self, reader: Callable[[MeshModel], T]) -> T:
        """Return the result of a quick function of the state, which it must not keep or change."""
        with self._lock:
            return reader(self._model)

    def subscribe(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call a function after each change, in the thread that looks; return a function that ends this."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)
        return lambda: self._unsubscribe(callback)

    def _unsubscribe(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._callbacks = tuple(each for each in self._callbacks if each is not callback)

    def change(self, changer: Callable[[MeshModel], MeshModel]) -> None:
        """Replace the state by the result of a quick function, and notify the subscribers if it is newer."""
        with self._lock:
            before = self._model.number
            self._model = changer(self._model)
            callbacks = self._callbacks if self._model.number != before else ()
        for callback in callbacks:
            callback()


class WatchedProgram:
    """A program that runs, and its meshes at the last look. One thread looks; any may read ``meshes``.

    Args:
        folder: the folder of its session.
        pid: the pid of its process.
    """

    def __init__(self, folder: str, pid: int) -> None:
        self.folder = folder
        self.pid = pid
        self.title = ""
        """Its name for people; empty before its first answer."""
        self.server = ""
        """The Jupyter server that has started it; empty for none."""
        self.meshes: dict[str, MeshCopy] = {}
        """By uid; replaced as a whole."""
        self.trouble = ""
        """Why its last answer is missing."""

    @property
    def name(self) -> str:
        """The name of the program for people, as in ``train.ipynb (process 12)``."""
        return f"{self.title} (process {self.pid})" if self.title else f"process {self.pid}"

    def look(self) -> None:
        """Bring the copies up to date; waits for the program, briefly."""
        try:
            answer = answer_of(self._ask())
        except msgspec.MsgspecError:
            self.trouble = OTHER_VERSION
        except OSError:
            self.trouble = SILENT
        else:
            self.title, self.server = answer.title, answer.server
            self.trouble = "" if answer.version == VERSION else OTHER_VERSION
            if not self.trouble:
                self._take(answer)

    def _ask(self) -> bytes:
        patience = PATIENCE_S if self.meshes else FIRST_S
        until = time.monotonic() + patience
        known = {uid: copy.number for uid, copy in self.meshes.items()}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(patience)
            connection.connect(os.path.join(self.folder, NAME))
            send(connection, MeshesRequest(VERSION, known), until)
            return receive(connection, LARGEST_ANSWER, until)

    def _take(self, answer: MeshesAnswer) -> None:
        before, now = self.meshes, dict[str, MeshCopy]()
        for news in answer.meshes:
            copy = before.get(news.uid)
            if copy is not None:
                copy.change(partial(_newer, news))
            elif news.model is not None:
                copy = MeshCopy(news.uid, news.model)
            if copy is not None:
                now[news.uid] = copy
        self.meshes = now
        for uid in before.keys() - now.keys():
            end_copy(before[uid], "its program has stopped it")


def _newer(news: News, model: MeshModel) -> MeshModel:
    for entry in news.entries:
        fold(model, entry)
    return news.model or model


def end_copy(copy: MeshCopy, reason: str) -> None:
    """Show a mesh as ended: nothing more will be known of it."""

    def ended(model: MeshModel) -> MeshModel:
        model.ended, model.reason, model.number = time.time(), reason, model.number + 1
        return model

    copy.change(ended)


class Programs:
    """The programs of this user that run, besides this one. One thread looks; any may read ``running``.

    Args:
        wanted: tells whether to follow a program, after its first answer.
    """

    def __init__(self, wanted: Callable[[WatchedProgram], bool] = lambda _: True) -> None:
        self._wanted = wanted
        self._known: dict[str, WatchedProgram] = {}
        """By folder, all that run. Thread that looks only."""
        self.running: tuple[WatchedProgram, ...] = ()
        """Those that are followed, oldest first; replaced as a whole."""

    def look(self) -> list[WatchedProgram]:
        """Bring all up to date, and return those that have ended since the last look."""
        folders = {folder: pid for folder, pid in program_folders(NAME) if pid != os.getpid()}
        ended = [program for program in self.running if program.folder not in folders]
        self._known = {
            folder: self._known.get(folder) or WatchedProgram(folder, pid) for folder, pid in folders.items()
        }
        for program in self._known.values():
            if not program.title or self._wanted(program):
                program.look()
        self.running = tuple(program for program in self._known.values() if self._wanted(program))
        for program in ended:
            for copy in program.meshes.values():
                end_copy(copy, "its program has ended")
        return ended

    def copy_of(self, uid: str) -> MeshCopy | None:
        """Return the copy of a mesh."""
        copies = (program.meshes.get(uid) for program in self.running)
        return next((copy for copy in copies if copy is not None), None)
