"""The way of messages from an agent to the program: with many hosts, by another agent.

That agent may die, so each message is kept until the program has it, and is sent again by another way. The program gets
a contiguous part of them by each way, and drops what it has got before; so sending again is always safe.

An agent that another one relays sends everything by it, and gets everything by it: it lives while the connection to
that one lasts, not one with the program. If it breaks, the agent connects to the program itself, within a lease, and
asks it to connect as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monarch._procs.agent.merging import Merging
from monarch._procs.agent.routes.router import Router
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m

_LOOK = 1.0
"""Seconds between checks of whether messages arrive by another agent."""
LARGE = 1 << 20
"""Bytes of a message from which on it goes straight."""
_REST = 2.0
"""Seconds after which an unused connection to the program is closed."""
_WORD = 12
"""Leases after which an agent that has lost its way asks the program again, which may be busy."""
_PATIENCE_S = 3600.0
"""Seconds for which it asks, if the connection to the program lasts."""


class _Kept(NamedTuple):
    """A message that the program may not have."""

    number: int
    frames: Sequence[Any]
    since: float
    """When it was sent first."""


class AgentUplink:
    """Sends some messages of an agent to the program by way of another agent. Used by the agent's one thread.

    Args:
        router: the router of the agent.
        later: runs a function after some seconds.
        ended: called when the program gives no word for long, after the way to it was lost.
    """

    def __init__(
        self,
        router: Router,
        later: Callable[[float, Callable[[], None]], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._router = router
        self._later = later
        self._ended = ended
        self._proc = router.proc
        self.merging = self._merging = Merging(self._proc, later, self._count, router.post)
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
        self._to_relay = False
        """Whether the program wants everything by the way, and this agent has not said so yet."""
        self._probe = 0
        """Number of a message that shows that the way works, in both directions, when the agent on it says that it was
        taken; 0 if there is none."""
        self._turn: int = 0
        """Of the newest Uplink."""
        self.relayed = False
        """Whether everything goes by the way, so that the connection to the program may be closed."""
        self.orphan = False
        """Whether the way broke when this agent was relayed by it, and the program has not connected yet."""
        self._used = 0.0
        """When something was sent straight."""
        self._rests = False
        """Whether a check for that is arranged."""
        router.overtaking = self._overtaken
        router.carrying = self._carry

    @property
    def via(self) -> str:
        """The agent that forwards messages; empty if they go directly."""
        return self._next or self._via

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
        self._keep([body])
        self._send_newest()
        return True

    def _send_newest(self) -> None:
        if self._via:
            self._post_by_way(self._kept[-1])
            self._look_later()
        else:
            self._settle()

    def _carry(self, dst: str, frames: Sequence[Any]) -> bool:
        """Send any message by the way if this agent is relayed, and with a number if it is about to be."""
        if dst != self._dst or not (self.relayed or self._to_relay or self._next):
            return False
        self._keep([*frames])
        if self.relayed and self._via and sum(map(len, frames)) >= LARGE:
            # The agent on the way has work of its own. Later messages go by the way once this one has been taken.
            self._via, self._next, self._barrier = "", self._via, self._last
        self._send_newest()
        if self._via and not self.relayed:
            # The way may not work.
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
        """Keep answers that go through an agent from overtaking anything."""
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
                self._router.post(self._dst, self._upward(kept))
        self._used = time.monotonic()
        if self.relayed:
            self._rest_later()

    def _keep(self, frames: Sequence[Any]) -> None:
        self._kept.append(_Kept(self._count(), frames, time.monotonic()))

    def _upward(self, kept: _Kept) -> list[Any]:
        body, *more = kept.frames
        return [m.encode(m.Upward(self._proc, self._dst, kept.number, bytes(body), len(more))), *more]

    def _post_by_way(self, kept: _Kept) -> None:
        if self._via and not self._router.post(self._via, self._upward(kept)):
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
        """Use the new route that the program has announced."""
        if uplink.src == self._dst and uplink.turn == self._turn and uplink.via == (self._next or self._via):
            return
        if uplink.src != self._dst:
            self.reset()
            self._dst = uplink.src
        self._turn, self._to_relay = uplink.turn, uplink.relayed and uplink.via != self._proc
        # The program is connected now: it tells another way by its own connection only.
        self.relayed = self.orphan = False
        self._probe = 0
        self._settle()
        self._via = self._next = ""
        if uplink.via == self._proc:
            self._via = uplink.via
        elif uplink.via:
            self._next = uplink.via
            self._keep([b""])
            self._barrier = self._last
            self._settle()

    def on_upward(self, upward: m.Upward, frames: list[Any]) -> None:
        """Merge a message of another agent with those of others, if it is a small one."""
        if frames:
            self._merging.flush()
            self._router.post(upward.dst, [m.encode(upward), *frames])
        else:
            self._merging.add(upward.src, upward.dst, upward.number, upward.body)

    def on_taken(self, taken: m.Taken, _: list[Any]) -> None:
        """Note what the program has."""
        if not taken.src.endswith("/agent"):
            self._merging.taken(taken.number)
        while self._kept and self._kept[0].number <= taken.number:
            self._kept.popleft()
        if self._probe and taken.src == self._via and taken.number >= self._probe:
            self._probe = 0
            self._hang()
        if self._next and taken.number >= self._barrier:
            self._go_by_way()

    def _go_by_way(self) -> None:
        self._via, self._next = self._next, ""
        if not self._router.knows(self._via):
            # The connection to it broke meanwhile, and the program learns of that.
            self.lost(host_of(self._via))
            return
        # To notice its loss also before anything is sent.
        self._router.connect(host_of(self._via))
        for kept in list(self._kept):
            self._post_by_way(kept)
        if self._via and self._to_relay:
            self._keep([b""])
            self._probe = probe = self._last
            self._post_by_way(self._kept[-1])
            self._later(self._router.lease, lambda: self._look_for_proof(probe))
        self._look_later()

    def _look_for_proof(self, probe: int) -> None:
        if self._probe == probe:
            self.lost(host_of(self._via))

    def _hang(self) -> None:
        self._to_relay, self.relayed = False, True
        # Heartbeats are now for connections that this agent makes.
        self._router.watched_by, self._router.hurries = "", self._dst
        self._keep([m.encode(m.Relayed(self._proc, self._via, self._turn))])
        self._post_by_way(self._kept[-1])
        self._used = time.monotonic()
        self._rest_later()

    def _rest_later(self) -> None:
        if not self._rests:
            self._rests = True
            self._later(_REST, self._rest)

    def _rest(self) -> None:
        """Close the connection to the program if it has not been used for a while."""
        self._rests = False
        if not self.relayed:
            return
        if self._kept or not self._via or self._used > time.monotonic() - _REST:
            self._rest_later()
        else:
            self._router.rest(self._dst)

    def lost(self, host: str) -> None:
        """Send straight what an agent may not have passed on."""
        if host not in (host_of(self._via), host_of(self._next)):
            return
        self._via = self._next = ""
        tried, self._to_relay, self._probe = self._to_relay, False, 0
        if not self.relayed:
            if tried:
                # The program says when to try again.
                self._keep([m.encode(m.Relayed(self._proc, "", self._turn))])
            self._settle()
            return
        self.relayed, self.orphan = False, True
        # To learn whether the program is there: all is sent by a connection with heartbeats from now on, which an
        # earlier one need not have.
        self._router.rest(self._dst)
        self._straight = self._before_kept()
        self._router.connect(self._dst)
        self._keep([m.encode(m.Relayed(self._proc, "", self._turn))])
        self._settle()
        self._ask_later(self._turn, time.monotonic() + _PATIENCE_S)

    def _ask_later(self, turn: int, until: float) -> None:
        self._later(_WORD * self._router.lease, lambda: self._look_for_word(turn, until))

    def _look_for_word(self, turn: int, until: float) -> None:
        if not self.orphan or self._turn != turn:
            return
        if time.monotonic() > until:
            self._ended()
            return
        asks = m.encode(m.Relayed(self._proc, "", turn))
        self._router.post(self._dst, [m.encode(m.Upward(self._proc, self._dst, 0, asks))])
        self._ask_later(turn, until)

    def straight_lost(self) -> None:
        """Send again what was sent by a connection to the program that broke, while it is not needed."""
        self._straight = self._before_kept()
        if not self._via:
            self._settle()

    def _before_kept(self) -> int:
        return self._kept[0].number - 1 if self._kept else self._last

    def close(self) -> None:
        """Send what waits, before this agent ends."""
        self._settle()

    def reset(self) -> None:
        """Forget the program, which has ended, and the messages that it has not taken."""
        self._dst = self._via = self._next = ""
        self._to_relay = self.relayed = self.orphan = False
        self._turn = self._probe = 0
        self._kept.clear()
        self._straight = self._last
