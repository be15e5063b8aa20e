"""Entry points open a session, getters do not, and references work only inside their session."""

from __future__ import annotations

from typing import Any

import pytest

from monarch._session import session
from monarch.actor import attach_to_workers
from monarch.exceptions import ArgumentError, EnvError, MonarchError, StoppedError

REFERENCES = r"""
import multiprocessing as mp, os, pickle, time, cloudpickle
from monarch.actor import Actor, Channel, endpoint, heal_mesh, this_host

class A(Actor):
    @endpoint
    def pid(self): return os.getpid()
    @endpoint
    def nap(self, seconds): time.sleep(seconds); return seconds

def child(pickled, queue):
    said = []
    for data in pickled:
        try:
            said.append(f"made {pickle.loads(data)!r}")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    queue.put("\n".join(said))

def use(mesh, queue):
    try:
        queue.put(mesh.pid.call().get(timeout=20))
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")

def stop(mesh, queue):
    try:
        queue.put(mesh.stop().get(timeout=20))
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")

def keep(future, queue):
    try:
        queue.put(future.get(timeout=20))
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")

def leave(mesh, queue):
    try:
        with mesh:
            raise LookupError("of the fork")
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")

def heal(procs, queue):
    try:
        queue.put(heal_mesh(procs))
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")

def ask(how, target, what):
    context = mp.get_context(how)
    queue = context.Queue()
    process = context.Process(target=target, args=(what, queue))
    process.start()
    print(queue.get(timeout=30))
    process.join()

if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 1})
    mesh = procs.spawn("mesh", A)
    mesh.pid.call().get(timeout=30)
    references = (procs, mesh, this_host(), Channel.open()[0])
    ask("spawn", child, [cloudpickle.dumps(each) for each in references])
    ask("fork", child, [cloudpickle.dumps(mesh)])
    ask("fork", use, mesh)
    ask("fork", stop, mesh)
    ask("fork", stop, procs)
    ask("fork", heal, procs)
    pending = mesh.nap.call(2)
    ask("fork", keep, pending)
    assert pending.get(timeout=30).values() == [2]
    ask("fork", leave, procs)
    print(len(mesh.pid.call().get(timeout=30)))
"""


@pytest.mark.slow
def test_reference_is_refused_at_once_outside_its_session(program: Any) -> None:
    said = program(REFERENCES).ok().splitlines()
    names = ["the proc mesh 'procs'", "the actor mesh 'mesh'", "a host mesh", "a port", "the actor mesh 'mesh'"]
    for line, name in zip(said, names, strict=False):
        assert line.startswith(f"SerializationError: {name} belongs to session s") and "of process " in line
        assert "this_host().spawn_procs()" in line
    assert "has no session" in said[0] and "is a fork of process" in said[4]
    assert said[5].startswith("StoppedError: mesh can no longer be used: this process is a fork of process")
    refused = ["mesh cannot be stopped", "procs cannot be stopped", "procs cannot be healed"]
    for what, line in zip([*refused, "mesh.nap() cannot be waited for"], said[6:], strict=False):
        assert line.startswith(f"StoppedError: {what} here: this process is a fork of process")
    assert said[10:] == ["LookupError: of the fork", "1"]


SHUTDOWN = r"""
import gc, pickle, time
from monarch._node import current as process
from monarch.actor import Actor, Channel, endpoint, shutdown_context, this_host, this_proc

KEPT = []

class Keeps(Actor):
    @endpoint(explicit_response_port=True)
    def keep(self, port):
        KEPT.append(port)

def attempt(what):
    try:
        print("done", str(what()).partition("\n")[0])
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

attempt(process.current_node)
mesh = this_proc().spawn("keeps", Keeps)
future = mesh.keep.call_one()
while not KEPT:
    time.sleep(0.01)
port, receiver = Channel.open()
data = pickle.dumps(port)
first = process.current_node()
shutdown_context().get(timeout=30)
KEPT.clear()
gc.collect()
attempt(process.current_node)
attempt(lambda: port.send(1))
attempt(mesh.keep.call_one)
attempt(lambda: mesh.slice().keep.broadcast())
attempt(lambda: pickle.loads(data))
attempt(lambda: future.exception(timeout=5))
print(process.has_node())
host = this_host()
print(process.current_node() is not first and host.spawn_procs().execute(int).item())
attempt(lambda: pickle.loads(data))
shutdown_context().get(timeout=30)
"""


@pytest.mark.slow
def test_only_entry_points_open_a_session(program: Any) -> None:
    said = program(SHUTDOWN).ok().splitlines()
    assert said[0].startswith("MonarchError: process ") and said[0].endswith("has no session; this_host() opens one")
    assert said[1].startswith("StoppedError: the session of process ") and "was shut down" in said[1]
    for line in said[2:5]:
        assert line.startswith("StoppedError") and "its session was shut down" in line
    assert said[5].startswith("SerializationError: a port belongs to session")
    assert said[6].startswith("done ")
    assert said[7:9] == ["False", "0"]
    assert "it is the controller of session" in said[9]


STOPPING = r"""
import threading, time
from monarch.actor import Actor, endpoint, shutdown_context, this_host

class Slow(Actor):
    @endpoint
    def run(self):
        time.sleep(60)
    def __cleanup__(self, reason):
        time.sleep(60)

host = this_host()
first, second = host.spawn_procs(), host.spawn_procs()
slow, later = first.spawn("slow", Slow), second.spawn("later", Slow)
first.initialized.get(timeout=30)
slow.run.broadcast()
pending = first.stop()
shutdown_context(0.5).get(timeout=30)
for stop in (lambda: pending, second.stop, later.stop):
    try:
        print("done", stop().get(timeout=5))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_shutdown_ends_the_waits_for_a_stop(program: Any) -> None:
    said = program(STOPPING).ok().splitlines()
    assert said[0] == said[1] == "done None"
    assert said[2].startswith(("done None", "StoppedError"))


def test_this_host_works_where_only_a_function_was_unpickled(program: Any) -> None:
    said = program(
        """
import subprocess, sys, cloudpickle
from monarch._meshes.host_mesh import this_host

def f():
    return this_host().spawn_procs().execute(int).item()

code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1]))())"
done = subprocess.run([sys.executable, "-c", code, cloudpickle.dumps(f).hex()], capture_output=True, text=True)
print(done.stdout, done.stderr)
"""
    )
    assert said.ok().split() == ["0"]


def test_wrong_arguments_name_what_was_expected(host: Any, tmp_path: Any) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"bootstrap_command: expected a BootstrapCommand, or a function .*, got <function.*bootstrap=",
    ):
        host.spawn_procs(bootstrap_command=lambda: None)
    with pytest.raises(ArgumentError, match=r"ca: expected the path of a key file .*, got 'trust_all_connections'"):
        attach_to_workers(ca="trust_all_connections", workers=["tcp://127.0.0.1:1"])
    with pytest.raises(StoppedError, match="cannot be shut down: it is a view or a reference"):
        host.shutdown()
    with pytest.raises(EnvError, match=r"env\['A'\]: expected str, int, float or None, got \[\]") as caught:
        host.spawn_procs(env={"A": []})
    assert isinstance(caught.value, (MonarchError, ValueError))


def test_shutdown_without_a_session_is_done() -> None:
    ended = session._Nothing()
    assert ended.get(timeout=20) is None and ended.result() is None and ended.exception() is None
