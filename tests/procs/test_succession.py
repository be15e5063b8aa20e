"""A zygote that hands over to a successor with more imports, with real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from leaks import wait_until
from monarch._procs.os import posix
from small_agents import Agent, gone_soon

Start = Callable[..., Agent]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that lets the successor continue once it exists."""
    return tmp_path / "gate"


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def warming(agent: Agent) -> int:
    """Pid of the successor, once it imports."""
    agent.hear("ready")
    assert wait_until(lambda: children(agent.zygote))
    (pid,) = children(agent.zygote)
    agent.wait_for_output([pid], b"warming")
    agent.pids.append(pid)
    return pid


def gated(start: Start, gate: Path, **setup: object) -> Agent:
    return start(later=["gated_import"], env={"GATE": str(gate)}, **setup)


def test_ranks_have_the_imports_of_the_successor(start: Start, gate: Path) -> None:
    agent = gated(start, gate)
    successor = warming(agent)
    # The zygote serves on meanwhile.
    assert [end["code"] for end in agent.run("has", ["gated_import"])] == [0]
    gate.touch()
    assert agent.hear("succeeded")["pid"] == successor
    assert gone_soon([agent.zygote])
    ends = agent.run("has", ["gated_import"] * 2, token=2)
    assert [end["code"] for end in ends] == [1, 1]
    (end,) = agent.run("leave", ["3"], token=3)
    assert end["code"] == 3 and f"parent {agent.process.pid} " in end["stdout"]
    assert Path(f"/proc/{successor}/comm").read_text() == "monarch-zygote\n"


def test_requests_during_handover_are_answered(start: Start, gate: Path) -> None:
    agent = gated(start, gate)
    warming(agent)
    for token in range(1, 40):
        agent.fork("leave", ["5"] * 3, token=token)
        if token == 20:
            gate.touch()
    pids = [pid for token in range(1, 40) for pid in agent.forked(token)]
    assert [agent.hear("exited", pid=pid)["code"] for pid in pids] == [5] * len(pids)
    agent.hear("succeeded")
    assert [end["code"] for end in agent.run("leave", ["6"], token=50)] == [6]


def test_module_with_thread_is_left_to_ranks(start: Start, gate: Path) -> None:
    agent = start(later=["threaded_import", "gated_import"], env={"GATE": str(gate)})
    successor = warming(agent)
    gate.touch()
    assert gone_soon([successor]) and wait_until(lambda: not children(agent.zygote))
    assert [end["code"] for end in agent.run("has", ["threaded_import"])] == [0]
    assert posix.proc_start_time(agent.zygote) and not any(each["event"] == "succeeded" for each in agent.seen)


def test_modules_that_are_missing_or_fail_are_left_out(start: Start) -> None:
    agent = start(later=["no_such_module", "broken_import", "wave"])
    agent.pids.append(agent.hear("succeeded")["pid"])
    assert [end["code"] for end in agent.run("has", ["wave"])] == [1]


def test_death_of_zygote_ends_successor(start: Start, gate: Path) -> None:
    agent = gated(start, gate)
    successor = warming(agent)
    os.kill(agent.zygote, signal.SIGKILL)
    assert "was killed by SIGKILL" in agent.hear("gone")["reason"]
    assert gone_soon([successor])


def test_death_of_successor_changes_nothing(start: Start, gate: Path) -> None:
    agent = gated(start, gate)
    os.kill(warming(agent), signal.SIGKILL)
    assert wait_until(lambda: not children(agent.zygote))
    assert [end["code"] for end in agent.run("leave", ["4"])] == [4]


def test_death_of_serving_successor_is_reported(start: Start, gate: Path) -> None:
    agent = gated(start, gate)
    successor = warming(agent)
    gate.touch()
    agent.hear("succeeded")
    agent.fork("wait", [""])
    (rank,) = agent.forked()
    agent.wait_for_output([rank])
    os.kill(successor, signal.SIGKILL)
    assert agent.hear("gone")["reason"].startswith(f"the zygote (pid {successor}) was killed by SIGKILL")
    assert posix.proc_start_time(rank)


@pytest.mark.parametrize("serves", [False, True])
def test_zygote_and_successor_end_with_the_agent(
    start: Start, gate: Path, dead_controller: list[int], serves: bool
) -> None:
    agent = gated(start, gate, controller=dead_controller)
    successor = warming(agent)
    if serves:
        gate.touch()
        agent.hear("succeeded")
    agent.fork("wait", ["", ""])
    ranks = agent.forked()
    agent.wait_for_output(ranks)
    agent.process.kill()
    assert gone_soon([*ranks, agent.zygote, successor])
    assert not agent.session.exists()


def test_close_ends_successor(start: Start, gate: Path) -> None:
    agent = gated(start, gate)
    successor = warming(agent)
    gate.touch()
    agent.hear("succeeded")
    agent.ask(ask="close")
    agent.hear("closed")
    assert posix.proc_start_time(successor) is None and agent.session.exists()
