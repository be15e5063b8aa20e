"""The way of output, reports and news of starts from an agent to the program: with many hosts, by another agent.

That agent may die, so each message is kept until the program has it, and is sent again by another way. The program gets
a contiguous part of them by each way, and drops what it has got before; so sending again is always safe.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from monarch._procs.agent.merging import Merging
from monarch._procs.agent.router import Router
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m

_LOOK = 1.0
"""Seconds between checks of whether messages arrive by another agent."""


class _Kept(NamedTuple):
    """A message that the program may not have."""

    number: int
    body: bytes
    since: float
    """When it was sent first."""


class Uplink:
    """Sends some messages of an agent to the program by way of another agent. Used by the agent's one thread.

    Args:
        router: of the agent.
        later: runs a function after some seconds.
    """

    def __init__(self, router: Router, later: Callable[[float, Callable[[], None]], None]) -> None:
        self._router = router
        self._later = later
        self._proc = router.proc
        self._merging = Merging(self._proc, later, self._count, router.post)
        self._dst: str = ""
        """The program that has told the way; empty if none has, and then nothing has a number."""
        self._via: str = ""
        """The agent that merges the messages, which may be this one; empty if they go straight."""
        self._next: str = ""
        """The agent that will, once all that went before it has been taken up to ``_barrier``."""
        self._barrier = 0
        self._last = 0
        self._kept: deque[_Kept] = deque()
        self._looks = False
        """Whether a check is arranged."""
        self._straight = 0
        """Number up to which they have been sent straight."""
        router.overtaking = self._overtaken

    def _count(self) -> int:
        self._last += 1
        return self._last

    # Sending

    def add(self, dst: str, body: bytes) -> bool:
        """Send a message of one frame; return False if it must be sent as any other."""
        if not self._dst or dst != self._dst:
            return False
        if self._via == self._proc:
            self._merging.add(self._proc, dst, self._count(), body)
            return True
        self._keep(body)
        if self._via:
            self._post_by_way(self._kept[-1])
            self._look_later()
        else:
            self._settle()
        return True

    def mention(self, dst: str, frames: list[Any]) -> None:
        """Send a message that may be lost with an agent on its way."""
        if self._via == self._proc and dst == self._dst:
            self._merging.add(self._proc, dst, 0, frames[0])
        elif self._via and dst == self._dst:
            self._router.post(self._via, [m.encode(m.Upward(self._proc, dst, 0, frames[0]))])
        else:
            self._router.post(dst, frames)

    def before_answers(self, via: str) -> None:
        """Let nothing be overtaken by answers that go by way of an agent."""
        if via != self._via:
            self._settle()

    def _overtaken(self, dst: str) -> None:
        if dst == self._dst:
            self._settle()

    def _settle(self) -> None:
        """Send straight what the program may not have: other messages must not overtake it."""
        self._merging.flush()
        if not self._kept or self._kept[-1].number <= self._straight:
            return
        for kept in self._kept:
            if kept.number > self._straight:
                self._straight = kept.number
                self._router.post(self._dst, [self._upward(kept)])

    def _keep(self, body: bytes) -> None:
        self._kept.append(_Kept(self._count(), body, time.monotonic()))

    def _upward(self, kept: _Kept) -> bytes:
        return m.encode(m.Upward(self._proc, self._dst, kept.number, kept.body))

    def _post_by_way(self, kept: _Kept) -> None:
        if self._via and not self._router.post(self._via, [self._upward(kept)]):
            self.lost(host_of(self._via))

    def _look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._later(_LOOK, self._look)

    def _look(self) -> None:
        """Send straight if nothing arrives by another agent, such as one that this host does not reach."""
        self._looks = False
        if self._kept and self._via not in ("", self._proc):
            if self._kept[0].since < time.monotonic() - self._router.lease:
                self.lost(host_of(self._via))
            else:
                self._look_later()

    # The way

    def on_uplink(self, uplink: m.Uplink) -> None:
        """Follow the program, which has told another way."""
        if uplink.src == self._dst and uplink.via == (self._next or self._via):
            return
        if uplink.src != self._dst:
            self.reset()
            self._dst = uplink.src
        self._settle()
        self._via = self._next = ""
        if uplink.via == self._proc:
            self._via = uplink.via
        elif uplink.via:
            # Not before all that went straight has arrived.
            self._next = uplink.via
            self._keep(b"")
            self._barrier = self._last
            self._settle()

    def on_upward(self, upward: m.Upward, _: list[Any]) -> None:
        """Merge a message of another agent with those of others."""
        self._merging.add(upward.src, upward.dst, upward.number, upward.body)

    def on_taken(self, taken: m.Taken, _: list[Any]) -> None:
        """Note what the program has."""
        if not taken.src.endswith("/agent"):
            self._merging.taken(taken.number)
        while self._kept and self._kept[0].number <= taken.number:
            self._kept.popleft()
        if self._next and taken.number >= self._barrier:
            self._via, self._next = self._next, ""
            if not self._router.knows(self._via):
                # The connection to it broke meanwhile, and the program learns of that.
                self._via = ""
                return
            # To notice its loss also before anything is sent.
            self._router.connect(host_of(self._via))
            for kept in list(self._kept):
                self._post_by_way(kept)
            self._look_later()

    def lost(self, host: str) -> None:
        """Send straight what an agent may not have passed on."""
        if host in (host_of(self._via), host_of(self._next)):
            self._via = self._next = ""
            self._settle()

    def close(self) -> None:
        """Send what waits, before this agent ends."""
        self._settle()

    def reset(self) -> None:
        """Forget the program, which is gone, and what it has not taken."""
        self._dst = self._via = self._next = ""
        self._kept.clear()
        self._straight = self._last
