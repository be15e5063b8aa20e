"""Hosts started by hand, as on a cluster: workers that wait for programs, and programs that attach them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from leaks import wait_until
from monarch._node.current import current_node
from monarch._node.future import in_thread
from monarch._session.greeting import Greeting
from monarch._session.session import Session
from monarch._wire.messages import VERSION
from monarch.actor import attach_to_workers, new_key_file
from monarch.exceptions import ArgumentError, MonarchError, SpawnError, StoppedError
from monarch.worker import main
from workers import Workers, free_port

pytestmark = pytest.mark.slow

USE = """
import os, sys
from monarch.actor import Actor, attach_to_workers, endpoint

class Worker(Actor):
    @endpoint
    def parents(self) -> int:
        return os.getppid()

hosts = attach_to_workers(ca=sys.argv[1], workers=sys.argv[2:], name="mine")
print(repr(hosts))
workers = hosts.spawn_procs({"gpus": 2}).spawn("workers", Worker)
found = list(workers.parents.call().get(60).values())
print(len(found), len(set(found)))
if os.environ.get("END") == "kill":
    os.kill(os.getpid(), 9)
hosts.shutdown().get(30)
try:
    hosts.spawn_procs()
except RuntimeError as error:
    print(error)
"""


@pytest.fixture
def workers(warm: None, leaks: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.close()


def test_workers_serve_programs_in_turn(workers: Workers, tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(USE)
    some = [workers.start() for _ in range(2)]
    for process, address in some:
        assert workers.wait(process) == f"monarch: worker at {address} waits for a controller\n"
    addresses = [address for _, address in some]
    # One that ends normally, one that is killed, and one after that.
    for end in ("", "kill", ""):
        done = subprocess.run(
            [sys.executable, str(script), workers.key, *addresses],
            env={**os.environ, "END": end},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == (-9 if end else 0), done.stderr
        lines = done.stdout.splitlines()
        assert lines[:2] == ["<HostMesh 'mine' (hosts=2)>", "4 2"]
        if not end:
            assert (
                lines[2] == "the hosts mine were shut down; get new ones from this_host(), attach_to_workers() or a job"
            )
        for process, address in some:
            assert workers.wait(process) == f"monarch: worker at {address} waits for a controller\n"


def test_worker_until_shutdown_ends_after_a_goodbye(workers: Workers, tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(USE)
    port = free_port()
    # Programs use a name, and it listens on all interfaces.
    process, address = workers.start(f"tcp://localhost:{port}@tcp://0.0.0.0:{port}", "--until-shutdown")
    waits = f"monarch: worker at {address} waits for a controller\n"
    for end in ("kill", ""):
        assert workers.wait(process) == waits
        done = subprocess.run(
            [sys.executable, str(script), workers.key, address],
            env={**os.environ, "END": end},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == (-9 if end else 0), done.stderr
    assert process.wait(30) == 0 and workers.wait(process) == ""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_worker_ends_its_ranks(workers: Workers, how: signal.Signals) -> None:
    process, _ = workers.start()
    workers.wait(process)
    agents = workers.agents()
    assert len(agents) == 1
    process.send_signal(how)
    assert process.wait(10) != 0
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in agents), 5)


def test_worker_that_cannot_listen_says_so(workers: Workers) -> None:
    first, address = workers.start()
    workers.wait(first)
    for where, why in (
        (address, "Address already in use"),
        ("tcp://192.0.2.1:22222", "Cannot assign requested address"),
    ):
        other, _ = workers.start(where)
        _, errors = other.communicate(timeout=60)
        assert other.returncode == 1
        # It is reported in one line, without internals.
        assert errors == f"monarch.worker: a worker cannot listen at {where}: {why}; use another address or port\n"
    other, _ = workers.start("127.0.0.1:1")
    assert "such as tcp://node1:22222" in other.communicate(timeout=60)[1]
    # The first one has not noticed.
    assert first.poll() is None


def test_worker_command_serves_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = str(tmp_path / "key")
    assert main(["--new-key", key]) == 0 and key in capsys.readouterr().out
    assert os.stat(key).st_mode & 0o777 == 0o600
    assert main(["--new-key", key]) == 1 and "already exists" in capsys.readouterr().err
    assert main(["tcp://127.0.0.1:1", "--key", str(tmp_path / "none")]) == 1
    assert "is not a key file" in capsys.readouterr().err
    assert main(["tcp://127.0.0.1:1", "--key", key, "--silence", "0"]) == 1
    assert "silence: expected a number of seconds" in capsys.readouterr().err
    for wrong in ([], ["tcp://127.0.0.1:1"], ["--key", key], ["tcp://127.0.0.1:1", "--new-key", key]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2 and "usage: python -m monarch.worker" in capsys.readouterr().err


def test_unreachable_workers_are_errors(workers: Workers, tmp_path: Path, host: Any, leaks: Any) -> None:
    process, address = workers.start()
    workers.wait(process)
    other = str(tmp_path / "other")
    new_key_file(other)
    for tries in range(2):
        with pytest.raises(
            SpawnError, match=r"worker at tcp:.* it uses a different key; use the key file of that worker"
        ):
            attach_to_workers(ca=other, workers=[address], timeout=2)
        if not tries:
            # This program listens for hosts from now on; later attempts leave no more sockets.
            leaks.rebase()
    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(SpawnError, match=f"{nowhere} within 1 s: Connection refused; start a worker there"):
        attach_to_workers(ca=workers.key, workers=[nowhere], timeout=1)
    with pytest.raises(SpawnError, match=r"the worker address .*nohost.invalid:22222'"):
        attach_to_workers(ca=workers.key, workers=[address, "tcp://nohost.invalid:22222"])
    two = ("tcp://a:1@tcp://b:2@tcp://c:3", "tcp://a:1@b")
    for wrong in ("node1:22222", "tcp://node1", "tcp://node1:0", "tcp://node1:70000", "", None, *two):
        with pytest.raises(ArgumentError, match="tcp://node1:22222"):
            attach_to_workers(ca=workers.key, workers=[wrong])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="timeout: expected seconds"):
        attach_to_workers(ca=workers.key, workers=[address], timeout=float("nan"))
    with pytest.raises(ArgumentError, match="twice"):
        attach_to_workers(ca=workers.key, workers=[address, address])
    for wrong_list in ([], address):
        with pytest.raises(ArgumentError, match="a list of at least one address"):
            attach_to_workers(ca=workers.key, workers=wrong_list)
    os.chmod(workers.key, 0o644)
    with pytest.raises(MonarchError, match="chmod 600"):
        attach_to_workers(ca=workers.key, workers=[address])
    with pytest.raises(MonarchError, match=r"make one with 'python -m monarch\.worker --new-key FILE'"):
        attach_to_workers(ca=str(tmp_path / "none"), workers=[address])
    with pytest.raises(FileExistsError):
        new_key_file(other)
    assert process.poll() is None


class Forwarded:
    """A port that closes connections while it has no target, and passes their bytes on once it has one."""

    def __init__(self) -> None:
        self.target = 0
        self.closed = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._open: list[socket.socket] = []

    def __enter__(self) -> Forwarded:
        self._threads[0].start()
        return self

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if not self.target:
                near.close()
                self.closed += 1
                continue
            far = socket.create_connection(("127.0.0.1", self.target))
            self._open += [near, far]
            for ends in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pass, args=ends))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *error: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in [self._server, *self._open]:
            connection.close()


TAKES = """
import sys
from monarch.actor import attach_to_workers
hosts = attach_to_workers(ca=sys.argv[1], workers=sys.argv[2:])
print("has it", flush=True)
sys.stdin.read()
"""
OTHER_VERSION = """
import sys
from monarch._wire import messages
messages.VERSION += 1
from monarch.actor import attach_to_workers
try:
    attach_to_workers(ca=sys.argv[1], workers=sys.argv[2:], timeout=1000)
except RuntimeError as error:
    print(error)
"""


def test_worker_in_use_says_by_whom_at_once(workers: Workers, tmp_path: Path, host: Any, leaks: Any) -> None:
    """The patience of the second program would outlast the test."""
    some = [workers.start() for _ in range(2)]
    for process, _ in some:
        workers.wait(process)
    # The first by its address is asked first.
    (free_process, free), (_, taken) = sorted(some, key=lambda each: each[1])
    script = tmp_path / "takes.py"
    script.write_text(TAKES)
    command = [sys.executable, str(script), workers.key, taken]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "has it\n"
        with pytest.raises(SpawnError) as raised:
            attach_to_workers(ca=workers.key, workers=[free, taken], timeout=1000)
        assert str(raised.value) == (
            f"worker at {taken}: it is in use by process {first.pid} at 127.0.0.1; end the mesh or the program there, "
            f"or use another worker"
        )
        # The other one serves the next program, and the first program has noticed nothing.
        assert "waits" in workers.wait(free_process)
        assert first.poll() is None
        first.kill()
    # The end of the first program is noticed, and the worker is free.
    with attach_to_workers(ca=workers.key, workers=[free, taken], timeout=1000) as hosts:
        assert hosts.sizes == {"hosts": 2}
    # This program listens for hosts from now on.
    leaks.rebase()


def test_worker_of_another_version_says_so_at_once(workers: Workers, program: Callable[..., Any]) -> None:
    process, address = workers.start()
    workers.wait(process)
    told = program(OTHER_VERSION, workers.key, address).ok()
    assert told == (
        f"worker at {address}: it speaks protocol version {VERSION}, and this program speaks {VERSION + 1}; "
        f"install the same version of monarch-kernel-runtime on both sides\n"
    )


def test_another_service_at_the_address_is_no_worker(workers: Workers, host: Any, leaks: Any) -> None:
    """It ends the connection, and ZeroMQ does not make it again: a send there would wait without a bound."""
    with zmq.Context() as context, context.socket(zmq.PULL) as other:
        address = f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(SpawnError, match=f"worker at {address}: the process there is not a worker"):
            attach_to_workers(ca=workers.key, workers=[address], timeout=1000)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SpawnError, match=f"no worker answered at {address} within 1 s: a process accepts"):
            attach_to_workers(ca=workers.key, workers=[address], timeout=1)
    leaks.rebase()


def test_two_names_of_one_worker_are_refused(workers: Workers, host: Any, leaks: Any) -> None:
    process, address = workers.start()
    workers.wait(process)
    same = address.replace("127.0.0.1", "localhost")
    with pytest.raises(ArgumentError, match=f"{address} and {same} are the same worker; name it once"):
        attach_to_workers(ca=workers.key, workers=[address, same])
    # Nothing of the attempt is left.
    with attach_to_workers(ca=workers.key, workers=[same]) as hosts:
        assert hosts.sizes == {"hosts": 1}
    leaks.rebase()


def test_worker_may_start_behind_a_port_that_is_forwarded(workers: Workers, host: Any, leaks: Any) -> None:
    """As with ``ssh -L``: connections are accepted and closed, until the worker runs."""
    with Forwarded() as port:
        with pytest.raises(SpawnError, match=f"{port.address} within 2 s: connections are accepted there and closed"):
            attach_to_workers(ca=workers.key, workers=[port.address], timeout=2)
        outcome = in_thread(
            current_node(), "attach", lambda: attach_to_workers(ca=workers.key, workers=[port.address], timeout=1000)
        )
        # Longer than a refusal has to stand.
        since = time.monotonic()
        assert wait_until(lambda: time.monotonic() > since + 3 and port.closed > 20)
        assert not outcome.done
        process, address = workers.start()
        workers.wait(process)
        port.target = int(address.rpartition(":")[2])
        with outcome.get(60) as hosts:
            assert hosts.sizes == {"hosts": 1}
    leaks.rebase()


def test_refused_program_asks_four_times_a_second(
    workers: Workers, tmp_path: Path, host: Any, leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has its owner to serve."""
    process, taken = workers.start()
    workers.wait(process)
    script = tmp_path / "takes.py"
    script.write_text(TAKES)
    asked: list[float] = []
    usual = Greeting.ask
    monkeypatch.setattr(Greeting, "ask", lambda self: (asked.append(time.monotonic()), usual(self))[1])
    command = [sys.executable, str(script), workers.key, taken]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "has it\n"
        with pytest.raises(SpawnError, match="it is in use by process"):
            attach_to_workers(ca=workers.key, workers=[taken], timeout=1000)
        first.kill()
    assert len(asked) <= (asked[-1] - asked[0]) * 4 + 2
    leaks.rebase()


RACES = """
import sys, time
from monarch.actor import attach_to_workers
while time.time() < float(sys.argv[2]):
    pass
try:
    hosts = attach_to_workers(ca=sys.argv[1], workers=sys.argv[3:], timeout=60)
except RuntimeError as error:
    print(error, flush=True)
else:
    print("has them", flush=True)
    sys.stdin.read()
"""


def test_one_of_two_programs_gets_all_workers(workers: Workers, tmp_path: Path, leaks: Any) -> None:
    some = [workers.start() for _ in range(2)]
    for process, _ in some:
        workers.wait(process)
    script = tmp_path / "races.py"
    script.write_text(RACES)
    addresses = [address for _, address in some]
    for order in (addresses, addresses[::-1]):
        at = str(time.time() + 4)
        pair = [
            subprocess.Popen(
                [sys.executable, str(script), workers.key, at, *names],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for names in (addresses, order)
        ]
        said = [each.stdout.readline() for each in pair if each.stdout is not None]
        assert sorted(line == "has them\n" for line in said) == [False, True], said
        assert "it is in use by process" in "".join(said)
        for each in pair:
            each.communicate()


def test_failed_attachment_keeps_those_of_other_threads(workers: Workers, host: Any, leaks: Any) -> None:
    process, address = workers.start()
    workers.wait(process)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        other = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        fails = in_thread(
            current_node(), "attach", lambda: attach_to_workers(ca=workers.key, workers=[address, other], timeout=3)
        )
        with attach_to_workers(ca=workers.key, workers=[address], timeout=60) as hosts:
            with pytest.raises(SpawnError, match="no worker answered at"):
                fails.get(60)
            assert hosts.spawn_procs({"gpus": 1}).initialized.get(60)
    leaks.rebase()


def test_interrupted_attachment_frees_its_workers(
    workers: Workers, host: Any, leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Stop after the worker has answered, while the agent of this host starts to listen."""
    process, address = workers.start()
    workers.wait(process)

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_open_own_agent", stopped)
        with pytest.raises(KeyboardInterrupt):
            attach_to_workers(ca=workers.key, workers=[address])
    assert "waits" in workers.wait(process)
    with attach_to_workers(ca=workers.key, workers=[address]) as hosts:
        assert hosts.sizes == {"hosts": 1}
    assert "waits" in workers.wait(process)
    leaks.rebase()


def test_killed_worker_is_a_lost_host(workers: Workers, program: Callable[..., Any]) -> None:
    process, address = workers.start()
    workers.wait(process)
    told = """
import os, sys, time
from monarch.actor import Actor, attach_to_workers, endpoint
from monarch.exceptions import SupervisionError

class Worker(Actor):
    @endpoint
    def wait(self) -> None:
        time.sleep(60)

hosts = attach_to_workers(ca=sys.argv[1], workers=[sys.argv[2]])
call = hosts.spawn_procs({"gpus": 2}, name="far").spawn("far", Worker).wait.call()
hosts.spawn_procs({"gpus": 1}).initialized.get(60)
os.kill(int(sys.argv[3]), 9)
try:
    call.get(30)
except SupervisionError as error:
    print(str(error).splitlines()[0].split(" with their host ")[0])
hosts.shutdown().get(30)
"""
    lines = program(told, workers.key, address, str(process.pid)).ok().splitlines()
    assert lines == ["far.wait() failed: the processes of all 2 ranks of far were lost"]


def test_only_owner_stops_mesh_of_workers(workers: Workers, host: Any, leaks: Any) -> None:
    process, address = workers.start()
    workers.wait(process)
    # The second time another agent answers, at the same address.
    for _ in range(2):
        with attach_to_workers(ca=workers.key, workers=[address], name="mine") as hosts:
            first = hosts.spawn_procs({"gpus": 1})
            assert first.initialized.get(60)
            with pytest.raises(RuntimeError, match="it is a view or a reference"):
                hosts.slice(hosts=0).shutdown()
            with attach_to_workers(ca=workers.key, workers=[address.replace("127.0.0.1", "localhost")]) as same:
                assert same.spawn_procs({"gpus": 1}).initialized.get(60)
            # Holders of a reference may still use them.
            assert list(first.execute(len, "ab").values()) == [2]
        with pytest.raises(StoppedError, match="the hosts mine were shut down"):
            hosts.spawn_procs()
        assert "waits" in workers.wait(process)
    from monarch.actor import shutdown_context

    # This program listens for hosts now, for as long as its session lasts.
    shutdown_context().get(30)
