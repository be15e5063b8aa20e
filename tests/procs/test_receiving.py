"""The debug mode check of the receiving thread: it never waits, and never runs user code."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leaks import wait_until
from monarch._wire.receiving.slow_handlers import VARIABLE
from receive_loops import GUARD, Rig

pytestmark = pytest.mark.slow


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv(VARIABLE, "1")
    made = Rig(tmp_path)
    yield made
    made.close()


def user_code() -> None:
    """An object from outside this package."""


BREACHES: dict[str, tuple[Callable[[], object], str]] = {
    "user code": (user_code, "runs user code (user_code of"),
    "unpickling": (lambda: pickle.loads(pickle.dumps(1)), "unpickles here"),
    "printing": (lambda: print("x"), "prints here"),
    "writing": (lambda: sys.__stderr__.write(""), "prints here"),  # type: ignore[union-attr]
    "sleeping": (lambda: time.sleep(0), "waits here"),
    "warning": (lambda: warnings.warn("x", stacklevel=1), "warns here"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BREACHES)
def test_breach_in_receiving_thread_is_reported(rig: Rig, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    step, text = BREACHES[kind]
    rig.on_frame = lambda _: [step(), None][1]
    rig.send(1)
    rig.receive_loop.wait(rig.box(2), 0.1)
    seen: list[str] = []
    assert wait_until(lambda: seen.append(capfd.readouterr().err) or text in "".join(seen))
    assert "monarch: error: the receiving thread of process" in "".join(seen)


BROAD = """import asyncio, os, sys, time, threading
import numpy, torch
from monarch.actor import Actor, Channel, endpoint, this_host, shutdown_context
import monarch.actor as ma
class Mine:
    def __init__(self, x): self.x = x
    def __setstate__(self, s): self.__dict__.update(s)
    def __reduce__(self): return (Mine, (self.x,))
    def __eq__(self, o): return self.x == o.x
class Boom(Exception): pass
class Owner(Actor):
    def __getattr__(self, name):
        raise AttributeError(name)
    @endpoint
    def own(self):
        self.procs = this_host().spawn_procs({"gpus": 1})
        self.mine = self.procs.spawn("mine", Quiet)
        self.mine.boom.broadcast()
        # Until the failure is known here.
        for _ in range(6000): self.mine.echo.call(1).get(timeout=60); time.sleep(0.01)
class Quiet(Actor):
    @endpoint
    def echo(self, x): print("echo", type(x).__name__); return x
    @endpoint
    def boom(self): raise Boom(Mine(3))
    @endpoint
    def nap(self, s): print("partial", end=""); time.sleep(s); return s
    @endpoint
    def send(self, port, v): port.send(v)
    @endpoint
    def die(self): os._exit(3)
    @endpoint
    def thread(self):
        threading.Thread(target=lambda: [print("line", i) or time.sleep(.01) for i in range(10)]).start()
class A(Actor):
    @endpoint
    async def echo(self, x): await asyncio.sleep(0.01); return x
    @endpoint
    async def ask(self, other, x): return await other.echo.call_one(x)
def main():
    procs = this_host().spawn_procs({"gpus": 2})
    q = procs.spawn("quiet", Quiet); a = procs.spawn("a", A)
    assert q.echo.call(Mine(1)).get(timeout=60)
    q.echo.call(numpy.zeros(100000)).get(timeout=60)
    q.echo.call(torch.zeros(100)).get(timeout=60)
    a.ask.call(q.slice(gpus=0), Mine(2)).get(timeout=60)
    a.echo.call(Mine(2)).get(timeout=60)
    try: q.boom.call().get(timeout=60)
    except ma.ActorError as e: print("error ok")
    q.nap.call(0.4).get(timeout=60)
    done = threading.Event()
    q.echo.call(Mine(4)).add_done_callback(lambda f: (f.get(), done.set()))
    done.wait(30)
    port, receiver = Channel.open()
    q.send.call(port, Mine(5)).get(timeout=60)
    receiver.recv().get(timeout=60); receiver.recv().get(timeout=60)
    q.thread.call().get(timeout=60)
    asyncio.run(procs.logging_option(stream_to_client=True, level=10))
    hooked = threading.Event()
    ma.unhandled_fault_hook = lambda f: (print("hook", type(f).__name__), hooked.set())
    q.boom.broadcast()
    assert hooked.wait(60)
    try: q.echo.call(1).get(timeout=60)
    except Exception as e: print(type(e).__name__)
    other = this_host().spawn_procs({"gpus": 2}); o = other.spawn("o", Quiet)
    o.echo.call(1).get(timeout=60)
    try: o.slice(gpus=0).die.call_one().get(timeout=60)
    except Exception as e: print(type(e).__name__)
    ma.heal_mesh(other)
    try: print(o.echo.call(Mine(1)).get(timeout=60))
    except Exception as e: print("after heal", type(e).__name__, e)
    w = this_host().spawn_procs({"gpus": 1}).spawn("owner", Owner)
    try: w.own.call().get(timeout=60)
    except Exception as e: print(type(e).__name__)
    a.stop().get(timeout=60)
    other.stop().get(timeout=60); procs.stop().get(timeout=60)
    shutdown_context().get(timeout=60)
    print("finished")
if __name__ == "__main__": main()
"""


def test_broad_program_reports_no_breach(tmp_path: Path) -> None:
    """Calls, errors, output, threads, deaths, a heal and supervision: the debug mode reports none of it."""
    path = tmp_path / "program.py"
    path.write_text(BROAD)
    environment = {**os.environ, VARIABLE: "1"}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=6 * GUARD, env=environment
    )
    assert done.stdout.endswith("finished\n"), done.stderr
    assert "the receiving thread of process" not in done.stderr + done.stdout
