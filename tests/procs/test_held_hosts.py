"""Detached meshes on hosts of launchers: a process holds the hosts, and programs come and go."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

import slurm
import sshd
from held import ENDS, FIRST, SECOND, Program, agent_of, agents, first, gone, holders, programs_in
from leaks import processes, sweep_as_the_next_program, wait_until
from monarch._procs.agent.detached_records import find, records
from monarch._procs.launch.holding.held import HeldLaunch
from monarch._procs.launch.holding.holder import _CLAIM_S
from monarch._session import attached_hosts, greeting
from monarch._session.detached import meshes
from monarch.exceptions import ArgumentError, MonarchError, NoDetachedMeshError, SpawnError
from monarch.job import attach, end, keep

pytestmark = pytest.mark.slow


@pytest.fixture
def run(warm: None, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs from their text; at the end nothing may be left of them."""
    with programs_in(tmp_path) as start:
        yield start


def test_hosts_outlive_their_program(run: Callable[..., Program], tmp_path: Path) -> None:
    """Ranks of all hosts go on, reach each other, and belong to the next program."""
    go = tmp_path / "go"
    pids = first(run, go=str(go))
    go.touch()
    assert wait_until(lambda: Path(f"{go}.done").exists(), ENDS)
    second = run(SECOND, "heal", "end")
    second.until("done")
    assert second.process.wait(ENDS) == 0
    said = second.said
    assert [line for line in said if line.endswith("meanwhile 4")], said
    assert "0 {'hosts': 2} [{'hosts': 2, 'gpus': 2}]" in said
    assert pids in said
    assert "counts 2 2 2 2" in said
    assert "healed 3 3 3 1" in said
    assert "more {'hosts': 2, 'gpus': 1}" in said
    assert not records() and gone(pids)


def test_attached_mesh_lacks_the_hosts_that_died_meanwhile(run: Callable[..., Program]) -> None:
    first(run)
    os.kill(agent_of(find("mine").hosts[1]), signal.SIGKILL)
    kept = attach("mine")
    (problem,) = kept.problems
    assert re.match(rf"host {re.escape(gethostname())} \(\d+\) does not answer", problem)
    workers = next(mesh for mesh in kept.actors if mesh._name == "workers")
    assert len(workers.slice(hosts=0).pid.call().get().values()) == 2
    with pytest.raises(Exception, match="lost with"):
        workers.slice(hosts=1).pid.call().get()
    kept.end()
    assert not records()


def test_stopped_host_is_named_with_what_to_do(run: Callable[..., Program]) -> None:
    """It is no host that is gone, nor one with another key."""
    first(run)
    agent = agent_of(find("mine").hosts[1])
    os.kill(agent, signal.SIGSTOP)
    kept = attach("mine")
    (problem,) = kept.problems
    assert re.search(r"its agent at tcp://127\.0\.0\.1:\d+ is running, but has not answered for 10 s; ", problem)
    assert "attach it again" in problem
    kept.leave()
    os.kill(agent, signal.SIGCONT)
    assert wait_until(lambda: not find("mine").user, ENDS)
    kept = attach("mine")
    assert not kept.problems
    workers = next(mesh for mesh in kept.actors if mesh._name == "workers")
    assert len(workers.pid.call().get().values()) == 4
    kept.end()
    assert not records()


def test_stopped_hosts_are_asked_at_the_same_time(run: Callable[..., Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one wait for all, and one sentence; the mesh is kept, even if no host answers."""
    first(run, on="process:3")
    agents = [agent_of(host) for host in find("mine").hosts]
    waits: list[float] = []
    usual = greeting.answers_of

    def counted(some: Sequence[greeting.Greeting], timeout: float, ended: Callable[[str], bool], patient: bool) -> Any:
        waits.append(timeout)
        return usual(some, timeout, ended, patient)

    monkeypatch.setattr(attached_hosts, "answers_of", counted)
    for agent in agents[1:]:
        os.kill(agent, signal.SIGSTOP)
    kept = attach("mine")
    (problem,) = kept.problems
    assert re.search(r"^hosts \S+ \(2\) at tcp://\S+ and \S+ \(3\) at tcp://\S+ do not answer: their", problem)
    assert waits == [10]
    kept.leave()
    assert wait_until(lambda: not find("mine").user, ENDS)
    os.kill(agents[0], signal.SIGSTOP)
    # Nothing that may come back is ended.
    with pytest.raises(MonarchError, match=r"mesh 'mine' cannot be attached now: hosts .* do not answer"):
        attach("mine")
    for agent in agents:
        os.kill(agent, signal.SIGCONT)
    kept = attach("mine")
    assert not kept.problems and waits == [10, 10, 10]
    kept.leave()
    assert wait_until(lambda: not find("mine").user, ENDS)
    for agent in agents:
        os.kill(agent, signal.SIGSTOP)
    # An end is one, even if no host answers.
    end("mine")
    assert not records()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_end_is_one_though_a_host_is_lost_meanwhile(
    run: Callable[..., Program], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Between its answer and the claim."""
    first(run, on="process:2")
    agents = [agent_of(host) for host in find("mine").hosts]
    usual = meshes.ask_agents

    def lost(*args: Any) -> Any:
        monkeypatch.setattr(meshes, "ask_agents", usual)
        os.kill(agents[0], number)
        return usual(*args)

    monkeypatch.setattr(meshes, "ask_agents", lost)
    monkeypatch.setattr("monarch._session.detached.agents.PATIENCE_S", 1.0)
    with pytest.raises(MonarchError, match=r"'mine' is still detached: a host was lost|but host .* did not answer"):
        attach("mine")
    assert find("mine")
    end("mine")
    assert wait_until(lambda: not records(), ENDS)


def test_mesh_without_hosts_ends_when_it_is_attached(run: Callable[..., Program]) -> None:
    pids = first(run)
    for host in find("mine").hosts:
        os.kill(agent_of(host), signal.SIGKILL)
    assert wait_until(lambda: gone(pids), ENDS)
    # The process that holds the hosts may have noticed before.
    with pytest.raises(NoDetachedMeshError, match=r"none of its hosts answers|detached mesh 'mine'"):
        attach("mine")
    assert wait_until(lambda: not records(), ENDS)


def test_mesh_ends_once_its_hosts_have_ended(run: Callable[..., Program]) -> None:
    """Not at the end of its lease, which is long."""
    program = run(FIRST, "process:2", "0", "60", "{}", "")
    program.until("ready")
    for host in find("mine").hosts:
        os.kill(agent_of(host), signal.SIGKILL)
    program.kill()
    assert wait_until(lambda: not records(), ENDS)


def test_hosts_end_with_their_lease(run: Callable[..., Program]) -> None:
    pids = first(run, seconds=1)
    assert wait_until(lambda: not records() and gone(pids), ENDS)


def test_hosts_end_with_the_process_that_holds_them(run: Callable[..., Program]) -> None:
    pids = first(run)
    os.kill(find("mine").pid, signal.SIGKILL)
    assert wait_until(lambda: gone(pids), ENDS)
    assert wait_until(lambda: not records(), ENDS)


def test_mesh_ends_with_the_loss_of_all_hosts(run: Callable[..., Program]) -> None:
    kept = keep("mine", 60, on="process:1")
    os.kill(agent_of(find("mine").hosts[0]), signal.SIGKILL)
    # It may end by itself first.
    with suppress(NoDetachedMeshError):
        end("mine")
    assert wait_until(lambda: not records(), ENDS)
    assert wait_until(lambda: not kept.attached, ENDS)
    kept.end()


def test_host_that_dies_at_the_start_is_an_error(run: Callable[..., Program]) -> None:
    def tell(line: str, _: bool) -> None:
        if line.startswith("joined 2"):
            os.kill(agent_of(find("mine").hosts[1]), signal.SIGKILL)

    with pytest.raises(SpawnError, match="does not answer"):
        keep("mine", 60, on="process:2", tell=tell)
    assert wait_until(lambda: not records(), ENDS)


def test_interrupt_of_the_start_frees_the_name(run: Callable[..., Program], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HeldLaunch, "__init__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        keep("mine", 60, on="process:1")
    assert wait_until(lambda: not records(), _CLAIM_S / 2)


def test_program_that_dies_while_it_waits_leaves_nothing(run: Callable[..., Program], tmp_path: Path) -> None:
    """The fixture sees what is left."""
    silent = tmp_path / "ssh"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o700)
    program = run(FIRST, "ssh:far", "0", "60", f'{{"ssh": "{silent}"}}', "")
    assert wait_until(lambda: "sleep" in processes().values(), ENDS)
    program.kill()


@pytest.mark.parametrize("seed", range(40))
def test_kill_at_any_moment_leaves_nothing_after_the_lease(run: Callable[..., Program], seed: int) -> None:
    """Of the program, the holder, the hosts' agents, or several of them; the fixture sees what is left."""
    chance = random.Random(seed)
    program = run(FIRST, "process:2", "0", "1", "{}", "")
    time.sleep(chance.uniform(0, 2.5))
    victims = [lambda: [program.process.pid], holders, agents]
    for victim in chance.sample(victims, chance.choice([1, 1, 2, 3])):
        for pid in victim()[: chance.choice([1, 2])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(chance.choice([0, 0, chance.uniform(0, 0.5)]))
    program.kill()
    assert wait_until(lambda: not records(), ENDS)
    # A program killed after all other processes of its session.
    sweep_as_the_next_program()


def test_errors_of_launchers_are_told(run: Callable[..., Program], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="unknown launcher 'nowhere'"):
        keep("mine", 60, on="nowhere")
    with pytest.raises(ArgumentError, match="colour"):
        keep("mine", 60, on="process:2", options={"colour": "green"})
    with pytest.raises(ArgumentError, match="options: expected numbers"):
        keep("mine", 60, on="process:2", options={"env": object()})
    with pytest.raises(ArgumentError, match="hosts and options need a launcher"):
        keep("mine", 60, hosts=2)
    with pytest.raises(SpawnError, match="host nowhere"):
        keep("mine", 60, on="ssh:nowhere", options={"ssh": "false"})
    assert wait_until(lambda: not records(), ENDS)


@pytest.mark.skipif(bool(sshd.why_none()), reason=sshd.why_none() or "none")
@pytest.mark.parametrize("reverse", ["false", "true"])
def test_hosts_of_ssh_are_kept(run: Callable[..., Program], tmp_path: Path, reverse: str) -> None:
    hosts = sshd.SSHHosts(tmp_path)
    try:
        options = f'{{"config": "{hosts.config}", "reverse": {reverse}}}'
        program = run(FIRST, "ssh:node1,node2", "0", "60", options, "")
        program.until("ready")
        pids = program.said[-2]
        program.kill()
        second = run(SECOND, "end")
        second.until("done")
        assert "0 {'hosts': 2} [{'hosts': 2, 'gpus': 2}]" in second.said and pids in second.said
        assert second.process.wait(ENDS) == 0
        assert not records() and gone(pids)
    finally:
        hosts.close()


@pytest.mark.skipif(bool(slurm.why_none()), reason=slurm.why_none() or "none")
def test_allocation_of_slurm_is_kept(
    run: Callable[..., Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = slurm.SlurmCluster(tmp_path)
    try:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        program = run(FIRST, "slurm", "2", "60", '{"time": "10"}', "")
        assert 500 < float(program.until("left").split()[1]) <= 600
        program.until("ready")
        program.kill()
        second = run(SECOND)
        second.until("done")
        assert cluster.jobs() == ["RUNNING"] and second.process.wait(ENDS) == 0
        assert wait_until(lambda: not find("mine").user, ENDS)
        end("mine")
        assert wait_until(lambda: not cluster.jobs(), ENDS)
        # A queued request ends with its program.
        holder = subprocess.Popen(["srun", "-N3", "sleep", "100"])
        assert wait_until(lambda: cluster.jobs() == ["RUNNING"], ENDS)
        program = run(FIRST, "slurm", "2", "60", "{}", "")
        program.until("queued: job")
        program.kill()
        assert wait_until(lambda: cluster.jobs() == ["RUNNING"], ENDS)
        holder.terminate()
        holder.wait()
    finally:
        cluster.close()
