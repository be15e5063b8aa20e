"""The orderly end of a process: after its actors, as Python ends one, and in bounded time; with the program too."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, endpoint

SHORT = {"MONARCH_STOP_CLEANUP_S": "0.3", "MONARCH_STOP_CANCEL_S": "0.2"}


class Ends(Actor):
    def __init__(self, path: str) -> None:
        self.path = path
        self.open = threading.Event()

    def _note(self, what: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{what}\n")

    @endpoint
    def prepare(self) -> str:
        atexit.register(self._note, "function")
        weakref.finalize(self, subprocess.run, ["sh", "-c", f"echo finalizer >> {self.path}"])
        # Joined before the functions run.
        threading.Thread(target=lambda: self.open.wait() and self._note("thread")).start()
        self.folder = tempfile.TemporaryDirectory()
        return self.folder.name

    @endpoint
    def prepare_late(self, what: str) -> None:
        if what == "thread":
            threading.Thread(target=time.sleep, args=(1000,), name="prefetch").start()
        elif what == "child":
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), name="worker").start()
        else:
            atexit.register(time.sleep, 1000)
        atexit.register(self._note, "function")

    def __cleanup__(self, error: Exception | None) -> None:
        self._note("cleanup")
        self.open.set()


def test_exit_functions_run_after_cleanup_and_threads(procs: Any, tmp_path: Path) -> None:
    mesh = procs(1)
    folder = mesh.spawn("ends", Ends, str(tmp_path / "said")).prepare.call_one().get(timeout=20)
    assert Path(folder).exists()
    mesh.stop().get(timeout=20)
    assert (tmp_path / "said").read_text().split() == ["cleanup", "thread", "function", "finalizer"]
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("thread", "these non-daemon threads, which did not end within 0.3 s: 'prefetch'; start them with"),
        ("child", "these child processes, which did not end within 0.3 s: 'worker'; start them with daemon=True"),
        (
            "function",
            "the exit functions of the process did not finish within 0.3 s and were interrupted; raise MONARCH_",
        ),
    ],
)
def test_late_steps_of_an_end_are_interrupted_and_told(
    procs: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str, text: str
) -> None:
    mesh = procs(1, env=SHORT)
    mesh.spawn("ends", Ends, str(tmp_path / "said")).prepare_late.call_one(what).get(timeout=20)
    mesh.stop().get(timeout=20)
    assert (tmp_path / "said").read_text().split() == ["cleanup", "function"]
    assert text in capfd.readouterr().err


def test_processes_clean_up_at_the_end_of_the_program(program: Any) -> None:
    done = program(
        """
import atexit, time
from monarch.actor import Actor, endpoint, this_host

class A(Actor):
    @endpoint
    def f(self):
        atexit.register(print, "function")

    @endpoint
    def serve(self):
        try:
            time.sleep(1000)
        finally:
            print("stopped")

    def __cleanup__(self, error):
        print("cleanup", error)

a = this_host().spawn_procs().spawn("a", A)
a.f.call().get(timeout=50)
a.serve.broadcast()
print("last line")
"""
    )
    ends = "last line\n[rank 0] stopped\n[rank 0] cleanup None\n[rank 0] function\n"
    assert done.ok() == ends and done.err == "", "nobody waits for the call"


def test_processes_clean_up_at_the_end_of_their_hosts(program: Any) -> None:
    done = program(
        """
from monarch.actor import Actor, endpoint, this_host
from monarch.testing import local_hosts

class A(Actor):
    @endpoint
    def f(self):
        return 1

    def __cleanup__(self, error):
        print("cleanup")

with local_hosts(1) as hosts:
    hosts.spawn_procs().spawn("a", A).f.call().get(timeout=50)
print("last line")
"""
    )
    assert done.ok() == "[rank 0] cleanup\nlast line\n"


def test_late_process_is_named_at_the_end_of_the_program(program: Any) -> None:
    done = program(
        """
import threading
from monarch.actor import Actor, endpoint, shutdown_context, this_host

class A(Actor):
    @endpoint
    def f(self):
        return 1

    def __cleanup__(self, error):
        threading.Event().wait()

this_host().spawn_procs(per_host={"gpus": 2}).spawn("a", A).f.call().get(timeout=50)
shutdown_context(0.2).get()
"""
    )
    done.ok()
    assert "ranks 0-1 of procs did not end within 0.2 s and were killed; raise MONARCH_" in done.err


def test_finalizers_of_the_zygote_do_not_run_in_its_forks() -> None:
    code = """
import weakref
from monarch._procs.rank import exit_functions
class Held: ...
old, new = Held(), Held()
weakref.finalize(old, print, "of the zygote")
exit_functions.begin()
weakref.finalize(new, print, "of the rank")
exit_functions.run_functions()
import os
os._exit(0) if os.sys.stdout.flush() is None else None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "of the rank\n"


def test_ctrl_c_at_the_end_of_the_program_is_told_in_one_line(program: Any) -> None:
    done = program(
        """
import os, signal, time
from monarch.actor import Actor, endpoint, this_host

class A(Actor):
    @endpoint
    def serve(self, program):
        self.program = program

    def __cleanup__(self, error):
        os.kill(self.program, signal.SIGINT)
        time.sleep(100)

this_host().spawn_procs().spawn("a", A).serve.call(os.getpid()).get(timeout=50)
print("last line")
"""
    )
    assert done.ok() == "last line\n"
    assert done.err == "monarch: interrupted: killed the ranks that had not ended by themselves\n"


@pytest.mark.parametrize("ignores", [False, True])
def test_exit_in_a_handler_of_failures_ends_the_program(program: Any, ignores: bool) -> None:
    """Also one that a script has started in the background, which ignores SIGINT."""
    done = program(
        """
import os, signal, sys, time
if sys.argv[1] == "True":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
from monarch.actor import Actor, endpoint, supervise, this_host

class A(Actor):
    @endpoint
    def end(self):
        os._exit(3)

procs = this_host().spawn_procs()
with supervise(procs, on_failure=lambda failure: sys.exit("the end: " + failure.reason)):
    procs.spawn("a", A).end.broadcast()
    while True:
        time.sleep(0.1)
""",
        str(ignores),
    )
    assert done.code == -(signal.SIGTERM if ignores else signal.SIGINT) and not done.left
    assert "the end: exited with code 3" in done.err
    assert done.err.rstrip().endswith("KeyboardInterrupt") is not ignores


def test_ctrl_c_in_a_program_shows_where_it_waits(program: Any) -> None:
    done = program(
        """
import os, signal, time
from monarch.actor import Actor, endpoint, this_host

class A(Actor):
    @endpoint
    def serve(self, program):
        os.kill(program, signal.SIGINT)
        time.sleep(1000)

this_host().spawn_procs().spawn("a", A).serve.call(os.getpid()).get()
"""
    )
    lines = done.err.splitlines()
    assert lines[-1] == "KeyboardInterrupt" and any("serve.call(os.getpid()).get()" in line for line in lines)
    # Python 3.10 keeps the frames that it has seen.
    assert done.err.count("  File ") == 1 or sys.version_info < (3, 11), done.err


def test_calls_that_a_stop_has_ended_are_not_told(program: Any) -> None:
    done = program(
        """
import gc, time
from monarch.actor import Actor, endpoint, this_host
from monarch.exceptions import CallTimeoutError

class A(Actor):
    @endpoint
    def nap(self):
        time.sleep(1000)

procs = this_host().spawn_procs({"gpus": 2})
future = procs.spawn("a", A).nap.call()
try:
    future.get(timeout=0.5)
except CallTimeoutError:
    procs.stop().get(timeout=50)
while not future.done:
    time.sleep(0.01)
del future
gc.collect()
"""
    )
    assert done.ok() == "" and done.err == ""
