"""A program whose ranks have children of every kind; tests kill it or parts of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

from monarch.actor import Actor, endpoint, this_host

# It runs as a program.
sys.path.append(str(Path(__file__).parents[1]))
from light import leave_out_torch

SLEEP = ["sleep", "1000"]


def _background(*prefix: str) -> int:
    """A process whose parent has ended."""
    script = 'sleep 1000 >/dev/null 2>&1 & echo "$!"'
    shown = subprocess.run([*prefix, "sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    return int(shown)


def _forked(times: int) -> int:
    """A fork of this process in a session of its own; its parent has ended if it was forked twice."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()
        if times > 1 and os.fork():
            os._exit(0)
        os.write(writer, str(os.getpid()).encode())
        while True:
            signal.pause()
    found = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    return found


class Parent(Actor):
    @endpoint
    def pid(self) -> list[int]:
        return [os.getpid(), os.getppid()]

    @endpoint
    def memory_name(self) -> str:
        return self.memory.name

    @endpoint
    def have_children(self) -> dict[str, int]:
        # A name in /dev/shm, and a process that removes it when this one has ended.
        self.memory = shared_memory.SharedMemory(create=True, size=4096)
        return {
            "plain": subprocess.Popen(SLEEP).pid,
            "group": subprocess.Popen(SLEEP, preexec_fn=os.setpgrp).pid,
            "setsid": subprocess.Popen(SLEEP, start_new_session=True).pid,
            "clean environment": subprocess.Popen(SLEEP, start_new_session=True, env={}, stdout=subprocess.DEVNULL).pid,
            "background": _background(),
            "background, setsid": _background("setsid", "-w"),
            "background, clean environment": _background("env", "-i", "setsid", "-w"),
            "forked": _forked(1),
            "forked twice": _forked(2),
        }


def main() -> None:
    leave_out_torch()
    procs = this_host().spawn_procs({"gpus": 2})
    parents = procs.spawn("parents", Parent)
    pids = [value for _, value in parents.pid.call().get()]
    children = [value for _, value in parents.have_children.call().get()]
    memory = [name for _, name in parents.memory_name.call().get()]
    known = {"ranks": [rank for rank, _ in pids], "agent": pids[0][1], "children": children, "memory": memory}
    print(json.dumps(known), flush=True)
    for line in sys.stdin:
        if line == "stop\n":
            procs.stop().get(timeout=30)
            print("stopped", flush=True)


if __name__ == "__main__":
    main()
