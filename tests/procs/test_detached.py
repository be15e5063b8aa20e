"""Detached meshes: they outlive their program until the end of a lease, and attaching one needs the key."""

from __future__ import annotations

import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from leaks import pids_named, processes, session_folders, wait_until
from monarch import job as keeping
from monarch._procs.agent import detached_records
from monarch._procs.agent.detached_records import Record, find, publish, records
from monarch._procs.agent.output_backlog import OutputBacklog
from monarch._procs.session_folder import make_folder, remove_folder
from monarch._session.detached import meshes
from monarch._wire import messages as m
from monarch._wire.keys import KeyPair
from monarch._wire.links import make_context
from monarch._wire.tcp import over_network
from monarch.actor import shutdown_context
from monarch.exceptions import ArgumentError, DetachedMeshInUseError, MonarchError, NoDetachedMeshError

pytestmark = pytest.mark.slow

ENDS = 5.0
"""Seconds until a process that was told to end has ended, on a busy machine."""

FIRST = """
import os, sys, threading, time
import monarch
from monarch.actor import Actor, endpoint, this_host
from monarch.job import keep

class Counter(Actor):
    def __init__(self, start, weights):
        self.count = start
        self.weights = weights

    @endpoint
    def add(self, more=1):
        self.count += more
        return self.count

    @endpoint
    def goes_on(self, path):
        # Once the file is there, which is made when the program is dead.
        def run():
            while not os.path.exists(path):
                time.sleep(0.005)
            for number in range(5):
                self.count += 1
                print("meanwhile", number, flush=True)
            monarch.log_metric("number", number)
            open(path + ".done", "a").close()
        threading.Thread(target=run, daemon=True).start()

    @endpoint
    def waits(self, other):
        try:
            other.hold.call_one().get()
        except Exception as error:
            self.count = -1
            print("the wait has ended with", type(error).__name__, flush=True)

    @endpoint
    def pid(self):
        return os.getpid()

class Holder(Actor):
    @endpoint
    def hold(self):
        time.sleep(1000)

if __name__ == "__main__":
    kept = keep("mine", float(sys.argv[1]))
    procs = kept.hosts.spawn_procs({"gpus": 2}, name="procs", env={"COLOUR": "green"})
    counters = procs.spawn("counters", Counter, 5, bytes(300_000))
    single = procs.slice(gpus=1).spawn("single", Counter, 0, b"")
    print(*counters.pid.call().get().values(), flush=True)
    counters.add.call().get()
    if len(sys.argv) > 2:
        counters.goes_on.call(sys.argv[2]).get()
    if len(sys.argv) > 3:
        from monarch._meshes.procs.proc_mesh import this_proc
        holder = this_proc().spawn("holder", Holder)
        single.waits.broadcast(holder)
    kept.note(b"a note")
    # What was said last has arrived when an answer to what is asked later has.
    counters.add.call().get()
    print("ready", flush=True)
    time.sleep(1000)
"""

SECOND = """
import os, sys
from monarch.job import attach

if __name__ == "__main__":
    kept = attach("mine")
    assert not kept.problems, kept.problems
    print([mesh.name for mesh in kept.procs], [dict(mesh.sizes) for mesh in kept.procs], kept.notes, flush=True)
    by_name = {mesh._name: mesh for mesh in kept.actors}
    print(sorted(by_name), by_name["counters"].sizes, by_name["single"].extent.nelements, flush=True)
    print("counts", *by_name["counters"].add.call(0).get().values(), flush=True)
    print("pids", *by_name["counters"].pid.call().get().values(), flush=True)
    {more}
    print("done", flush=True)
"""


class Program:
    """A program that runs beside the test, and can be killed."""

    def __init__(self, path: Path, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(path), *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said: list[str] = []

    def until(self, what: str) -> list[str]:
        """Read lines until this one; return those before it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            if self.said[-1] == what:
                return self.said
        raise AssertionError(f"{what!r} was not said, but {self.said}")

    def to_end(self) -> list[str]:
        """Read lines until "done"; return those before it once the program has ended, so that another may attach."""
        said = self.until("done")
        assert self.process.wait(ENDS) == 0
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def run(warm: None, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs from their text; ends them, and their detached meshes."""
    programs: list[Program] = []

    def start(text: str, *args: str) -> Program:
        path = tmp_path / f"program{len(programs)}.py"
        path.write_text(text)
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


def detached_by(run: Callable[..., Program], seconds: float, *args: str) -> tuple[Record, list[str]]:
    """Return a mesh whose program was killed: its record, and the pids of its ranks."""
    first = run(FIRST, str(seconds), *args)
    pids = first.until("ready")[0].split()
    first.kill()
    assert wait_until(lambda: not find("mine").user, ENDS)
    # The agent removes what the program has left, too.
    assert wait_until(lambda: not any(f"-{first.process.pid}-" in name for name in session_folders()), ENDS)
    return find("mine"), pids


def lines(said: list[str], text: str) -> list[str]:
    """Return the lines of ranks that contain a text, without the ranks."""
    return [line.partition("] ")[2] for line in said if text in line]


def test_another_program_attaches_with_missed_output(run: Callable[..., Program], tmp_path: Path) -> None:
    """The mesh has kept running, and its output is shown once."""
    go = tmp_path / "go"
    record, pids = detached_by(run, 60, str(go))
    assert re.match(r"free until \d{4}-.*, for (1m|59s|58s|57s|56s|55s|5\ds)", record.state())
    go.touch()
    assert wait_until(lambda: Path(f"{go}.done").exists())
    said = run(SECOND.replace("{more}", "")).to_end()
    assert "['procs'] [{'gpus': 2}] b'a note'" in said
    assert "['counters', 'single'] {'gpus': 2} 1" in said
    assert "counts 12 12" in said
    assert f"pids {' '.join(pids)}" in said
    for number in range(5):
        ranks = [line for line in said if line.endswith(f"] meanwhile {number}")]
        found = "".join(re.findall(r"\[ranks? ([^\]]+)\]", "".join(ranks)))
        # Of both ranks, as one line or as two.
        assert found in ("0-1", "01", "10"), said
    assert not [line for line in said if "lost" in line]
    # A third one: output that was shown is not shown again.
    said = run(SECOND.replace("{more}", "")).until("done")
    assert "counts 12 12" in said and not lines(said, "meanwhile")


def test_attached_mesh_has_the_state_of_its_ranks(run: Callable[..., Program], tmp_path: Path) -> None:
    """Also of idle ranks, which report nothing any more, and with what they logged while nobody was attached."""
    go = tmp_path / "go"
    _, pids = detached_by(run, 60, str(go))
    go.touch()
    assert wait_until(lambda: Path(f"{go}.done").exists())
    more = """
    import time
    from monarch.telemetry import state_of
    until = time.monotonic() + 20
    while time.monotonic() < until:
        model = state_of(kept.procs[0])
        if all(rank.state.value == "idle" and rank.usage.rss for rank in model.ranks) and len(model.series) == 2:
            break
        time.sleep(0.05)
    assert all(rank.usage.rss for rank in model.ranks), model.ranks
    print("states", *[rank.state.value for rank in model.ranks], *[rank.pid for rank in model.ranks], flush=True)
    print("logged", [(series.rank, series.values) for series in model.series.values()], flush=True)
"""
    said = run(SECOND.replace("{more}", more.strip())).until("done")
    assert f"states idle idle {' '.join(pids)}" in said
    assert any(line.startswith("logged") and "(0, [4.0])" in line and "(1, [4.0])" in line for line in said), said


def test_attached_mesh_spawns_and_heals(run: Callable[..., Program]) -> None:
    """New procs and actors on the detached host; replacements for dead ranks, started like the first."""
    more = """
    import signal, time
    from monarch._state.heal import heal_mesh
    procs = kept.procs[0]
    print(procs.execute(lambda: os.environ["COLOUR"]).item(gpus=0), flush=True)
    victim = by_name["counters"].slice(gpus=1).pid.call_one().get()
    os.kill(victim, signal.SIGKILL)
    try:
        while True:
            by_name["counters"].add.call(0).get()
    except Exception as error:
        print(type(error).__name__, flush=True)
    heal_mesh(procs)
    print("healed", *by_name["counters"].add.call(0).get().values(), flush=True)
    print(procs.execute(lambda: os.environ["COLOUR"]).item(gpus=1), flush=True)
    fresh = kept.hosts.spawn_procs({"gpus": 1}, name="fresh")
    print("fresh", fresh.execute(os.getppid).item(gpus=0) == kept._record.pid, flush=True)
    by_name["single"].stop().get()
    """.replace("\n    ", "\n    ")
    detached_by(run, 60)
    said = run(SECOND.replace("{more}", more.strip())).to_end()
    assert said.count("green") == 2 and "SupervisionError" in said and "fresh True" in said
    assert "healed 7 5" in said
    after = run(
        "from monarch.job import attach\nk = attach('mine')\n"
        "print(sorted(p.name for p in k.procs), [a._name for a in k.actors], flush=True)\nprint('done')"
    )
    assert "['fresh', 'procs'] ['counters']" in after.until("done")


ROLES = """
import time
from monarch.actor import Role
from monarch.job import keep

if __name__ == "__main__":
    kept = keep("mine", "1m")
    roles = {"train": Role(1), "load": Role(1, env={"COLOUR": "red"})}
    kept.hosts.spawn_procs(name="procs", roles=roles, restart="on-failure", spares=1).initialized.get()
    print("\\nready", flush=True)
    time.sleep(1000)
"""

ROLES_AGAIN = """
import os, signal, time
from monarch.job import attach

if __name__ == "__main__":
    (procs,) = attach("mine").procs
    def look(mesh):
        return mesh.execute(lambda: (os.getpid(), os.environ.get("COLOUR"))).item(procs=0)
    pids = [look(procs.role(name))[0] for name in ("train", "load")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    # Those that take their places are as these were.
    while True:
        try:
            found = [look(procs.role(name)) for name in ("train", "load")]
        except Exception:
            continue
        if not {pid for pid, _ in found} & {*pids}:
            break
    print([colour for _, colour in found], flush=True)
    print("done", flush=True)
"""


def test_roles_spares_and_restarts_survive_detach(run: Callable[..., Program]) -> None:
    first = run(ROLES)
    first.until("ready")
    first.kill()
    assert wait_until(lambda: not find("mine").user, ENDS)
    said = run(ROLES_AGAIN).until("done")
    assert "[None, 'red']" in said


def test_program_suspended_past_lease_can_reattach(run: Callable[..., Program]) -> None:
    """Its connection is lost; then the mesh is free for others, and for itself when it resumes."""
    text = FIRST.replace(
        'print("ready", flush=True)\n    time.sleep(1000)',
        'print("ready", flush=True)\n'
        "    while kept.attached:\n        time.sleep(0.01)\n"
        '    print("lost", flush=True)\n'
        "    from monarch.job import attach\n"
        '    again = [mesh for mesh in attach("mine").actors if mesh._name == "counters"][0]\n'
        '    print("counts", *again.add.call(0).get().values(), flush=True)\n'
        '    kept.end()\n    print("done", flush=True)',
    )
    first = run(text, "60")
    first.until("ready")
    first.process.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: not find("mine").user, 30)
    first.process.send_signal(signal.SIGCONT)
    said = first.until("done")
    assert "lost" in said and "counts 7 7" in said
    assert first.process.wait(30) == 0 and not records()


def test_death_of_program_frees_its_callers(run: Callable[..., Program]) -> None:
    detached_by(run, 60, "/nowhere/there", "waits")
    said = run(SECOND.replace("{more}", 'print("single", by_name["single"].add.call_one(0).get(), flush=True)'))
    assert "single -1" in said.until("done")
    assert lines(said.said, "the wait has ended") == ["the wait has ended with SupervisionError"]


def test_lease_end_ends_everything(run: Callable[..., Program]) -> None:
    before, folders = processes(), session_folders()
    detached_by(run, 2.0)
    assert len(processes().keys() - before.keys()) >= 4
    assert wait_until(lambda: not processes().keys() - before.keys())
    # Also leftovers of the killed program.
    assert wait_until(lambda: session_folders() <= folders) and not records()
    with pytest.raises(NoDetachedMeshError, match="'mine' does not exist; detached meshes: none"):
        keeping.attach("mine")


RESTLESS = """
from monarch.job import keep

if __name__ == "__main__":
    print("begins", flush=True)
    kept = keep("mine", "1s")
    while True:
        procs = kept.hosts.spawn_procs({"gpus": 2})
        procs.execute(int)
        procs.stop()
"""


@pytest.mark.parametrize("seed", range(8))
def test_kill_at_any_moment_leaves_nothing_after_lease(run: Callable[..., Program], seed: int) -> None:
    before, folders = processes(), session_folders()
    program = run(RESTLESS)
    program.until("begins")
    time.sleep(random.Random(seed).random() * (0.4 if seed % 2 else 2.0))
    program.kill()

    def nothing_left() -> bool:
        # If no agent existed yet, the next session sweeps the leftovers.
        remove_folder(make_folder())
        return not processes().keys() - before.keys() and session_folders() <= folders

    assert wait_until(nothing_left), (processes(), session_folders())


def test_lease_does_not_run_while_attached(run: Callable[..., Program]) -> None:
    first = run(FIRST, "1")
    first.until("ready")
    record = find("mine")
    assert record.user == first.process.pid and record.until == 0
    assert record.state() == f"in use by process {first.process.pid}; lease of 1s after that"
    # Longer than the lease.
    assert not wait_until(lambda: not find("mine").alive(), 2.0)
    first.kill()
    assert wait_until(lambda: not records())


def test_only_one_program_at_time(run: Callable[..., Program]) -> None:
    first = run(FIRST, "60")
    first.until("ready")
    with pytest.raises(
        DetachedMeshInUseError, match=rf"in use by process {first.process.pid}; attach it once that process has"
    ):
        keeping.attach("mine")
    with pytest.raises(DetachedMeshInUseError, match=r"'mine' already exists.*attach.*end"):
        keeping.keep("mine", 60)
    with pytest.raises(DetachedMeshInUseError, match=f"process {first.process.pid}"):
        keeping.end("mine")
    # It has noticed nothing.
    assert find("mine").user == first.process.pid
    first.kill()
    assert wait_until(lambda: not find("mine").user, ENDS)
    kept = keeping.attach("mine")
    assert find("mine").user == os.getpid()
    with pytest.raises(DetachedMeshInUseError, match="is already attached to this process"):
        keeping.attach("mine")
    # Detach, and attach again.
    kept.leave()
    assert wait_until(lambda: not find("mine").user, ENDS)
    kept = keeping.attach("mine")
    assert [mesh.name for mesh in kept.procs] == ["procs"] and not kept.problems
    (counters,) = [mesh for mesh in kept.actors if mesh._name == "counters"]
    assert list(counters.add.call(0).get(30).values()) == [7, 7]
    kept.end()
    assert not records()
    with pytest.raises(NoDetachedMeshError):
        keeping.end("mine")


def test_end_works_without_attaching(run: Callable[..., Program]) -> None:
    record, _ = detached_by(run, 60)
    keeping.end("mine")
    assert not record.alive() and not records()


def test_normal_exit_leaves_detached_mesh_running(run: Callable[..., Program]) -> None:
    first = run(
        FIRST.replace('time.sleep(1000)\n"', "").replace(
            'print("ready", flush=True)\n    time.sleep(1000)', 'print("ready", flush=True)'
        ),
        "60",
    )
    first.until("ready")
    assert first.process.wait(30) == 0
    assert wait_until(lambda: not find("mine").user, ENDS)
    assert "counts 7 7" in run(SECOND.replace("{more}", "")).until("done")


def test_death_of_agent_ends_detached_mesh(run: Callable[..., Program]) -> None:
    before = processes()
    record, _ = detached_by(run, 60)
    os.kill(record.pid, signal.SIGKILL)
    assert wait_until(lambda: not processes().keys() - before.keys(), ENDS)
    assert wait_until(lambda: not records(), ENDS)


def test_leftovers_of_dead_mesh_are_reported_once(run: Callable[..., Program]) -> None:
    before = processes()
    record, _ = detached_by(run, 60)
    # The zygotes too, which would clean up: so all are suspended before the first one is killed.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in {*processes(), *pids_named("monarch-spare", before=before)} - before.keys():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    assert wait_until(lambda: not record.alive(), ENDS)
    assert [state for _, state in records()] == ["gone: its agent has died"]
    assert not records()
    assert wait_until(lambda: not processes().keys() - before.keys(), ENDS)


# Keys


def path_of(record: Record) -> Path:
    (path,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"monarch-*/{record.hosts[0].id}-*/detached-{record.name}")
    return path


def test_record_may_disappear_while_read(run: Callable[..., Program], monkeypatch: pytest.MonkeyPatch) -> None:
    record, _ = detached_by(run, 60)
    path, look = path_of(record), os.fstat

    def meanwhile(file: int) -> os.stat_result:
        monkeypatch.undo()
        keeping.end("mine")
        assert wait_until(lambda: not path.parent.exists(), ENDS)
        return look(file)

    monkeypatch.setattr(os, "fstat", meanwhile)
    assert records() == []


def test_record_readable_by_others_is_rejected(run: Callable[..., Program]) -> None:
    record, _ = detached_by(run, 60)
    path = path_of(record)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    for broken, mode in ((path, 0o640), (path.parent, 0o711)):
        usual = broken.stat().st_mode & 0o777
        broken.chmod(mode)
        with pytest.raises(MonarchError, match=r"readable by other users \(mode"):
            keeping.attach("mine")
        assert "readable by other users" in records()[0][1]
        broken.chmod(usual)
    path.write_bytes(b"{}")
    with pytest.raises(MonarchError, match="is not a record of a detached mesh"):
        keeping.attach("mine")
    path.write_bytes(msgspec.json.encode(record))
    keeping.end("mine")


def test_nobody_attaches_without_the_key(run: Callable[..., Program]) -> None:
    """At both sockets, without a key or with another one; and a record with another key is useless."""
    record, _ = detached_by(run, 60)
    from zmq.utils.monitor import recv_monitor_message

    context = make_context()
    strange = KeyPair.new()
    for own in (False, True):
        socket = context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, 0)
        if own:
            socket.set(zmq.CURVE_SERVERKEY, record.public.encode())
            socket.set(zmq.CURVE_PUBLICKEY, strange.public)
            socket.set(zmq.CURVE_SECRETKEY, strange.secret)
            over_network(socket, 5)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(record.hosts[0].address)
        socket.send(m.encode(m.Hello(m.VERSION, "s1/c1", os.getpid())))
        socket.send(m.encode(m.Bye("s1/c1")))
        assert not monitor.poll(1000) or recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)
    context.term()
    assert record.alive()
    path = path_of(record)
    false = msgspec.structs.replace(record, public=strange.public.decode(), secret=strange.secret.decode())
    path.write_bytes(msgspec.json.encode(false))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "PATIENCE_S", 1.0)
        with pytest.raises(NoDetachedMeshError, match="did not answer"):
            keeping.attach("mine")
    path.write_bytes(msgspec.json.encode(record))
    keeping.end("mine")


def test_lock_of_the_common_folder_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached_records, "_LOCK_S", 0.1)
    folder = make_folder()
    held = os.open(os.path.dirname(folder), os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    record = Record("mine", [], "", "", os.getpid(), 0, 0.0, 1.0)
    with pytest.raises(MonarchError, match=r"another process has held the lock of .*fuser"):
        publish(folder, record)
    os.close(held)
    publish(folder, record)
    assert os.path.exists(f"{folder}/detached-mine")
    remove_folder(folder)


@pytest.mark.parametrize("name", ["", "a b", "../x", "ä", "x" * 61])
def test_invalid_names_are_rejected(name: str) -> None:
    with pytest.raises(ArgumentError, match="must be a Python identifier"):
        keeping.keep(name, 60)
    with pytest.raises(ArgumentError, match="must be a Python identifier"):
        keeping.attach(name)


@pytest.mark.parametrize("duration", ["soon", 0.5, -1, 4e7, float("nan")])
def test_invalid_lease_durations_are_rejected(duration: float | str) -> None:
    with pytest.raises(ArgumentError):
        keeping.keep("mine", duration)


# What is printed meanwhile


def test_backlog_drops_the_oldest_output() -> None:
    backlog = OutputBacklog(limit=1000)
    for number in range(10):
        backlog.keep(m.Output("h/p.0", "", "", "", 0, [("stdout", number * 300, bytes(300))]))
    assert backlog.dropped == 7 * 300
    kept = [m.decode(message) for message in backlog.take()]
    assert [each.pieces[0][1] for each in kept if isinstance(each, m.Output)] == [2100, 2400, 2700]
    assert backlog.dropped == 0 and not backlog.take()
