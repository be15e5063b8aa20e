"""The process that holds the hosts of a detached mesh: its programs, one at a time, of other versions, or stopped."""

from __future__ import annotations

import os
import signal
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from termios import TIOCOUTQ

import pytest
from msgspec import Struct

from held import ENDS, FIRST, STARTING, STOPPED, Program, agent_of, first, programs_in
from leaks import wait_until
from monarch._procs.agent.detached_records import RecordedHost, find, records
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.holding.held import HeldLaunch
from monarch._procs.launch.holding.holder import Holder
from monarch._procs.launch.holding.messages import PACKET, HoldOrder, connect
from monarch._procs.launch.interface import HostRequest
from monarch._procs.launch.process import ProcessLaunch, ProcessLauncher
from monarch._wire.keys import KeyPair
from monarch.exceptions import DetachedMeshInUseError, MonarchError, NoDetachedMeshError
from monarch.job import DetachedMesh, attach, end, keep

pytestmark = pytest.mark.slow


@pytest.fixture
def run(warm: None, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs from their text; at the end nothing may be left of them."""
    with programs_in(tmp_path) as start:
        yield start


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
        with pytest.raises(MonarchError, match=rf"process {record.pid}, .* runs another monarch version") as raised:
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
        with pytest.raises(MonarchError, match="this program has disconnected from process"):
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


def test_stopped_holder_is_named(run: Callable[..., Program], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep("mine", 60, on="process:1")
    kept.leave()
    pid = find("mine").pid
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("monarch._procs.launch.holding.held._ANSWER_S", 0.1)
    with pytest.raises(MonarchError, match=f"'kill -CONT {pid}' resumes it"):
        attach("mine")
    os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    end("mine")


def test_holder_survives_messages_it_does_not_know(run: Callable[..., Program]) -> None:
    kept = keep("mine", 60, on="process:1")
    with connect(find("mine").holder, ENDS) as stranger:
        assert stranger.recv(PACKET)
        stranger.send(b"of another version")
        assert b"runs another monarch version" in stranger.recv(PACKET)
        assert not stranger.recv(PACKET)
    assert kept.attached and kept.on == "process:1"
    kept.end()
