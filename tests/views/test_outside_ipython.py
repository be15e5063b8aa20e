"""``MeshView`` in a program without IPython, as marimo runs its cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VIEW = """
import time
from monarch.actor import this_host, shutdown_context
from monarch_kernel.views.protocol import VERSION
from monarch_kernel.views.widget import MeshView

procs = this_host().spawn_procs(per_host={"gpus": 2})
view = MeshView(procs)
sent = []
view.send = lambda content, buffers=None: sent.append(content)
view._on_custom(view, {"kind": "open", "version": VERSION, "uid": view.uid}, [])
while not sent: time.sleep(0.01)
print("first", sent[0]["kind"], [row["rank"] for row in sent[0]["ranks"]], sent[0]["mesh"].get("actions", []))
view.close()
shutdown_context().get(timeout=30)
"""


AHEAD = """
import json, os, signal, threading, time
from monarch.actor import Actor, endpoint, this_host, shutdown_context
from monarch_kernel.views.protocol import VERSION
from monarch_kernel.views.widget import MeshView

class Worker(Actor):
    @endpoint
    def work(self):
        print("runs", flush=True)
        while True: time.sleep(0.01)
    @endpoint
    def ping(self): return 1

procs = this_host().spawn_procs(per_host={"gpus": 2})
workers = procs.spawn("workers", Worker)
workers.ping.call().get(30)
view = MeshView(procs)
def states():
    return [row["state"] for row in json.loads(view.state)["ranks"]]
print("at first", states())

def interrupt():
    while states() != ["running"] * 2 and "blocked" not in states(): time.sleep(0.01)
    print("then", len(states()))
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    workers.work.call().get(60)
except KeyboardInterrupt:
    print("interrupted")
print("pinged", workers.ping.call().get(30).values())
view.send = lambda content, buffers=None: None
view._on_custom(view, {"kind": "open", "version": VERSION, "uid": view.uid}, [])
print("later", repr(view.state))
view.close()
again = this_host().spawn_procs(per_host={"gpus": 2})
MeshView(again).close()
again.stop().get()
MeshView(procs).close()
shutdown_context().get(timeout=30)
"""


def test_view_outside_ipython_follows_a_cell_and_stops_it(program: Callable[..., Any]) -> None:
    said = program(AHEAD).ok()
    assert "at first ['idle', 'idle']" in said and "then 2" in said
    assert "stopped: ranks 0-1: interrupted" in said and "interrupted" in said
    assert said.count("1 other mesh named 'procs' is still running (2 ranks), perhaps because its cell ran twice") == 1
    assert "pinged" in said and "later ''" in said


def test_view_works_without_ipython(program: Callable[..., Any]) -> None:
    assert "first snapshot [0, 1] []" in program(VIEW).ok()
