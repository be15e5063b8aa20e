"""The prompt of a program in a terminal whose ranks have stopped at a breakpoint."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from monarch._core.position import Position
from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks, parse_ranks
from monarch._debug.answering import Answering, StopsLike
from monarch._debug.commands import HELP, Reader
from monarch._meshes.registry import meshes_of
from monarch._node.current import current_node
from monarch._python.threads import spawn_thread
from monarch.exceptions import MonarchError

_LOOK = 0.1
"""Seconds between two looks whether ranks are still stopped."""
_ADVICE = "resume it with 'python -m monarch debug' or mesh.resume(); a program in a terminal shows a prompt here"


class Terminal:
    """Shows stops, and asks at the terminal of the program what the ranks are to do.

    Args:
        stops: the stopped ranks.
        write: prints text soon, without waiting.
    """

    def __init__(self, stops: StopsLike, write: Callable[[str], object]) -> None:
        self._stops, self._write = stops, write
        self._answering = Answering(stops)
        self._lock = threading.Lock()
        # Under the lock: what to say before the next prompt, and whether a thread asks.
        self._news: list[str] = []
        self._asking = False
        # Of the thread that asks.
        self._reader = Reader()
        # Written by the thread that asks, as a whole.
        self._awaited: frozenset[str] = frozenset()
        """The ranks whose step that thread waits for."""

    def show(self, proc: str, position: Position, is_breakpoint: bool) -> None:
        """Show a stop, and begin to ask; in the receiving thread."""
        where = Position(position.state, position.frames[:1], position.reason)
        line = f"monarch: rank {split_proc(proc)[1]}: {where}"
        if sys.stdin is None or not sys.stdin.isatty():
            # A step was asked for from elsewhere, where its end is shown.
            if is_breakpoint:
                self._write(f"{line}; {_ADVICE}")
            return
        if proc in self._awaited:
            # The step that ends here tells it.
            return
        with self._lock:
            # The thread that asks says it, so that a prompt follows each line.
            self._news.append(line)
            begins, self._asking = not self._asking, True
        if begins:
            spawn_thread("monarch-terminal", self._run)

    def _goes_on(self) -> bool:
        """Say the news; return whether ranks are stopped, and end to ask if not."""
        with self._lock:
            news, self._news = self._news, []
            goes_on = self._asking = bool(news or self._stops.held())
        if news:
            # The frame that was selected is of other code.
            self._answering.level = 0
        _say("".join(f"{line}\n" for line in news))
        return goes_on

    def _run(self) -> None:
        try:
            chosen: set[str] = set()
            while self._goes_on():
                here = self._stops.held()
                if not here:
                    continue
                uid = split_proc(min(here))[0]
                here = {proc for proc in here if split_proc(proc)[0] == uid}
                chosen &= here | self._stops.parked(uid)
                line = self._ask(uid, chosen or here)
                word, rest = self._reader.read(line) if line is not None else ("", "")
                if word == "quit":
                    os.kill(os.getpid(), signal.SIGINT)
                    return
                if word == "rank" and rest:
                    chosen = self._chosen(uid, rest) or chosen
                elif word:
                    text = self._answer(sorted(chosen or here), word, rest)
                    _say(f"{text}\n" if text else "")
        finally:
            with self._lock:
                self._asking = False

    def _ask(self, uid: str, procs: set[str]) -> str | None:
        """Ask for a line; return None if the ranks have continued or others have stopped."""
        _say(f"({_named(procs)}) ")
        before = self._stops.held(), self._stops.positions().keys()
        while (self._stops.held(), self._stops.positions().keys()) == before and not self._news:
            if select.select([sys.stdin], [], [], _LOOK)[0]:
                line = sys.stdin.readline()
                _say("" if line else "\n")
                return line or "quit"
        _say("\n")
        return None

    def _chosen(self, uid: str, text: str) -> set[str]:
        every = self._procs(uid)
        try:
            ranks = range(len(every)) if text == "all" else parse_ranks(text, len(every))
        except MonarchError as error:
            _say(f"{error}\n")
            return set()
        found, why = self._answering.choose([every[rank] for rank in ranks])
        _say(f"{why}\n" if why and text != "all" else "")
        return set(found)

    def _procs(self, uid: str) -> list[str]:
        """Return all ranks of a mesh."""
        state = meshes_of(current_node()).own_procs.get(uid)
        if state is None:
            return sorted({proc for proc in self._stops.held() if split_proc(proc)[0] == uid} | self._stops.parked(uid))
        return [state.procs.proc(rank) for rank in range(state.procs.size)]

    def _answer(self, procs: list[str], word: str, rest: str) -> str:
        if word == "help":
            return f"{HELP}\nquit              stop the program, like Ctrl-C"
        if word == "rank":
            return self._answering.ranks(procs, self._procs(split_proc(procs[0])[0]))
        self._awaited = frozenset(procs)
        try:
            text = self._answering.answer(procs, word, rest)
        except MonarchError as error:
            text = str(error)
        finally:
            self._awaited = frozenset()
        return f"{word} works only in notebooks; help lists the commands" if text is None else text


def _named(procs: set[str]) -> str:
    return describe_ranks(sorted(split_proc(each)[1] for each in procs))


def _say(text: str) -> None:
    # Not by the stream, whose lock and buffer hold what other threads have printed of a line.
    os.write(sys.stderr.fileno(), text.encode())
