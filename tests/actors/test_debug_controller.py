"""``debug_controller()``: ranks at a breakpoint, listed by an actor of the program."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from monarch._core.position import PAUSED, Position
from monarch._debug.stops import left_there, stopped_there, stops
from monarch._node.current import current_node

PROGRAM = """
import asyncio
from monarch.actor import Actor, current_rank, debug_controller, endpoint, this_host

class Debuggee(Actor):
    @endpoint
    def to_debug(self) -> int:
        if current_rank().rank == 1:
            breakpoint()
        return current_rank().rank

    @endpoint
    def sessions(self) -> list:
        return [each.rank for each in debug_controller().list.call_one(print_output=False).get()]

async def pending() -> list:
    controller = debug_controller()
    await controller.wait_pending_session.call_one()
    return await controller.list.call_one()

if __name__ == "__main__":
    mesh = this_host().spawn_procs({"gpus": 2})
    debuggee = mesh.spawn("debuggee", Debuggee)
    controller = debug_controller()
    print("before:", list(controller.list.call_one().get()))
    waiting = controller.wait_pending_session.call_one()
    call = debuggee.to_debug.call()
    waiting.get()
    (found,) = controller.list.call_one(print_output=False).get()
    print("found:", found.actor_name, found.rank, found.coords, found.function, found.lineno)
    print("again:", [each.rank for each in asyncio.run(pending())])
    print("on a rank:", debuggee.slice(gpus=0).sessions.call_one().get())
    mesh.resume()
    print("result:", call.get().values())
    print("after:", list(controller.list.call_one(print_output=False).get()))
"""


def test_ranks_at_a_breakpoint_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[:2] == ["no rank is at a breakpoint", "before: []"]
    assert "found: debuggee 1 {'gpus': 1} to_debug 9" in lines
    assert next(line for line in lines if line.startswith("Actor Name")).split("  ")[0] == "Actor Name"
    assert lines[-4:] == ["again: [1]", "on a rank: [1]", "result: [0, 1]", "after: []"], done.stdout


def test_stop_is_noted_before_later_messages_are_handled(host: Any) -> None:
    """A program that has the answer of a call no longer lists the stop that has delayed it."""
    proc, listed, done = "h/listed.0", list[bool](), threading.Event()

    def handle() -> None:
        stopped_there(proc, "step", Position(PAUSED, [], "step").packed())
        listed.append(proc in stops().now)
        left_there(proc, False)
        listed.append(proc in stops().now)
        done.set()

    current_node().receive_loop.post(handle)
    assert done.wait(20) and listed == [True, False]
