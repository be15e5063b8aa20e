"""The prompt of a cell whose ranks have stopped at a breakpoint, and of ``%mesh debug``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from monarch._kernel_api import PAUSE, StoppedRank, describe, describe_ranks, node_of, split_proc, state_of, stops
from monarch_kernel.calls.cell_run import Run
from monarch_kernel.compat import ask, can_ask
from monarch_kernel.debug.announcing import describe_stops
from monarch_kernel.debug.commanding import Commands
from monarch_kernel.debug.front_end import FrontEnd
from monarch_kernel.debug.pausing import positions, resumed, where
from monarch_kernel.debug.stepping import STEPS
from monarch_kernel.debug.waiting import PauseWait
from monarch_kernel.kernel_like import Kernel, kernel_of
from monarch_kernel.meshes.mesh import Mesh

_LOOK = 0.25
"""Seconds between two looks whether the cell has ended, if nobody says so."""
_GRACE = 0.2
"""Seconds for other ranks to come to the same breakpoint, before it is shown."""
STANDING = ("failed", "paused")
"""States of ranks that can be looked into."""
GOING = (*STEPS, "continue")
"""Commands that let ranks continue."""
_BOX = "the prompt above has ended; if its input box is still open, press Enter in it before you run other cells"
ELSEWHERE = "no prompt here: use the buttons of a view or the Meshes panel, or 'python -m monarch debug' in a terminal"
"""Said of a running cell, below which no command can be typed."""
_INTRODUCTION = "'help' lists the commands of this prompt"
_UNSEEN = "no prompt here: this front end takes no input; use %mesh where, print, next and continue instead"


class Prompt:
    """Asks the person at the notebook what stopped ranks are to do.

    Args:
        shell: the shell of the notebook.
        mesh_command: runs another ``%mesh`` line, for breakpoints.
        front_end: the debugger of the front end, which asks instead of this while it is attached.
        close_box: lets pages remove the input box of a question, given the ids of the message that runs the cell and of
            the question; returns whether there are any that do.
    """

    def __init__(
        self, shell: Any, mesh_command: Callable[[str], Any], front_end: FrontEnd, close_box: Callable[[str, str], bool]
    ) -> None:
        self._shell = shell
        self._mesh_command = mesh_command
        self._front_end = front_end
        self._close_box = close_box
        # Written by the thread of the notebook in single operations; read by the receiving thread.
        self.speaks_for: set[str] = set()
        """Uids of meshes whose stops this prompt shows."""
        self._told: list[StoppedRank] = []
        """The stops that it has shown last."""
        self._is_introduced = False
        """Set once, by any thread that asks; two do no harm."""

    def shows(self, stopped: StoppedRank) -> bool:
        """Return whether this prompt shows a stop, or has shown it."""
        return stopped.uid in self.speaks_for or any(each is stopped for each in self._told)

    def wait(self, mesh: Mesh | None, run: Run, until: float | None) -> bool:
        """Wait for a cell, and ask what to do while ranks of its mesh have stopped.

        Args:
            mesh: the mesh of the cell; None for a cell inside actors.
            run: the cell.
            until: a time of the monotonic clock; the time at breakpoints does not count.

        Returns:
            Whether the cell has ended in time.
        """
        if mesh is None or threading.current_thread() is not threading.main_thread():
            return run.wait(until)
        uid = state_of(mesh.procs).procs.uid
        for future in run.futures:
            future.wanted = True
        self.speaks_for.add(uid)
        try:
            known = stops()
            # The first part is for each message that arrives.
            pause = PauseWait(lambda: run.done or bool((known.now or known.by_hand) and _standing(uid)))
            while not run.done:
                left = _LOOK if until is None else min(_LOOK, until - time.monotonic())
                if left <= 0:
                    break
                if not pause.wait(left) or run.done:
                    continue
                begun = time.monotonic()
                self._talk(mesh, uid, lambda: run.done, {})
                if until is not None:
                    until += time.monotonic() - begun
        finally:
            self.speaks_for.discard(uid)
        return run.wait(until)

    def look(self, mesh: Mesh, ranks: list[int]) -> None:
        """Ask what to look at in paused ranks, or in failed ones."""
        print(where(mesh, ranks))
        kernel = kernel_of(self._shell)
        if not can_ask(kernel):
            print(_UNSEEN)
            return
        self._introduce()
        focus, commands = ranks, Commands(mesh, self._mesh_command)
        while True:
            line = ask(kernel, self._shown(mesh, focus), lambda: True, self._close_box)
            word, rest = commands.read(line) if line is not None else ("quit", "")
            if word == "quit":
                return
            focus = commands.do(focus, word, rest)
            if word in GOING:
                left = [rank for rank, each in positions(mesh, ranks).items() if each.state in STANDING]
                if not left:
                    return
                focus = [rank for rank in focus if rank in left] or left

    def beside(self, mesh: Mesh, is_over: Callable[[], bool]) -> None:
        """Ask in this thread, while the thread of the notebook waits for a call of an endpoint.

        Args:
            mesh: whose ranks have stopped, which has been shown.
            is_over: tells whether the cell has ended.
        """
        uid = state_of(mesh.procs).procs.uid
        if uid in self.speaks_for:
            return
        self.speaks_for.add(uid)
        try:
            # Pauses have been shown where somebody has asked for them.
            self._talk(mesh, uid, is_over, {proc: at for proc, at in _standing(uid).items() if at.kind != PAUSE})
        except KeyboardInterrupt:
            # The person has asked for it; the thread of the notebook handles it as any Stop.
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            self.speaks_for.discard(uid)

    def _talk(self, mesh: Mesh, uid: str, is_over: Callable[[], bool], told: dict[str, StoppedRank]) -> None:
        """Show stops, and carry out commands, as long as ranks are stopped."""
        kernel = kernel_of(self._shell)
        commands, chosen = Commands(mesh, self._mesh_command), list[int]()
        while not is_over():
            PauseWait(is_over).wait(_GRACE)
            now, held = _standing(uid), _held(uid)
            if not held or is_over():
                return
            if self._front_end.active:
                PauseWait(lambda now=now: is_over() or _standing(uid) != now).wait(_LOOK)
                continue
            new = {proc: each for proc, each in now.items() if told.get(proc) is not each}
            told = now
            self._told = list(told.values())
            if new:
                # The frame that was selected is of other code.
                mesh.frame = 0
                print(describe_stops(list(new.values()), stops().parked(uid)), flush=True)
            if not can_ask(kernel):
                if new:
                    print(ELSEWHERE, flush=True)
                PauseWait(lambda now=now: is_over() or _standing(uid) != now).wait(_LOOK)
                continue
            self._introduce()
            # Without a stopped rank, those in a step, so that they can continue.
            standing = sorted(each.rank for each in now.values()) or sorted(split_proc(proc)[1] for proc in held)
            parked = {split_proc(proc)[1] for proc in stops().parked(uid)}
            chosen = [rank for rank in chosen if rank in parked or rank in standing]
            focus = chosen or standing
            line = self._ask(kernel, self._shown(mesh, focus), partial(self._may_ask, is_over, uid, (now, held)))
            if line is None:
                _tell_deaths(mesh, now)
                continue
            word, rest = commands.read(line)
            if word == "quit":
                raise KeyboardInterrupt
            if word == "continue" and not chosen and any(each.kind == PAUSE for each in now.values()):
                # Those that have not come to their next line yet are not to pause there either.
                print(resumed(mesh, list(range(len(mesh.procs)))), flush=True)
                continue
            after = commands.do(focus, word, rest)
            chosen = after if word == "rank" else chosen
            # Stops that a step has shown are not shown again.
            told = {**told, **_standing(uid)} if word in STEPS else told
            self._told = list(told.values())

    def _introduce(self) -> None:
        """Say before the first question of a notebook how to learn what may be answered."""
        if not self._is_introduced:
            self._is_introduced = True
            print(_INTRODUCTION, flush=True)

    def _ask(self, kernel: Kernel | None, prompt: str, wanted: Callable[[], bool]) -> str | None:
        return ask(kernel, prompt, wanted, self._over)

    def _may_ask(self, is_over: Callable[[], bool], uid: str, before: tuple[dict[str, StoppedRank], set[str]]) -> bool:
        """Return whether a question about ranks that stood there is still of interest."""
        return not is_over() and not self._front_end.active and (_standing(uid), _held(uid)) == before

    def _over(self, request: str, question: str) -> bool:
        """Remove the input box of a question without an answer, or say what to do; return whether a page removes it."""
        closes = self._close_box(request, question)
        if not closes:
            print(_BOX, flush=True)
        return closes

    def _shown(self, mesh: Mesh, focus: list[int]) -> str:
        return f"({mesh.name} {describe_ranks(focus)}) "


def _tell_deaths(mesh: Mesh, stood: dict[str, StoppedRank]) -> None:
    """Say which of the ranks that stood at a question have died since."""
    for proc, each in stood.items():
        dead = node_of(mesh.procs).peers.get(proc).dead
        if dead is not None:
            print(f"rank {each.rank} {describe(dead.cause, dead.at)}; ranks that waited for it continue", flush=True)


def _standing(uid: str) -> dict[str, StoppedRank]:
    """Return the ranks that have stopped, or that somebody has paused."""
    known = stops()
    found = [*known.by_hand.items(), *known.now.items()]
    return {proc: each for proc, each in found if each.uid == uid}


def _held(uid: str) -> set[str]:
    return {proc for proc in stops().held() | stops().by_hand.keys() if split_proc(proc)[0] == uid}
