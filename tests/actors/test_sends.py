"""A message goes to all of its receivers or to none, at whatever moment an interrupt comes; and room is given back."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, endpoint

RANKS = 4
ROUNDS = 60


class Counts(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def take(self, _: Any) -> None:
        self.count += 1

    @endpoint
    def taken(self) -> int:
        return self.count


@pytest.fixture
def switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
    signal.setitimer(signal.ITIMER_REAL, 0)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("how", ["call", "call_each", "broadcast"])
@pytest.mark.parametrize("size", [1, 200_000])
def test_interrupted_message_reaches_all_ranks_or_none(procs: Callable[..., Any], how: str, size: int) -> None:
    actors = procs(RANKS).spawn("actors", Counts)
    value = "x" * size
    send = {
        "call": lambda: actors.take.call(value),
        "call_each": lambda: actors.take.call_each([value] * RANKS),
        "broadcast": lambda: actors.take.broadcast(value),
    }[how]
    send()
    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        for number in range(ROUNDS):
            try:
                # From before the call to after it: a call takes 50 to 500 us.
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + number * 0.00001)
                send()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(set(actors.taken.call().get(60).values())) == 1
    peers = actors._members_at().peers
    assert wait_until(lambda: all(each.window.behind == 0 for each in peers)), "room was lost"


DEEP = """
import signal, sys
from monarch.actor import Actor, endpoint, this_host
from monarch.exceptions import DeadlockError

class Counts(Actor):
    @endpoint
    def taken(self):
        return 7

def deep(left):
    return deep(left - 1) if left else actor.taken.call_one().get(20)

if __name__ == "__main__":
    actor = this_host().spawn_procs({"gpus": 1}).spawn("actors", Counts)
    handler, limit = signal.getsignal(signal.SIGINT), sys.getrecursionlimit()
    actor.taken.call_one().get(20)
    ends = set()
    for left in range(limit - 150, limit):
        try:
            ends.add(deep(left))
        except DeadlockError:
            raise
        except Exception:
            ends.add("failed")
    print(sorted(map(str, ends)), actor.taken.call_one().get(20), signal.getsignal(signal.SIGINT) is handler)
"""


def test_recursion_limit_in_a_wait_leaves_the_session_usable(tmp_path: Path) -> None:
    """The wait may fail at each of its own calls, also as it hands over the task of receiving."""
    program = tmp_path / "deep.py"
    program.write_text(DEEP)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines()[-1:] == ["['7', 'failed'] 7 True"], done.stderr[-3000:]
