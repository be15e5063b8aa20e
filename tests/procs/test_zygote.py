"""The zygote and its forks, with real processes: a small agent in a separate process takes commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch._procs.agent.zygotes import Zygote
from monarch._procs.os import posix
from monarch._procs.zygote.fork import RankSpec, find_entry
from small_agents import Agent, gone_soon

HERE = Path(__file__).parent
CORES = sorted(os.sched_getaffinity(0))


def test_agent_gets_exit_status_of_ranks(start: Callable[..., Agent]) -> None:
    agent = start()
    # Before the zygote is ready: the request waits.
    ends = agent.run("leave", [str(rank) for rank in range(8)])
    assert [end["code"] for end in ends] == list(range(8))
    assert len({end["pid"] for end in ends}) == 8
    for end in ends:
        assert end["stdout"] == f"parent {agent.process.pid} group {end['pid']}\n"
        assert end["stderr"] == ""


def test_rank_matches_its_spec(start: Callable[..., Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.setenv("REMOVED", "1")
    agent = start(preload=["numpy", "numpy.random"])
    names = "GIVEN REMOVED NEW OMP_NUM_THREADS OPENBLAS_NUM_THREADS"
    path = [str(HERE), *(entry for entry in sys.path if entry)]
    env = {"REMOVED": None, "NEW": "ü"}
    spec = {"path": path, "cwd": str(tmp_path), "affinity": CORES[:1], "threads": 3, "title": "monarch-rank7"}
    ends = agent.run("describe", [names, names], env=env, **spec)
    assert [(end["code"], end["stderr"]) for end in ends] == [(0, ""), (0, "")]
    first, second = (json.loads(end["stdout"]) for end in ends)
    numbers = [first.pop("random"), second.pop("random")]
    assert first == second
    assert first == {
        "config": names,
        "env": {
            "GIVEN": "1",
            "REMOVED": None,
            "NEW": "ü",
            "OMP_NUM_THREADS": "3",
            "OPENBLAS_NUM_THREADS": None,
        },
        "cwd": str(tmp_path),
        "argv": [""],
        "path": path,
        "main": ["__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__"],
        "comm": "monarch-rank7",
        "affinity": CORES[:1],
        "group": True,
        "sigint": True,
        "sigterm": True,
        "blocked": 0,
        # The last two are duplicates of stdout and stderr, for programs that close these.
        "fds": [0, 1, 2, 3, 4],
        "stdin": "",
        "gc": True,
        "tasks": 1,
        "threads": 1,
    }
    assert all(ours != theirs for ours, theirs in zip(*numbers, strict=True))
    assert agent.hear("ready")["problems"] == []


def test_missing_cwd_and_offline_cores_are_ignored(start: Callable[..., Agent]) -> None:
    (end,) = start().run("leave", ["4"], cwd="/no/such/folder", affinity=[1023])
    assert end["code"] == 4
    assert "cannot bind this rank to cores [1023]" in end["stderr"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("no_such_module:run", "'no_such_module:run': No module named 'no_such_module'"),
        ("rank_entries:leeve", "'rank_entries:leeve': module 'rank_entries' has no attribute"),
        ("rank_entries:", "expected 'module:function', got 'rank_entries:'"),
        ("rank_entries:__doc__", "expected a function"),
    ],
)
def test_misspelt_entry_is_named(start: Callable[..., Agent], entry: str, words: str) -> None:
    (end,) = start().run(entry, [""])
    assert end["code"] == 1
    assert words in end["stderr"]


def test_entry_may_be_in_class() -> None:
    assert find_entry("json:JSONDecoder.decode") is json.JSONDecoder.decode


def test_exit_status_tells_how_rank_ended(start: Callable[..., Agent]) -> None:
    agent = start()
    (failed,) = agent.run("fail", [""], token=1)
    assert failed["code"] == 1
    # The traceback is of the rank's code alone.
    assert failed["stderr"].startswith("Traceback") and failed["stderr"].count("  File ") == 1
    assert failed["stderr"].endswith("ValueError: this went wrong – ünd how\n")
    (text,) = agent.run("leave_with_text", [""], token=2)
    assert (text["code"], text["stderr"]) == (1, "no more\n")
    (number,) = agent.run("leave_with_number", [""], token=3)
    assert (number["code"], number["stderr"]) == (7, "")


def test_output_of_killed_rank_is_complete(start: Callable[..., Agent]) -> None:
    (end,) = start().run("say", [""])
    assert end["code"] == -signal.SIGKILL
    assert end["stdout"] == "from print\nfrom os.write\nfrom printf\nfrom a subprocess\n"
    assert end["stderr"] == "to stderr\n\\udc80 odd\n"


def test_torch_is_preimported(start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    agent = start(preload=["torch", "numpy", "zmq", "msgspec", "cloudpickle"])
    assert agent.hear("ready")["problems"] == []
    assert len(os.listdir(f"/proc/{agent.zygote}/task")) == 1
    ends = agent.run("compute", [""] * 8, threads=2)
    assert [(end["code"], end["stdout"], end["stderr"]) for end in ends] == [(0, "8.0 2 2\n", "")] * 8
    # The user's setting overrides the share.
    (end,) = agent.run("compute", [""], token=2, threads=2, env={"OMP_NUM_THREADS": "1"})
    assert end["stdout"] == "8.0 1 1\n"


def test_ranks_do_not_wait_for_collections_of_garbage(start: Callable[..., Agent]) -> None:
    (end,) = start(preload=["torch"]).run("collections", [""])
    assert end["stdout"] == "0 True\n"


def test_more_ranks_than_descriptors_in_a_packet(start: Callable[..., Agent]) -> None:
    ends = start().run("leave", [str(rank) for rank in range(130)])
    assert [end["code"] for end in ends] == list(range(130))


def test_failed_imports_are_reported_and_missing_ones_not(start: Callable[..., Agent]) -> None:
    agent = start(preload=["no_such_module", "json.no_such_module", "broken_import", "rank_entries"])
    (problem,) = agent.hear("ready")["problems"]
    assert problem.startswith("import of broken_import failed\nTraceback")
    assert "RuntimeError: cannot be imported" in problem
    assert [end["code"] for end in agent.run("leave", ["5"])] == [5]


def test_ranks_outlive_zygote(start: Callable[..., Agent]) -> None:
    agent = start(preload=["broken_import"])
    agent.fork("wait", ["", ""])
    pids = agent.forked()
    agent.wait_for_output(pids)
    os.kill(agent.zygote, signal.SIGKILL)
    reason = agent.hear("gone")["reason"]
    assert reason.startswith(f"the zygote (pid {agent.zygote}) was killed by SIGKILL")
    assert reason.endswith("RuntimeError: cannot be imported")
    assert all(posix.proc_start_time(pid) for pid in pids)
    os.kill(pids[0], signal.SIGTERM)
    assert agent.hear("exited")["code"] == -signal.SIGTERM
    assert posix.proc_start_time(pids[1])


def test_request_to_dead_zygote_fails(start: Callable[..., Agent]) -> None:
    agent = start(preload=["endless_import"])
    agent.fork("leave", ["1"], token=5)
    os.kill(agent.zygote, signal.SIGKILL)
    failed = agent.hear("failed", token=5)
    assert failed["pids"] == []
    assert "was killed by SIGKILL" in failed["reason"]
    assert agent.hear("gone")["reason"] == failed["reason"]


def test_ranks_and_zygote_end_with_their_agent(start: Callable[..., Agent], dead_controller: list[int]) -> None:
    agent = start(controller=dead_controller)
    agent.fork("wait", [""] * 4)
    pids = agent.forked()
    agent.wait_for_output(pids)
    agent.process.kill()
    assert gone_soon([*pids, agent.zygote])
    assert not agent.session.exists()


def test_live_controller_keeps_its_folder(start: Callable[..., Agent]) -> None:
    agent = start()
    agent.hear("ready")
    agent.process.kill()
    assert gone_soon([agent.zygote])
    assert (agent.session / "socket").exists()


def test_controller_dying_second_leaves_no_folder(start: Callable[..., Agent]) -> None:
    controller = subprocess.Popen(["sleep", "60"])
    agent = start(controller=[controller.pid, posix.proc_start_time(controller.pid)])
    agent.hear("ready")
    agent.process.kill()
    controller.kill()
    assert gone_soon([agent.zygote])
    assert not agent.session.exists()
    controller.wait()


def test_import_does_not_outlive_agent(start: Callable[..., Agent], dead_controller: list[int]) -> None:
    agent = start(preload=["endless_import"], controller=dead_controller)
    agent.wait_for_output([agent.zygote], b"importing")
    agent.process.kill()
    assert gone_soon([agent.zygote])
    assert not agent.session.exists()


def test_zygote_may_die_while_it_forks(start: Callable[..., Agent]) -> None:
    agent = start(preload=["disturbed_fork"], env={"DISTURB": "kill the zygote"})
    ends = agent.run("leave", [str(rank) for rank in range(6)])
    assert [end["code"] for end in ends] == list(range(6))
    assert "was killed by SIGKILL" in agent.hear("gone")["reason"]


def test_ranks_of_failed_request_run_nothing(start: Callable[..., Agent]) -> None:
    agent = start(preload=["disturbed_fork"], env={"DISTURB": "fail"})
    agent.fork("leave", ["0"] * 6)
    failed = agent.hear("failed", token=1)
    assert "2 of 6 ranks had been forked" in failed["reason"]
    assert len(failed["pids"]) == 2
    for pid in failed["pids"]:
        end = agent.hear("exited", pid=pid)
        assert (end["code"], end["stdout"], end["stderr"]) == (1, "", "")
    # The zygote itself is well.
    assert [end["code"] for end in agent.run("leave", ["3", "4"], token=2)] == [3, 4]


def test_killed_fork_helper_leaves_no_rank(start: Callable[..., Agent]) -> None:
    agent = start(preload=["disturbed_fork"], env={"DISTURB": "kill the maker"})
    agent.hear("ready")
    agent.fork("wait", [""] * 6)
    assert "exited with code -9" in agent.hear("failed", token=1)["reason"]

    def descendants() -> list[int]:
        with open(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children") as file:
            return [int(pid) for pid in file.read().split() if int(pid) != agent.zygote]

    assert gone_soon(descendants())
    assert [end["code"] for end in agent.run("leave", ["3"], token=2)] == [3]


def test_close_ends_zygote_and_not_its_ranks(start: Callable[..., Agent]) -> None:
    agent = start()
    agent.fork("wait", [""])
    (pid,) = agent.forked()
    agent.ask(ask="close")
    agent.hear("closed")
    assert posix.proc_start_time(agent.zygote) is None
    assert posix.proc_start_time(pid)
    assert agent.session.exists()


def test_every_rank_needs_its_files() -> None:
    zygote = object.__new__(Zygote)
    with pytest.raises(ValueError, match="expected 1 pairs of files, got 0"):
        zygote.fork(1, "a:b", [RankSpec({}, None, None, b"", "", [], "")], [])


def test_start_time_exists_until_process_ends() -> None:
    process = subprocess.Popen(["sleep", "60"])
    first = posix.proc_start_time(process.pid)
    assert first is not None and posix.proc_start_time(process.pid) == first
    assert posix.outlives(process.pid, first, 0)
    assert not posix.outlives(process.pid, first + 1, 0)
    process.kill()
    assert not posix.outlives(process.pid, first, 10)
    # A zombie has ended, though its pid is still taken.
    assert posix.proc_start_time(process.pid) is None
    process.wait()
    assert posix.proc_start_time(process.pid) is None
