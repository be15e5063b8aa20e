"""Programs that keep meshes on hosts of launchers, and the processes that hold these."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from leaks import processes, session_folders, wait_until
from light import LIGHT
from monarch._procs.agent.detached_records import RecordedHost, find, records
from monarch.actor import shutdown_context

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
        """End it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def programs_in(tmp_path: Path) -> Generator[Callable[..., Program]]:
    """Start programs from their text; at the end nothing may be left of them."""
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
    """Return whether none of some processes is left."""
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids.split())


def holders() -> list[int]:
    """Return the pids of the processes that hold meshes."""
    return [record.pid for record, _ in records() if record is not None and record.alive()]


def agents() -> list[int]:
    """Return the pids of the agents of all held hosts."""
    return [
        int(name.split("/")[1].split("-")[1])
        for record, _ in records()
        for host in (record.hosts if record is not None else [])
        for name in sorted(session_folders())
        if f"/{host.id}-" in name and name.count("/") == 1
    ]
