"""Jobs, commands and forwarded ports on hosts; and the ``monarch`` command."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from leaks import Kit
from monarch.actor import Actor, endpoint, this_host, this_proc
from monarch.exceptions import ArgumentError
from monarch.job import (
    JobState,
    JobTrait,
    LocalJob,
    MeshAdminConfig,
    PortForwarder,
    ProcessJob,
    TelemetryConfig,
    exec_command,
    hosts_from_config,
    job_load,
    job_loads,
    load_current_job,
    set_current_job,
)
from monarch.job.spmd import serve
from monarch.testing import local_hosts

pytestmark = pytest.mark.slow


class Pid(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def echo_server(self) -> int:
        server = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            with server:
                connection, _ = server.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data.upper())

        threading.Thread(target=serve, daemon=True).start()
        return server.getsockname()[1]


@pytest.fixture(autouse=True)
def session(host: object, leaks: Kit) -> object:
    """A session that has attached hosts before: the threads for those belong to it, not to a test."""
    with local_hosts(1):
        leaks.rebase()
    return host


@pytest.fixture
def job() -> Iterator[ProcessJob]:
    with ProcessJob({"trainers": 2, "loaders": 1}, env={"OF_THE_JOB": "yes"}) as made:
        yield made


def test_process_job_has_a_mesh_of_hosts_for_each_name(job: ProcessJob) -> None:
    assert not job.active
    state = job.state(cached_path=None)
    assert job.active and job.state() is state
    assert state.trainers.sizes == {"hosts": 2} and state.loaders.sizes == {"hosts": 1}
    actors = state.trainers.spawn_procs(per_host={"gpus": 1}).spawn("pids", Pid)
    assert len(set(actors.pid.call().get(timeout=60).values())) == 2
    assert actors.variable.call("OF_THE_JOB").get(timeout=20).values() == ["yes"] * 2
    with pytest.raises(AttributeError, match="loaders, trainers"):
        _ = state.evaluators
    job.kill()
    assert not job.active


def test_jobs_are_kept_without_their_hosts(tmp_path: Path) -> None:
    job = ProcessJob({"hosts": 1})
    job.dump(str(tmp_path / "job"))
    again = job_load(str(tmp_path / "job"))
    assert isinstance(again, ProcessJob) and again.meshes == {"hosts": 1} and not again.active
    assert isinstance(job_loads(LocalJob(["a"]).dumps()), LocalJob)
    with pytest.raises(ArgumentError, match="hosts"):
        ProcessJob({"hosts": 0})


def test_local_job_is_this_host() -> None:
    job = LocalJob(["one", "two"])
    assert job.state().one == this_host() == job.state().two
    with pytest.raises(ArgumentError, match="client_script"):
        job.apply("train.py")


class OwnJob(JobTrait):
    """A job of the user, with the methods that torchmonarch asks for."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.log: list[str] = []

    def _create(self, client_script: str | None) -> None:
        self.log.append(f"create {client_script}")

    def _state(self) -> JobState:
        self.log.append("state")
        if self.broken:
            raise OSError("no such host")
        return JobState({"trainers": this_host()})

    def _kill(self) -> None:
        self.log.append("kill")


def test_own_job_starts_and_ends_its_hosts_once() -> None:
    with OwnJob() as job:
        job.apply("train.py")
        assert job.active and job.state().trainers == job.state(cached_path=None).trainers == this_host()
        assert not job_loads(job.dumps()).active
    job.kill()
    assert not job.active and job.log == ["create train.py", "state", "kill"]
    with pytest.raises(OSError, match="no such host"):
        OwnJob(broken=True).state()
    broken = OwnJob(broken=True)
    with pytest.raises(OSError):
        broken.apply()
    assert not broken.active and broken.log == ["create None", "state", "kill"]
    with pytest.raises(NotImplementedError, match="JobTrait must implement _create"):
        JobTrait().apply()


def test_job_with_telemetry_tells_once_how_to_look(capfd: pytest.CaptureFixture[str]) -> None:
    config = TelemetryConfig(include_dashboard=True, dashboard_port=0)
    with LocalJob().enable_telemetry(config).enable_admin(MeshAdminConfig("[::]:0")) as job:
        state = job.state()
        assert state.admin_url is None and state.query_engine is None and state.hosts == job.state().hosts
        told = capfd.readouterr().err
        assert told.count("'monarch top' shows the ranks") == 1 and "no web dashboard" in told
        assert job_loads(job.dumps()).can_run(job) is False
    for asks in (LocalJob().enable_telemetry(retention_secs=1), LocalJob().enable_admin(admin_addr="[::]:0")):
        with asks:
            asks.apply()
            assert "'monarch debug' attaches to them\n" in capfd.readouterr().err
    with LocalJob() as quiet:
        quiet.apply()
        assert capfd.readouterr().err == ""
    with pytest.raises(TypeError, match="port"):
        LocalJob().enable_admin(port=1)


CURRENT = LocalJob(("trainers",))


def test_current_job_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"set_current_job\('module.name'\)"):
        load_current_job()
    set_current_job(f"{__name__}.CURRENT")
    assert load_current_job() is CURRENT
    with CURRENT:
        assert hosts_from_config("trainers").extent.sizes == this_host().extent.sizes
        with pytest.raises(ArgumentError, match="no mesh 'hosts'; it has trainers"):
            hosts_from_config("hosts")
    # As torchmonarch does for another context.
    (tmp_path / ".monarch" / "job_state.pkl").symlink_to(Path("other") / "state.pkl")
    with pytest.raises(FileNotFoundError, match="other"):
        load_current_job()
    for name, why in ((f"{__name__}.missing", "has no attribute 'missing'"), ("os.path", "expected a job, got module")):
        set_current_job(name)
        with pytest.raises(ArgumentError, match=why):
            load_current_job()
    for wrong in ("job", ".job", "a.b c", ""):
        with pytest.raises(ArgumentError, match=r"expected 'module.name'"):
            set_current_job(wrong)


def test_commands_return_their_highest_exit_code(tmp_path: Path) -> None:
    wish = {"env": {"WORD": "hello"}, "output_dir": str(tmp_path / "out"), "per_host": {"gpus": 2}}
    script = 'echo $WORD of $MONARCH_SIZE_GPUS in $PWD; exit "$MONARCH_RANK_GPUS"'
    assert exec_command(this_host(), ["sh", "-c", script], workdir=str(tmp_path), **wish).get(60) == 1
    assert (tmp_path / "out" / "stdout.txt").read_text() == f"hello of 2 in {tmp_path}\n"


def test_python_commands_run_as_main(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n    sys.exit(4)\n")
    code = exec_command(this_host(), [str(program), "a", "b"], output_dir=str(tmp_path)).get(60)
    assert code == 4 and (tmp_path / "stdout.txt").read_text() == "['a', 'b']\n"
    with pytest.raises(ArgumentError, match="rank or point"):
        exec_command(this_host(), ["true"], rank=0, point={})
    with pytest.raises(ArgumentError, match="cmd"):
        exec_command(this_host(), [])


def test_forwarded_ports_carry_bytes_both_ways() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 1})
    forwarder = this_proc().spawn("forwarder", PortForwarder)
    try:
        port = procs.spawn("service", Pid).echo_server.call_one().get(timeout=60)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            free = probe.getsockname()[1]
        forwarder.forward.call_one(procs, port, procs, f"127.0.0.1:{free}").get(timeout=60)
        text = b"through the ranks " * 20_000
        with socket.create_connection(("127.0.0.1", free), timeout=30) as connection:
            sender = threading.Thread(target=lambda: (connection.sendall(text), connection.shutdown(socket.SHUT_WR)))
            sender.start()
            received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            sender.join()
        assert received == text.upper()
        with pytest.raises(ArgumentError, match="host:port"):
            forwarder.forward.call_one(procs, port, procs, "nowhere").get(timeout=60)
    finally:
        forwarder.stop().get(timeout=20)
        procs.stop().get(timeout=20)


def run_command(*args: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, **more)  # type: ignore[call-overload]


def test_the_command_runs_commands_and_returns_their_code() -> None:
    done = run_command("exec", "-e", "WORD=hello", "--", "sh", "-c", "echo $WORD; exit 5")
    assert done.returncode == 5 and "hello" in done.stdout
    assert run_command("list").returncode == 0
    assert "does not exist" in run_command("end", "none_of_this_name").stderr
    assert "exec" in run_command("--help").stdout


def test_served_command_runs_on_its_ranks(tmp_path: Path) -> None:
    written = "os.environ['WORLD_SIZE'] + os.environ['OURS']"
    lines = f"import os, sys\nopen(sys.argv[1] + os.environ['RANK'], 'w').write({written})"
    (tmp_path / "train.py").write_text(lines)
    with serve(
        ["torchrun", "--nproc-per-node=2", str(tmp_path / "train.py"), f"{tmp_path}/"], env={"OURS": "x"}
    ) as job:
        job.run_spmd()
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2x", "2x"]
