"""Many ranks on this machine: spawn, call, kill some, heal, stop. Prints how long each took, and what was left.

    python benchmarks/many_ranks.py [RANKS]

Each rank takes about 11 MB of its own; 256 of them need some 4 GB and 1,300 file descriptors in the host agent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from monarch._node.current import current_node
from monarch.actor import Actor, endpoint, heal_mesh, shutdown_context, this_host
from monarch.exceptions import SupervisionError

T = TypeVar("T")


class Rank(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def timed(what: str, act: Callable[[], T]) -> T:
    begun = time.monotonic()
    result = act()
    print(f"{what:32} {time.monotonic() - begun:8.3f} s", flush=True)
    return result


def main(count: int) -> int:
    timed("first mesh", lambda: this_host().spawn_procs().spawn("warm", Rank).pid.call().get(120))
    folder = current_node().folder
    procs = timed(f"spawn_procs of {count}", lambda: this_host().spawn_procs({"gpus": count}))
    ranks = procs.spawn("ranks", Rank)
    pids = list(timed("first answer of all", lambda: ranks.pid.call().get(120)).values())
    assert len(set(pids)) == count
    for _ in range(3):
        timed("call of all", lambda: ranks.pid.call().get(60))
    killed = pids[:: max(1, count // 8)]

    def kill() -> None:
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        try:
            while True:
                ranks.pid.call().get(60)
        except SupervisionError:
            pass

    timed(f"kill -9 of {len(killed)}, until known", kill)
    timed("heal", lambda: heal_mesh(ranks, timeout=60))
    healed = list(timed("call of all", lambda: ranks.pid.call().get(60)).values())
    assert set(pids) - set(healed) == set(killed), "others than those that were killed have been replaced"
    timed("stop", lambda: procs.stop().get(60))
    timed("shutdown", lambda: shutdown_context().get(60))
    deadline = time.monotonic() + 10
    left: list[object] = ["?"]
    while left and time.monotonic() < deadline:
        left = [pid for pid in {*pids, *healed} if Path(f"/proc/{pid}").exists()]
        left += [folder] if os.path.exists(folder) else []
    print("left behind:", left or "nothing")
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 256))
