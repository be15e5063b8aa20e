"""The tests of messages again, with a short switch interval in the program and its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarch.actor import Actor, endpoint

INTERVAL = "1e-06"
FILES = ["test_order", "test_flow", "test_room", "test_races", "test_futures", "test_adverbs", "test_channels"]


class Tells(Actor):
    @endpoint
    def interval(self) -> float:
        return sys.getswitchinterval()


@pytest.mark.slow
def test_messages_hold_where_threads_switch_at_any_time() -> None:
    here = Path(__file__).parent
    files = [str(here / f"{name}.py") for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files, __file__],
        env={**os.environ, "MONARCH_TEST_SWITCH_INTERVAL": INTERVAL},
        capture_output=True,
        text=True,
        timeout=110,
        cwd=here.parent.parent,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"


def test_ranks_have_the_interval_of_the_run(procs: object) -> None:
    asked = float(os.environ.get("MONARCH_TEST_SWITCH_INTERVAL", "0"))
    tells = procs(2).spawn("tells", Tells)  # pyright: ignore[reportCallIssue]
    # Ranks switch more often than a program by themselves.
    assert [round(each, 7) for each in tells.interval.call().get(timeout=20).values()] == [asked or 0.001] * 2
    assert round(sys.getswitchinterval(), 7) == (asked or 0.005)
