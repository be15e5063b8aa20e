"""Detached meshes on hosts of launchers: a process holds the hosts, and programs come and go."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from termios import TIOCOUTQ
from typing import Any

import pytest
from msgspec import Struct

import slurm
import sshd
from leaks import processes, session_folders, sweep_as_the_next_program, wait_until
from light import LIGHT
from monarch._procs.agent.detached_records import RecordedHost, find, records
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.holding.held import HeldLaunch
from monarch._procs.launch.holding.holder import _CLAIM_S, Holder
from monarch._procs.launch.holding.messages import PACKET, HoldOrder, connect
from monarch._procs.launch.interface import HostRequest
from monarch._procs.launch.process import ProcessLaunch, ProcessLauncher
from monarch._session import greeting, session
from monarch._session.detached import meshes
from monarch._wire.keys import KeyPair
from monarch.actor import shutdown_context
from monarch.exceptions import ArgumentError, DetachedMeshInUseError, MonarchError, NoDetachedMeshError, SpawnError
from monarch.job import DetachedMesh, attach, end, keep

pytestmark = pytest.mark.slow

ENDS = 15.0
"""Seconds until processes that were told to end have ended, on a busy machine."""
FIRST = """
import json, os, sys, threading, time
from monarch.actor import Actor, current_rank, endpoint
from monarch.job import keep

class Worker(Actor):
    def __init__(self):
        self.count = 0

    @endpoint
    def add(self):
        self.count += 1
        return self.count

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def asks(self, others, path):
        # Once the program is dead: the other hosts are still reached.
        def run():
            while not os.path.exists(path):
                time.sleep(0.005)
            told = sum(others.add.call().get(30).values())
            print("meanwhile", told, flush=True)
            open(path + ".done", "w").close()
        threading.Thread(target=run, daemon=True).start()

if __name__ == "__main__":
    on, hosts, seconds, options, go = sys.argv[1:]
    kept = keep("mine", float(seconds), on=on, hosts=int(hosts), options=json.loads(options),
                tell=lambda line, _: print(line, flush=True))
    print("left", kept.left(), flush=True)
    procs = kept.hosts.spawn_procs({"gpus": 2}, name="far")
    workers, others = procs.spawn("workers", Worker), procs.spawn("others", Worker)
    print(*workers.pid.call().get().values(), flush=True)
    if go:
        workers.slice(hosts=0, gpus=0).asks.call_one(others, go).get()
    print("ready", flush=True)
    time.sleep(1000)
"""
SECOND = """
import os, sys, time
from monarch._state.heal import heal_mesh
from monarch.job import attach

if __name__ == "__main__":
    kept = attach("mine")
    print(len(kept.problems), kept.hosts.sizes, [dict(mesh.sizes) for mesh in kept.procs], flush=True)
    by_name = {mesh._name: mesh for mesh in kept.actors}
    print(*by_name["workers"].pid.call().get().values(), flush=True)
    print("counts", *by_name["others"].add.call().get().values(), flush=True)
    for how in sys.argv[1:]:
        if how == "end":
            kept.end()
        elif how == "heal":
            (procs,) = kept.procs
            os.kill(by_name["workers"].slice(hosts=1, gpus=1).pid.call_one().get(), 9)
            while True:
                try:
                    by_name["workers"].pid.call().get()
                except Exception:
                    break
            heal_mesh(procs)
            print("healed", *by_name["others"].add.call().get().values(), flush=True)
            more = kept.hosts.spawn_procs({"gpus": 1}, name="more")
            print("more", more.sizes, flush=True)
    print("done", flush=True)
"""

STARTING = """
import time
from monarch.job import keep

if __name__ == "__main__":
    keep("mine", 60, on="process:2", tell=lambda line, _: print(line, flush=True) or time.sleep(1000))
"""
STOPPED = """
import time
from monarch.job import keep

if __name__ == "__main__":
    keep("mine", 60, on="process:2", silence=1)
    print("ready", flush=True)
    time.sleep(1000)
"""


class Program:
    """A program that runs beside the test."""

    def __init__(self, path: Path, *args: str) -> None:
        command = [sys.executable, str(path), *args]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said: list[str] = []

    def until(self, what: str) -> str:
        """Read lines until one that begins so; return it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            if line.startswith(what):
                return self.said[-1]
        raise AssertionError(f"{what!r} was not said, but {self.said}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def run(warm: None, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs from their text; at the end nothing may be left of them."""
    before, folders = processes(), session_folders()
    programs: list[Program] = []

    def start(text: str, *args: str) -> Program:
        path = tmp_path / f"program{len(programs)}.py"
        path.write_text(LIGHT + text)
        programs.append(Program(path, *args))
        return programs[-1]

    yield start
    shutdown_context().get(timeout=30)
    for program in programs:
        program.kill()
    for record, _ in records():
        if record is not None and record.alive():
            os.kill(record.pid, signal.SIGTERM)
    assert wait_until(lambda: not records(), ENDS)
    assert wait_until(lambda: not processes().keys() - before.keys(), ENDS), processes().keys() - before.keys()
    assert wait_until(lambda: not session_folders() - folders, ENDS)


def first(run: Callable[..., Program], on: str = "process:2", hosts: int = 0, seconds: float = 60, go: str = "") -> str:
    """Return the pids of the ranks of a mesh whose program was killed."""
    program = run(FIRST, on, str(hosts), str(seconds), "{}", go)
    program.until("ready")
    pids = program.said[-2]
    program.kill()
    assert wait_until(lambda: not find("mine").user, ENDS)
    return pids


def agent_of(host: RecordedHost) -> int:
    """Return the pid of the agent of a simulated host."""
    (folder,) = {name.split("/")[1] for name in session_folders() if f"/{host.id}-" in name}
    return int(folder.split("-")[1])


def gone(pids: str) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids.split())


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
    assert len(kept.problems) == 1 and re.match(r"host 127\.0\.0\.1 \(\d\) does not answer", kept.problems[0])
    workers = next(mesh for mesh in kept.actors if mesh._name == "workers")
    assert len(workers.slice(hosts=0).pid.call().get().values()) == 2
    with pytest.raises(Exception, match="lost with its host"):
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
    assert re.search(r"its agent at tcp://127\.0\.0\.1:\d+ is there, but has not answered for 10 s; ", problem)
    assert "attach the mesh again" in problem
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

    monkeypatch.setattr(session, "answers_of", counted)
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
    with pytest.raises(MonarchError, match=r"mesh 'mine' is kept, but cannot be attached now: hosts .* do not answer"):
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
    with pytest.raises(MonarchError, match=r"'mine' is kept, but a host was lost|but host .* did not answer"):
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


def test_program_that_is_late_learns_that_another_has_the_mesh(run: Callable[..., Program]) -> None:
    """Both were connected to the process that holds the hosts; it has not ended for the one that is too late."""
    first(run)
    record = find("mine")
    late, soon = HeldLaunch(record.holder), HeldLaunch(record.holder)
    soon.stay()
    for _ in range(2):
        with pytest.raises(DetachedMeshInUseError, match=f"'mine' is in use by process {os.getpid()}; attach it once"):
            late.stay()
    late.leave()
    os.kill(record.pid, signal.SIGKILL)
    with pytest.raises(NoDetachedMeshError, match="the process that held its hosts has ended"):
        soon.stay()
    soon.leave()


class _Unknown(Struct, tag=True):
    """A request of another version."""


def test_request_of_another_version_is_no_other_program(run: Callable[..., Program]) -> None:
    """There is nobody whose end would help."""
    kept = keep("mine", 60, on="process:1")
    record = find("mine")
    launch = HeldLaunch(record.holder)
    for _ in range(2):
        with pytest.raises(MonarchError, match=rf"process {record.pid}, .* has another version of monarch") as raised:
            launch._ask(_Unknown())  # type: ignore[arg-type]
        assert not isinstance(raised.value, DetachedMeshInUseError)
    launch.leave()
    assert kept.attached
    kept.end()


def test_request_that_the_holder_did_not_read_has_an_answer(run: Callable[..., Program]) -> None:
    """It comes when the holder is about to part from its program."""
    first(run)
    record = find("mine")
    late, soon = HeldLaunch(record.holder), HeldLaunch(record.holder)
    os.kill(record.pid, signal.SIGSTOP)
    failed: list[BaseException] = []

    def ask(launch: HeldLaunch) -> None:
        try:
            launch.stay()
        except MonarchError as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(launch,)) for launch in (soon, late)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        # Of the sender, which reads none.
        sent = [launch._connection for launch in (soon, late)][:number]
        assert wait_until(lambda sent=sent: all(array("i", ioctl(each, TIOCOUTQ, bytes(4)))[0] for each in sent), ENDS)
    os.kill(record.pid, signal.SIGCONT)
    for thread in threads:
        thread.join()
    (error,) = failed
    assert isinstance(error, DetachedMeshInUseError) and f"in use by process {os.getpid()}" in str(error)
    for launch in (soon, late):
        launch.leave()


def test_closed_connection_to_the_holder_is_an_error(run: Callable[..., Program]) -> None:
    """As after the loss of all hosts: tables of meshes ask how much time is left."""
    kept = keep("mine", 60, on="process:1")
    launch = kept._launch
    assert launch is not None
    os.kill(agent_of(find("mine").hosts[0]), signal.SIGKILL)
    assert wait_until(lambda: not kept.attached and launch._connection.fileno() < 0, ENDS)
    assert kept.left() is None
    for use in (lambda: launch.watch(0), lambda: launch.connect(launch.joined[0], []), launch.stay):
        with pytest.raises(MonarchError, match="this program has left the hosts that process"):
            use()
    launch.leave()
    kept.end()


def test_one_program_at_a_time(run: Callable[..., Program]) -> None:
    program = run(FIRST, "process:2", "0", "60", "{}", "")
    program.until("ready")
    for use in (lambda: attach("mine"), lambda: end("mine"), lambda: keep("mine", 60, on="process:2")):
        with pytest.raises(DetachedMeshInUseError, match=str(program.process.pid)):
            use()
    program.kill()
    kept = attach("mine")
    kept.leave()
    kept = attach("mine")
    assert kept.attached and not kept.problems
    kept.end()


def test_mesh_that_starts_belongs_to_its_program(run: Callable[..., Program]) -> None:
    """Others wait for it, even if some hosts have joined."""
    program = run(STARTING)
    program.until("joined 1")
    for use in (lambda: attach("mine"), lambda: end("mine")):
        with pytest.raises(DetachedMeshInUseError, match=f"is being started by process {program.process.pid}"):
            use()
    assert find("mine").user == program.process.pid
    program.kill()
    assert wait_until(lambda: not records(), ENDS)


def test_stopped_program_does_not_keep_a_mesh(run: Callable[..., Program]) -> None:
    """Another attaches it, and its lease begins when that one leaves."""
    program = run(STOPPED)
    program.until("ready")
    os.kill(program.process.pid, signal.SIGSTOP)

    def attached() -> bool:
        with suppress(DetachedMeshInUseError):
            kept.append(attach("mine"))
        return bool(kept)

    kept: list[DetachedMesh] = []
    assert wait_until(attached, ENDS)
    kept[0].leave()
    assert wait_until(lambda: not find("mine").user, ENDS)


class _Ending(list[RecordedHost]):
    """Hosts that are looked at just when the process is told to end."""

    def __iter__(self) -> Iterator[RecordedHost]:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().__iter__()


def test_holder_ends_when_told_so_as_it_looks_at_hosts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        keys = KeyPair.new()
        agent = AgentConfig("", "", "", 0, 0, [], keys=(keys.public.decode(), keys.secret.decode()))
        holder = Holder(HoldOrder("mine", 60.0, "process", 1, {}, agent, os.getpid()), str(tmp_path))
        holder._launch, holder._stays = ProcessLaunch(ProcessLauncher(), 0, HostRequest(0, agent, "mine")), True
        port = listening.getsockname()[1]
        holder.record.hosts = _Ending([RecordedHost("h", "127.0.0.1", f"tcp://127.0.0.1:{port}")])
        before = signal.signal(signal.SIGTERM, holder._on_term)
        try:
            holder._look_at_hosts()
        finally:
            signal.signal(signal.SIGTERM, before)
        # Its host is there, which is no reason to stay.
        assert holder.over


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


def test_stopped_holder_is_named(run: Callable[..., Program], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep("mine", 60, on="process:1")
    kept.leave()
    pid = find("mine").pid
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("monarch._procs.launch.holding.held._ANSWER_S", 0.1)
    with pytest.raises(MonarchError, match=f"'kill -CONT {pid}' continues it"):
        attach("mine")
    os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    end("mine")


def test_holder_survives_messages_it_does_not_know(run: Callable[..., Program]) -> None:
    kept = keep("mine", 60, on="process:1")
    with connect(find("mine").holder, ENDS) as stranger:
        assert stranger.recv(PACKET)
        stranger.send(b"of another version")
        assert b"has another version of monarch" in stranger.recv(PACKET)
        assert not stranger.recv(PACKET)
    assert kept.attached and kept.on == "process:1"
    kept.end()


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


def holders() -> list[int]:
    return [record.pid for record, _ in records() if record is not None and record.alive()]


def agents() -> list[int]:
    return [
        int(name.split("/")[1].split("-")[1])
        for record, _ in records()
        for host in (record.hosts if record is not None else [])
        for name in sorted(session_folders())
        if f"/{host.id}-" in name and name.count("/") == 1
    ]


def test_errors_of_launchers_are_told(run: Callable[..., Program], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no launcher is named 'nowhere'"):
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
