"""Sessions of ``monarch debug``: a client looks into the ranks of this program, and lets go of them when it leaves.

Each message is a line of JSON: the client sends what the user types, and the program answers with a text and the next
prompt. Ranks that the client has paused are resumed when it has gone, in whatever way.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from monarch._core.kinds import is_dict, is_tuple
from monarch._core.position import PAUSED, PAUSING, Position
from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks, parse_ranks
from monarch._debug.answering import PATIENCE, Answering, asked
from monarch._debug.commands import HELP, STEPS, Reader
from monarch._debug.here import pause_here, where_here
from monarch._debug.resuming import resume_here
from monarch._debug.stops import Stops
from monarch._debug.why.explaining import explain
from monarch._meshes.registry import meshes_of
from monarch._node.current import current_node
from monarch._node.node import Node
from monarch._node.services.asking import ask_soon
from monarch._node.services.registry import request, service
from monarch._python.threads import spawn_thread
from monarch.exceptions import MonarchError

_LONGEST = 1 << 16
"""Bytes of a line that is typed."""
_LAST_WORDS = 1.0
"""Seconds that the end of a program waits for the answers to its clients."""
_HELP = f"""pause             pause ranks at their next Python line
{HELP}
why               what ranks wait for, and why
mesh NAME         look at another mesh; 'mesh' lists them
quit              leave; ranks that were paused here continue"""
_OWN = ("pause", "why", "mesh")
_TELLS = (*STEPS, "continue")
"""Commands whose answer tells where ranks are."""


@service("attached.serve", "local")
def serve(connection: socket.socket) -> None:
    """Serve a client in a thread of its own, which closes the connection."""
    node = current_node()
    session = _Session(node, connection)
    node.part(_Clients).add(session)
    spawn_thread("monarch-debugged", session.run)


class _Clients:
    """The clients of this program: an answer that is under way when it ends is still sent."""

    def __init__(self, node: Node) -> None:
        self._lock = threading.RLock()
        # Lock of this: _lock.
        self._sessions: list[_Session] = []
        node.events.closing.subscribe(self._finish)

    def add(self, session: _Session) -> None:
        with self._lock:
            self._sessions = [each for each in self._sessions if not each.gone]
            self._sessions.append(session)

    def _finish(self) -> None:
        with self._lock:
            sessions = self._sessions
        deadline = time.monotonic() + _LAST_WORDS
        for each in sessions:
            each.answered.wait(max(0.0, deadline - time.monotonic()))


class _Session:
    """A client, in its thread."""

    def __init__(self, node: Node, connection: socket.socket) -> None:
        self._node, self._connection = node, connection
        self._stops = node.part(Stops)
        self._answering = Answering(self._stops)
        self._reader = Reader(_OWN)
        self._uid = ""
        """The mesh that it looks at; empty before the first command."""
        self._chosen: list[int] | None = None
        """Ranks of this mesh; None for those at a breakpoint, or else for all."""
        self._paused: set[str] = set()
        """The ranks that it has paused."""
        self._told: dict[str, int] = {}
        """By stopped rank, its turn when the client was told."""
        self.answered = threading.Event()
        """Clear while the client waits for an answer."""
        self.answered.set()
        self.gone = False
        """Whether the client has gone. Set by its thread."""

    def run(self) -> None:
        """Answer until the client has gone, and let go of what it has paused."""
        try:
            with self._connection, suppress(OSError, ValueError):
                self._connection.settimeout(None)
                lines = self._connection.makefile("rb")
                self._send(self._greeting())
                while line := lines.readline(_LONGEST):
                    self.answered.clear()
                    message: Any = json.loads(line)
                    typed = str(message.get("line", "")) if is_dict(message) else ""
                    word, rest = self._reader.read(typed)
                    if word == "quit":
                        break
                    self._send(self._answered(word, rest))
                    self.answered.set()
        finally:
            self.gone = True
            self.answered.set()
            if self._paused and not self._node.closed:
                ask_soon(sorted(self._paused), request(resume_here), PATIENCE)

    def _send(self, text: str) -> None:
        prompt = f"({describe_ranks(self._ranks())}) " if self._procs() else "(no mesh) "
        self._connection.sendall(json.dumps({"text": text, "prompt": prompt}).encode() + b"\n")

    def _greeting(self) -> str:
        self._procs()
        return "\n".join(filter(None, [self._list(), self._news() or self._where()]))

    def _answered(self, word: str, rest: str) -> str:
        try:
            text = self._answer(word, rest)
        except MonarchError as error:
            text = str(error)
        return "\n".join(filter(None, [text, self._news()]))

    def _answer(self, word: str, rest: str) -> str:
        if word == "help":
            return _HELP
        if word == "mesh":
            return self._choose_mesh(rest) if rest else self._list()
        procs = self._procs()
        if not word or not procs:
            return "" if procs else "this program has no running mesh"
        if word == "rank" and rest:
            # Ranks that run too, so that they can be paused.
            self._chosen = parse_ranks(rest, len(procs)) if rest != "all" else list(range(len(procs)))
            return self._where()
        chosen = [procs[rank] for rank in self._ranks()]
        if word == "rank":
            return self._answering.ranks(chosen, procs)
        if word == "pause":
            return self._pause(chosen)
        if word == "why":
            return explain(self._node, chosen).text
        if word == "continue":
            self._paused.difference_update(chosen)
        text = self._answering.answer(chosen, word, rest)
        # A step has told where they are.
        if word in _TELLS:
            self._told.update({proc: self._stops.turns.get(proc, 0) for proc in chosen})
        return f"{word} works only in notebooks; help lists the commands" if text is None else text

    def _pause(self, procs: list[str]) -> str:
        before = ask_soon(procs, request(where_here), PATIENCE)
        ran = [proc for proc in procs if not _is_paused(before.get(proc))]
        # First, since the client may go while ranks answer.
        self._paused.update(ran)
        return asked(procs, request(pause_here), lambda answer: _innermost(Position.unpacked(answer)))

    def _where(self) -> str:
        procs = self._procs()
        return asked(
            [procs[rank] for rank in self._ranks()],
            request(where_here),
            lambda answer: _innermost(Position.unpacked(answer)),
        )

    def _news(self) -> str:
        """Return the stops of ranks since the last message."""
        standing = self._standing()
        turns = {proc: self._stops.turns.get(proc, 0) for proc in standing}
        new = [proc for proc in sorted(standing) if self._told.get(proc) != turns[proc]]
        self._told = turns
        if new:
            # The frame that was selected is of other code.
            self._answering.level = 0
        return "\n".join(f"rank {split_proc(proc)[1]}: {_innermost(standing[proc])}" for proc in new)

    def _standing(self) -> dict[str, Position]:
        return {proc: each.position for proc, each in list(self._stops.now.items()) if split_proc(proc)[0] == self._uid}

    def _names(self) -> dict[str, str]:
        """Return the names of the meshes that run, by uid; of equal names, the second one is ``mesh#2``."""
        states = list(meshes_of(self._node).own_procs.items())
        named = [(uid, self._node.names.get(uid, uid)) for uid, state in states if state.stopped is None]
        seen: Counter[str] = Counter()
        found: dict[str, str] = {}
        for uid, name in named:
            seen[name] += 1
            found[uid] = name if seen[name] == 1 else f"{name}#{seen[name]}"
        return found

    def _procs(self) -> list[str]:
        """Return the ranks of the mesh that is looked at; another one if that has ended."""
        names = self._names()
        if self._uid not in names:
            standing = [split_proc(proc)[0] for proc in list(self._stops.now)]
            self._uid, self._chosen = next((uid for uid in [*standing, *names] if uid in names), ""), None
        state = meshes_of(self._node).own_procs.get(self._uid)
        return [state.procs.proc(rank) for rank in range(state.procs.size)] if state is not None else []

    def _ranks(self) -> list[int]:
        procs = self._procs()
        if self._chosen is not None:
            return [rank for rank in self._chosen if rank < len(procs)]
        return sorted(split_proc(proc)[1] for proc in self._standing()) or list(range(len(procs)))

    def _choose_mesh(self, name: str) -> str:
        found = [uid for uid, each in self._names().items() if each == name]
        if not found:
            return f"no mesh {name!r}\n{self._list()}"
        self._uid, self._chosen = found[-1], None
        return self._where()

    def _list(self) -> str:
        names = self._names()
        own = meshes_of(self._node).own_procs
        sizes = {uid: own[uid].procs.size for uid in names if uid in own}
        lines = [f"mesh {names[uid]!r}: {size} rank{'s' * (size != 1)}" for uid, size in sizes.items()]
        return "\n".join(lines) or "this program has no running mesh"


def _is_paused(answer: Any) -> bool:
    return is_tuple(answer) and Position.unpacked(answer).state in (PAUSED, PAUSING)


def _innermost(position: Position) -> str:
    return str(position._replace(frames=position.frames[:1]))
