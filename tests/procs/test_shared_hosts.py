"""Extra hosts of this machine: the fork server forks their agents too, and ties no lives together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from leaks import pids_named, processes, session_folders, wait_until
from light import LIGHT
from monarch._procs.agent.request import AgentConfig, LaunchAgent, launch
from monarch._procs.launch import fork_client
from monarch._procs.launch.local import HostAgent
from monarch._procs.launch.process import parent
from monarch._procs.os.posix import proc_start_time
from monarch._procs.session_folder import base_folder, make_folder, remove_folder
from monarch._wire.keys import KeyPair
from workers import Workers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cold")]

BOUND = 2.0
"""Seconds until nothing may be left of what was killed."""
WORKER = f"""
{LIGHT}
import sys
from monarch.worker import main
sys.exit(main())
"""
PROGRAM = (
    LIGHT
    + """
import json, os, resource, sys
from pathlib import Path
from monarch._session.workers import WorkerHosts
from monarch.actor import Actor, attach_to_workers, endpoint, this_host

LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}

def state(pid):
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        **{key: status[key].strip() for key in ("Umask", "SigBlk", "SigIgn", "Cpus_allowed_list", "CapAmb", "Groups")},
        **{name: resource.prlimit(pid, number) for name, number in LIMITS.items() if name != "RLIMIT_RTTIME"},
        "folder": os.readlink(f"/proc/{pid}/cwd"),
        "adjustment": Path(f"/proc/{pid}/oom_score_adj").read_text(),
        "group": Path(f"/proc/{pid}/cgroup").read_text(),
        "leads": os.getsid(pid) == pid,
        "priority": os.getpriority(os.PRIO_PROCESS, pid),
        "real time": resource.prlimit(pid, resource.RLIMIT_RTTIME)[0] == resource.RLIM_INFINITY,
        # Of standard input only the rank's is ever read.
        "files": [os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0] for fd in (1, 2)],
    }

class Worker(Actor):
    @endpoint
    def pids(self):
        return os.getpid(), os.getppid()

    @endpoint
    def about(self):
        return {"rank": state(os.getpid()), "agent": state(os.getppid()), "variables": dict(os.environ)}

if __name__ == "__main__":
    hosts = WorkerHosts(2, env=json.loads(sys.argv[1])).mesh
    workers = hosts.spawn_procs({"gpus": 2}).spawn("workers", Worker)
    if sys.argv[2:]:
        here = this_host().spawn_procs({"gpus": 1}).spawn("here", Worker)
        here.pids.call().get()
    print(json.dumps([list(pids) for pids in workers.pids.call().get().values()]), flush=True)
    for line in sys.stdin:
        if line == "about\\n":
            print(json.dumps(list(workers.about.call().get().values())), flush=True)
        elif line == "last\\n":
            # Those of the second host.
            print(json.dumps([list(pids) for pids in workers.slice(hosts=1).pids.call().get().values()]), flush=True)
    hosts.shutdown().get()
"""
)


class Program:
    """A program with two hosts besides its own, of two ranks each."""

    def __init__(self, folder: Path, changes: dict[str, str], env: dict[str, str], more: list[str]) -> None:
        path = folder / "hosts.py"
        path.write_text(PROGRAM)
        self.before = processes()
        self.process = subprocess.Popen(
            [sys.executable, str(path), json.dumps(changes), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **env},
        )
        pids: list[list[int]] = self._answer()
        self.ranks = [rank for rank, _ in pids]
        self.agents = list(dict.fromkeys(agent for _, agent in pids))
        assert len(self.ranks) == 4 and len(self.agents) == 2

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._answer()

    def new(self) -> dict[int, str]:
        return {pid: name for pid, name in processes().items() if pid not in self.before}

    def end(self) -> None:
        # Its standard input is closed, which ends it normally.
        self.process.communicate(timeout=20)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    before, folders = processes(), session_folders()
    programs: list[Program] = []

    def begin(*more: str, changes: dict[str, str] | None = None, **env: str) -> Program:
        programs.append(Program(tmp_path, changes or {}, env, [*more]))
        return programs[-1]

    yield begin
    for program in programs:
        program.end()
    assert wait_until(lambda: processes().keys() <= before.keys() and session_folders() <= folders, 5)


def servers(before: dict[int, str]) -> list[int]:
    return pids_named("monarch-server", before=before)


def is_fork(agent: int) -> bool:
    """Whether an agent is a fork of a fork server, and not a process that has imported torch by itself."""
    return Path(f"/proc/{agent}/cmdline").read_text().split("\0")[2] == "monarch._procs.zygote.fork_server"


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def gone(*pids: int) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_extra_hosts_share_one_import_with_their_program(start: Callable[..., Program]) -> None:
    program = start("own host")
    assert all(map(is_fork, program.agents))
    assert len(servers(program.before)) == 1
    # Nothing else has imported torch: no zygote is a process of its own.
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids_named("monarch-zygote", before=program.before)]
    assert commands and not any("monarch._procs.zygote.main" in command for command in commands)


def test_extra_host_is_as_if_started_without_server(start: Callable[..., Program]) -> None:
    """In another session of the server: nothing of the first one's environment is left."""
    first = start(OF_THE_FIRST="secret")
    # As by nohup.
    umask, hangup = os.umask(0o027), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        shared, alone = start(OF_BOTH="1"), start(OF_BOTH="1", MONARCH_SHARED_ZYGOTE="0")
    finally:
        os.umask(umask)
        signal.signal(signal.SIGHUP, hangup)
    assert is_fork(first.agents[0]) and is_fork(shared.agents[0]) and not is_fork(alone.agents[0])
    assert len(servers(first.before)) == 1
    for one, other in zip(shared.ask("about"), alone.ask("about"), strict=True):
        assert other["variables"].pop("MONARCH_SHARED_ZYGOTE") == "0"
        assert one["variables"]["OF_BOTH"] == "1"
        # A free port, for each mesh another.
        assert one["variables"].pop("MASTER_PORT") and other["variables"].pop("MASTER_PORT")
        assert one == other


def test_host_of_another_environment_stays_cold(start: Callable[..., Program]) -> None:
    """With a variable that torch or Python reads only when it is loaded."""
    program = start(changes={"OPENBLAS_VERBOSE": "0", "OF_THE_HOSTS": "yes"})
    assert not any(map(is_fork, program.agents))
    variables = [about["variables"] for about in program.ask("about")]
    assert all(each["OPENBLAS_VERBOSE"] == "0" and each["OF_THE_HOSTS"] == "yes" for each in variables)


def test_variables_of_extra_hosts_reach_their_ranks(start: Callable[..., Program]) -> None:
    program = start(changes={"OF_THE_HOSTS": "yes"})
    assert all(map(is_fork, program.agents))
    assert all(about["variables"]["OF_THE_HOSTS"] == "yes" for about in program.ask("about"))


def test_extra_hosts_start_while_fork_server_is_stuck(start: Callable[..., Program]) -> None:
    first = start()
    (server,) = servers(first.before)
    os.kill(server, signal.SIGSTOP)
    try:
        assert not any(map(is_fork, start().agents))
    finally:
        os.kill(server, signal.SIGCONT)


def test_killed_agent_takes_only_its_ranks(start: Callable[..., Program]) -> None:
    program, other = start(), start()
    kill(program.agents[0])
    assert wait_until(lambda: gone(program.agents[0], *program.ranks[:2]), BOUND)
    assert program.ask("last") == [[rank, program.agents[1]] for rank in program.ranks[2:]]
    assert other.ask("last") == [[rank, other.agents[1]] for rank in other.ranks[2:]]


def test_killed_server_ends_no_host(start: Callable[..., Program]) -> None:
    program = start()
    kill(*servers(program.before), *pids_named("monarch-image", before=program.before))
    assert program.ask("last") == [[rank, program.agents[1]] for rank in program.ranks[2:]]
    assert not gone(*program.agents) and not gone(*program.ranks)


@pytest.mark.parametrize("whats", ["", "agents server zygotes", "agents", "server", "server agents"])
def test_killed_program_leaves_nothing_of_its_hosts(start: Callable[..., Program], whats: str) -> None:
    folders = session_folders()
    program = start()
    known = {
        "agents": program.agents,
        "server": servers(program.before) + pids_named("monarch-image", before=program.before),
        "zygotes": pids_named("monarch-zygote", before=program.before),
    }
    kill(*(pid for what in whats.split() for pid in known[what]), program.process.pid)
    program.process.wait()
    assert wait_until(lambda: not program.new() and session_folders() <= folders, BOUND), program.new()


STARTING = (
    LIGHT
    + """
from monarch.testing import local_hosts

_client.PRELOAD.append("gated_import")
with local_hosts(2):
    pass
"""
)


def test_program_killed_in_start_leaves_no_folder(tmp_path: Path) -> None:
    """Its hosts are requested, and the fork server has none yet: only the server can remove the program's folder."""
    before, folders = processes(), session_folders()
    variables = {"PYTHONPATH": str(Path(__file__).parent), "GATE": str(tmp_path / "never")}
    program = subprocess.Popen([sys.executable, "-c", STARTING], env={**os.environ, **variables})
    try:
        assert wait_until(lambda: pids_named("monarch-image", before=before))
    finally:
        program.kill()
        program.wait()
    assert wait_until(lambda: processes().keys() <= before.keys() and session_folders() <= folders, BOUND + 3)


def test_fork_server_without_setting_leaves_no_folder(tmp_path: Path) -> None:
    """The program that starts it is killed before it has told what to import."""
    program = subprocess.Popen(["sleep", "60"])
    owner = f"{program.pid}-{proc_start_time(program.pid)}"
    for name in ("s01234567", "f0123456789"):
        (tmp_path / "monarch-0" / f"{name}-{owner}").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        command = ["-m", "monarch._procs.zygote.fork_server", str(listening.fileno())]
        server = subprocess.Popen(
            [sys.executable, *command, str(tmp_path / "monarch-0" / f"f0123456789-{owner}")],
            stdin=subprocess.PIPE,
            pass_fds=(listening.fileno(),),
        )
    kill(program.pid)
    program.wait()
    server.communicate(timeout=20)
    assert not [*tmp_path.iterdir()]


def test_killed_program_harms_no_host_of_another(start: Callable[..., Program]) -> None:
    program, other = start(), start()
    kill(program.process.pid, *program.agents)
    assert wait_until(lambda: gone(*program.agents, *program.ranks), BOUND)
    assert other.ask("last") == [[rank, other.agents[1]] for rank in other.ranks[2:]]


# Workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    program = tmp_path / "light_worker.py"
    program.write_text(WORKER)
    made = Workers(tmp_path, program=[str(program)])
    yield made
    made.close()


def test_worker_keeps_its_server_between_programs(workers: Workers, tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(
        "import sys\n"
        "from monarch.actor import attach_to_workers\n"
        "with attach_to_workers(ca=sys.argv[1], workers=[sys.argv[2]]) as hosts:\n"
        "    hosts.spawn_procs({'gpus': 1}).initialized.get(60)\n"
    )
    before = processes()
    process, address = workers.start()
    workers.wait(process)
    first, (agent,) = servers(before), workers.agents()
    assert len(first) == 1 and is_fork(agent)
    subprocess.run([sys.executable, str(script), workers.key, address], check=True, timeout=60)
    workers.wait(process)
    assert wait_until(lambda: gone(agent))
    assert servers(before) == first and all(map(is_fork, workers.agents()))


@pytest.mark.parametrize("whats", ["worker", "agent", "worker agent server"])
def test_killed_worker_leaves_nothing(workers: Workers, whats: str) -> None:
    before, folders = processes(), session_folders()
    process, _ = workers.start()
    workers.wait(process)
    known = {"worker": [process.pid], "agent": workers.agents(), "server": servers(before)}
    kill(*(pid for what in whats.split() for pid in known[what]))
    assert process.wait(10) != 0
    assert wait_until(lambda: processes().keys() <= before.keys() and session_folders() <= folders, BOUND + 3)


# Detached meshes

KEEPER = (
    LIGHT
    + """
import os, sys
from monarch.job import keep
from monarch.actor import Actor, endpoint, this_host

class Worker(Actor):
    @endpoint
    def pids(self):
        return os.getpid(), os.getppid()

if __name__ == "__main__":
    if sys.argv[1] == "beside":
        this_host().spawn_procs({"gpus": 1}).initialized.get()
    workers = keep("mine", 60).hosts.spawn_procs({"gpus": 2}).spawn("workers", Worker)
    print(*[pid for pids in workers.pids.call().get().values() for pid in pids], flush=True)
    sys.stdin.read()
"""
)


class Keeper:
    """A program that has detached a mesh of two ranks."""

    def __init__(self, folder: Path, how: str) -> None:
        path = folder / "keeper.py"
        path.write_text(KEEPER)
        self.before, self.folders = processes(), session_folders()
        self.program = subprocess.Popen(
            [sys.executable, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.program.stdout is not None
        first, self.agent, second, _ = map(int, self.program.stdout.readline().split())
        self.ranks = [first, second]

    def end(self) -> None:
        kill(self.agent)
        self.program.communicate(timeout=20)
        assert wait_until(lambda: processes().keys() <= self.before.keys(), BOUND)
        # The next session removes the rest.
        remove_folder(make_folder())
        assert session_folders() <= self.folders


@pytest.fixture
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keeper]:
    made = Keeper(tmp_path, request.param)
    yield made
    made.end()


@pytest.mark.parametrize("keeper", ["ends", "beside"], indirect=True)
@pytest.mark.parametrize("how", ["ended", "killed"])
def test_detached_mesh_outlives_program_and_server(keeper: Keeper, how: str) -> None:
    assert is_fork(keeper.agent)
    if how == "killed":
        keeper.program.kill()
    keeper.program.communicate(timeout=20)
    # No session needs the server any more.
    assert wait_until(lambda: not servers(keeper.before), 5)
    assert all(proc_start_time(pid) for pid in (keeper.agent, *keeper.ranks))


@pytest.mark.parametrize("keeper", ["beside"], indirect=True)
def test_server_ends_what_a_killed_detached_agent_left(keeper: Keeper) -> None:
    server = servers(keeper.before)
    assert len(server) == 1 and is_fork(keeper.agent)
    kill(keeper.agent)
    # It is a child of the server, which continues.
    assert wait_until(lambda: gone(keeper.agent, *keeper.ranks), BOUND)
    assert servers(keeper.before) == server


# A request


@pytest.fixture
def config() -> AgentConfig:
    public = KeyPair.new().public.decode()
    return AgentConfig("", "", "", *parent(), ["numpy"], "tcp://127.0.0.1", public)


def test_request_is_withdrawn_before_there_is_an_agent(config: AgentConfig) -> None:
    before, folders = processes(), session_folders()
    agent = HostAgent(config, announces=True)
    agent.signal(signal.SIGTERM)
    assert agent.wait(5)
    for _ in range(2):
        agent.release()
    assert wait_until(lambda: processes().keys() <= before.keys() and session_folders() <= folders, 5)


def test_stopped_agent_is_waited_for_no_longer_than_asked(config: AgentConfig) -> None:
    agent = HostAgent(config, announces=True, prefix=["sh", "-c", 'kill -STOP $$; exec "$@"', "sh"])
    assert agent.first_line(0.2) is None
    agent.signal(signal.SIGCONT)
    assert b"tcp://127.0.0.1" in (agent.first_line(60) or b"")
    agent.close(5)


def serves_as_its_own(agent: HostAgent, before: dict[int, Any]) -> None:
    """An agent tells its address, is a process of its own, and ends without a trace."""
    assert b"tcp://127.0.0.1" in (agent.first_line() or b"")
    assert not is_fork(agent.pid)
    agent.signal(signal.SIGTERM)
    assert agent.wait(5) and agent.code == 0
    agent.release()
    assert wait_until(lambda: processes().keys() <= before.keys(), 5)


def test_request_without_ticket_starts_an_agent_of_its_own(config: AgentConfig, monkeypatch: Any) -> None:
    """The server has died before it could answer, and another session has removed its folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    config.preload = ["endless_import"]
    before = processes()
    agent = HostAgent(config, announces=True)

    def folders() -> list[Path]:
        return [path.parent for pid in servers(before) for path in base_folder().glob(f"f*/pid-{pid}-*")]

    assert wait_until(folders)
    (folder,) = folders()
    kill(*servers(before))
    shutil.rmtree(folder, ignore_errors=True)
    serves_as_its_own(agent, before)


def test_agent_that_dies_before_its_claim_is_started_again(config: AgentConfig, monkeypatch: Any) -> None:
    """As when it is killed with its fork server, which has announced it already."""

    def unclaimable(*args: Any) -> LaunchAgent:
        wanted = launch(*args)
        wanted.claim = f"{wanted.ticket}/no-folder/"
        return wanted

    monkeypatch.setattr(fork_client, "launch", unclaimable)
    before = processes()
    agent = HostAgent(config, announces=True)
    serves_as_its_own(agent, before)
