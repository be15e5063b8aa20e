"""Messages that have already arrived when a thread looks for them, by a clock of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from monarch._wire.receiving.leadership import SYSTEM
from monarch._wire.receiving.loop import ReceiveLoop
from receive_loops import Box, SilentAlarm


class ArrivedMail:
    """An inbox with messages that have arrived; receiving and handling one takes some time of its clock."""

    def __init__(self, frames: int, seconds: float) -> None:
        self.frames = [b"frame"] * frames
        self.seconds = seconds
        self.now = 0.0
        self.socket = self

    def clock(self) -> float:
        return self.now

    def recv(self) -> bytes:
        self.now += self.seconds
        return self.frames.pop()

    def pending(self) -> bool:
        return bool(self.frames)

    def limit(self, milliseconds: int) -> None: ...

    def fileno(self) -> int:
        return 0


@pytest.mark.parametrize(("seconds", "left"), [(1e-6, [0]), (5e-6, range(940, 960)), (1e-3, [999])])
def test_wait_receives_what_has_arrived_for_a_moment(seconds: float, left: Sequence[int]) -> None:
    """All that has arrived, at most for a moment, and nothing more if messages arrive one by one."""
    mail: Any = ArrivedMail(100 if 0 in left else 1000, seconds)
    box = Box()
    primitives = replace(SYSTEM, clock=mail.clock, alarm=lambda _: SilentAlarm())
    receive_loop = ReceiveLoop(mail, lambda _: setattr(box, "done", True), primitives)
    assert receive_loop.wait(box, 10)
    assert len(mail.frames) in left


def test_catching_up_ends_when_nothing_is_left() -> None:
    mail: Any = ArrivedMail(3, 1e-3)

    def clock() -> float:
        mail.now += 1e-4
        return mail.now

    seen: list[bytes] = []
    receive_loop = ReceiveLoop(mail, seen.append, replace(SYSTEM, clock=clock, alarm=lambda _: SilentAlarm()))
    receive_loop.catch_up(10.0, lambda: None)
    assert len(seen) == 3
    assert mail.now < 1.0
