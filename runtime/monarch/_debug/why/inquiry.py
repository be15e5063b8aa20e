"""Asking ranks what they do, again and again, without waiting: answers arrive in the receiving thread."""

from __future__ import annotations

import linecache
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from monarch._core.diagnosis.facts import Doing, Kind, RankFacts, Target
from monarch._core.kinds import is_a
from monarch._core.position import Frame
from monarch._core.roster import split_proc
from monarch._core.text.advice import advice
from monarch._core.text.causes import describe
from monarch._debug.why.probing import facts
from monarch._node.node import Node
from monarch._node.replies.gather import is_gather
from monarch._node.services.asking import ServiceAnswers
from monarch._node.services.registry import request
from monarch._procs.os.blocked import other_program, process_state
from monarch._procs.os.children import process_runs
from monarch._procs.rank.cell_marker import read_mark

SILENT = 1.0
"""Seconds without an answer after which a rank counts as silent."""
_NEEDS = 0.1
"""Seconds between answers of ranks that were asked together and have CPUs."""
_SPREAD = 0.5
"""Seconds between answers of ranks that were asked together; those further apart are of different times."""


class Inquiry:
    """The answers of processes. A process is asked again once it has answered.

    Its methods are called in one thread at a time; answers come in the receiving thread.

    Args:
        node: the node of this process.
        heard: called in the receiving thread when all that were asked have answered.
    """

    def __init__(self, node: Node, heard: Callable[[], None] = lambda: None) -> None:
        self._node = node
        self._heard = heard
        # Single operations, by the asking and the receiving thread.
        self._known: dict[str, RankFacts] = {}
        """By process, its last answer."""
        self._came: dict[str, float] = {}
        """By process, when that came. Receiving thread only writes."""
        self._open: dict[str, float] = {}
        """By process, when it was asked what it has not answered."""
        self._asking: list[ServiceAnswers] = []

    def ask(self, procs: Iterable[str]) -> None:
        """Ask processes, except dead ones and those that have not answered the last time."""
        asked = [proc for proc in procs if proc not in self._open and self._node.peers.get(proc).dead is None]
        now = time.monotonic()
        self._open.update(dict.fromkeys(asked, now))
        if asked:
            left = set(asked)
            self._asking.append(
                ServiceAnswers(self._node, asked, request(facts), partial(self._take, left), urgent=True)
            )

    def _take(self, left: set[str], proc: str, answer: Any) -> None:
        self._open.pop(proc, None)
        if is_a(answer, RankFacts):
            doings = tuple(self._with_ranks(_as_here(each)) for each in answer.doings)
            self._came[proc] = time.monotonic()
            self._known[proc] = answer._replace(uid=split_proc(proc)[0], doings=doings)
        left.discard(proc)
        if not left:
            self._heard()

    def _with_ranks(self, doing: Doing) -> Doing:
        """Return the activity of a rank, with the ranks among the processes that hold the lock that it waits for."""
        if not doing.holders:
            return doing
        procs = {pid: proc for proc, pid in list(self._node.peers.pids.items())}
        ranks = [split_proc(procs[each.pid]) for each in doing.holders if each.pid in procs]
        others = [f"process {each.pid}{f' ({each.command})' if each.command else ''}" for each in doing.holders
                  if each.pid not in procs]  # fmt: skip
        what = f"{doing.what}, held by {', '.join(others)}" if others else doing.what
        targets = (*doing.targets, *(Target(uid, rank, "") for uid, rank in ranks))
        return doing._replace(what=what, targets=targets, holders=())

    @property
    def done(self) -> bool:
        """Whether all have answered."""
        return not self._open

    def close(self) -> None:
        """Take no more answers."""
        for each in self._asking:
            each.close()
        self._asking.clear()

    def facts(self, procs: Iterable[str], at_once: bool = False) -> list[RankFacts]:
        """Return what is known of processes.

        Args:
            procs: the processes.
            at_once: whether to leave out ranks that entered a collective after another one's answer: they may have
                ended its wait.
        """
        now, procs = time.monotonic(), list(procs)
        answering = [proc for proc in procs if proc in self._known and now - self._open.get(proc, now) < SILENT]
        busy = [self._came[proc] for proc in answering if self._known[proc].doings]
        found = [each for proc in procs if (each := self._of(proc, now)) is not None]
        found = self._without_broken(found)
        # One that has ended its call since the others answered may have ended their waits too.
        fresh = min(busy, default=now) + _SPREAD
        came = {(each.uid, each.rank): self._came[proc] for proc, each in list(self._known.items())}
        found = [each for each in found if each.doings or came.get((each.uid, each.rank), 0.0) <= fresh]
        if not at_once:
            return found
        # With the time that an answer needs, since ranks tell for how long they have certainly been there.
        oldest = min(busy, default=now) + _NEEDS
        return [each for each in found if came.get((each.uid, each.rank), 0.0) - _entered_for(each) <= oldest]

    def _without_broken(self, found: list[RankFacts]) -> list[RankFacts]:
        """Return facts in which ranks wait for nobody in collectives of calls that have ended with a death."""
        left = {
            (*split_proc(peer.proc), call.actor)
            for call in list(self._node.ports.gathers.values())
            if is_gather(call) and call.done
            for peer in call.waits_for()
        }
        if not left:
            return found
        return [
            each._replace(
                doings=tuple(
                    doing._replace(kind=Kind.BROKEN, what="", entered=None)
                    if doing.entered is not None and (each.uid, each.rank, doing.actor) in left
                    else doing
                    for doing in each.doings
                )
            )
            for each in found
        ]

    def _of(self, proc: str, now: float) -> RankFacts | None:
        uid, rank = split_proc(proc)
        seconds = now - self._open.get(proc, now)
        dead = self._node.peers.get(proc).dead
        if dead is not None:
            return RankFacts(rank, (Doing(Kind.DEAD, describe(dead.cause, dead.at)),), (), uid)
        if seconds < SILENT:
            return self._known.get(proc)
        return RankFacts(rank, (self._silent(proc, seconds),), (), uid)

    def _silent(self, proc: str, seconds: float) -> Doing:
        pid = self._node.peers.pids.get(proc, 0)
        state = process_state(pid)
        if state in ("T", "t"):
            return Doing(Kind.SUSPENDED, f"pid {pid}", (), seconds, 0.0, advice=f"resume it with kill -CONT {pid}")
        if program := other_program(pid):
            return Doing(Kind.DEAD, f"now runs {program} (os.exec)", (), seconds, 0.0)
        known = self._known.get(proc)
        frames = known.doings[0].frames if known is not None and known.doings else ()
        # One that computes, or gets no CPU on an overloaded machine, continues.
        cores = 1.0 if state and process_runs(pid) else -1.0
        return Doing(Kind.GIL if state else Kind.SILENT, "", self._marked(proc, frames), seconds, cores)

    def _marked(self, proc: str, frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
        """Return the frames of the last answer, or the line of a cell that the rank has marked since."""
        marked = read_mark(self._node.folder, proc)
        if marked is None:
            return frames
        file = f"cell [{marked.number}]"
        if any(each.file == file and each.line == marked.line for each in frames):
            return frames
        return (Frame(file, marked.line, "<module>", ""),)


def _entered_for(facts: RankFacts) -> float:
    """Return for how long a rank has been in a collective; infinity if it is in none."""
    return min((each.seconds for each in facts.doings if each.entered is not None), default=math.inf)


def _as_here(doing: Doing) -> Doing:
    return doing._replace(frames=tuple(map(_as_known_here, doing.frames)))


def _as_known_here(frame: Frame) -> Frame:
    """Return a frame as the user knows it: code of a notebook's plain cell has its number and source only here."""
    if frame.file.startswith("cell ["):
        return frame
    name = advice().placed(frame.file)
    if name == frame.file:
        return frame
    text = " ".join(linecache.getline(frame.file, frame.line).split())
    return Frame(name, frame.line, frame.function, frame.text or text)


def procs_beyond(found: Iterable[RankFacts], known: Iterable[str], node: Node) -> list[str]:
    """Return the processes that calls wait for, of those that were not asked."""
    names = {split_proc(proc): proc for proc in list(node.peers.known)}
    asked = set(known)
    targets = [target for each in found for doing in each.doings for target in doing.targets]
    wanted = {names.get((target.uid, target.rank)) for target in targets}
    return sorted(proc for proc in wanted if proc is not None and proc not in asked)
