"""Cells of many kinds, stopped at random moments, while threads switch at any time.

After each stop no rank has lost its variables, the next cell runs on all ranks, collectives work, and no rank prints
for a stopped cell any more. ``MONARCH_CHAOS_SEED`` repeats a seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from books import installed
from kernels import Notebook

__all__ = ["installed"]

SECONDS = float(os.environ.get("MONARCH_CHAOS_SECONDS", "15"))
SEED = int(os.environ.get("MONARCH_CHAOS_SEED", "1"))
SWITCHES = "import sys\nsys.setswitchinterval(1e-6)"
PREPARED = f"""
{SWITCHES}
import asyncio, os, queue, random, subprocess, threading, time, torch, torch.distributed as dist
kept = rank
lock = threading.Lock()
class Slow:
    def __getstate__(self):
        time.sleep(random.random() * 0.05)
        return {{}}
    def __setstate__(self, state):
        pass
class Deep:
    def __del__(self):
        time.sleep(0.002)
def deep(depth):
    return deep(depth - 1) + 1 if depth else time.sleep(0.01) or 0
"""
BODIES = [
    "while True: pass",
    "while True: time.sleep(random.random() * 0.01)",
    "time.sleep(1000)",
    "queue.Queue().get()",
    "lock.acquire(); lock.acquire()",
    "threading.Event().wait(1000)",
    "while True: deep(50)",
    "while True: dist.all_reduce(torch.ones(10))",
    "dist.barrier() if rank else time.sleep(1000)",
    "dist.all_reduce(torch.ones(1000)) if rank != 2 else queue.Queue().get()",
    "dist.recv(torch.ones(1), 3) if rank == 0 else None",
    "while True: dist.broadcast(torch.ones(100_000), random.Random(0).randrange(4))",
    "os.system('sleep 1000')",
    "subprocess.run(['sleep', '1000'])",
    "subprocess.run('while true; do sleep 0.01; done', shell=True)",
    "await asyncio.sleep(1000)",
    "while True: await asyncio.sleep(random.random() * 0.01)",
    "await asyncio.gather(*[asyncio.sleep(1000 * i) for i in range(20)])",
    "for i in range(10**9): print('{token}', i)",
    "while True: print('{token}', end='')",
    "try:\n    time.sleep(1000)\nfinally:\n    time.sleep(random.random() * 0.2)",
    "try:\n    queue.Queue().get()\nexcept KeyboardInterrupt:\n    time.sleep(0.1)",
    "with lock:\n    while True: time.sleep(0.001)",
    "while True: Deep()",
    "while True: x = [Slow() for _ in range(3)]; time.sleep(0.001)",
    "[Slow() for _ in range(20)]",
    "t = threading.Thread(target=time.sleep, args=(0.3,)); t.start(); t.join(); time.sleep(1000)",
    "sum(x * x for x in iter(int, 1))",
    "sorted(range(10**5), key=lambda each: time.sleep(0.0001))",
    "while True: torch.ones(300, 300) @ torch.ones(300, 300)",
    "%timeit -n 100000000 1 + 1",
    "while True: deep(900)",
]
"""Endless or long; ``{token}`` marks what a cell prints."""
HEADS = ["", "", "", "[0:2]", "[1,3]", "[2]"]
PROBE = "y = torch.ones(1)\ndist.all_reduce(y)\n(kept == rank, y.item())"


@pytest.fixture
def book(spec: str) -> Iterator[Notebook]:
    """A notebook of its own, whose threads switch at any time."""
    made = Notebook()
    try:
        made.guard = 120.0
        made.run(SWITCHES).ok()
        made.run("%mesh up 4").ok()
        made.mesh(PREPARED).ok()
        yield made
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 300)
def test_stop_at_any_moment_leaves_ranks_that_work(book: Notebook) -> None:
    chance, begun = random.Random(SEED), time.monotonic()
    ended: list[str] = []
    seen: list[str] = []
    while time.monotonic() < begun + SECONDS or len(seen) < 8:
        token = f"token{len(seen)}"
        body, head = chance.choice(BODIES).replace("{token}", token), chance.choice(HEADS)
        report = f"MONARCH_CHAOS_SEED={SEED}, cell {len(seen)}: %%mesh {head}\n{body}\nafter {seen[-3:]}"
        cell = book.send(f"%%mesh {head}\n{body}")
        # Before it begins, Jupyter itself ignores a stop.
        cell.until(lambda cell=cell: cell.contents("execute_input"))
        moment = time.monotonic() + chance.random() ** 2 * 0.6
        book.take(lambda moment=moment, cell=cell: time.monotonic() > moment or cell.idle, report)
        book.interrupt()
        cell.wait()
        # It may have ended before.
        assert cell.status == "ok" or cell.reply["ename"] == "KeyboardInterrupt", f"{report}\n{cell.text[-3000:]}"
        ended.append(cell.status)
        assert "not stopped yet" not in cell.text, f"{report}\n{cell.text[-3000:]}"
        probe = book.send(f"%%mesh\n{PROBE}")
        book.take(lambda probe=probe: probe.idle and probe.reply, f"the cell after {report}")
        assert probe.status == "ok" and probe.shown == "[ranks 0-3] (True, 4.0)", f"{report}\n{probe.text[-3000:]}"
        assert token not in probe.text, f"{report}\n{probe.text[-3000:]}"
        seen.append(f"{head} {body}")
    # It was a test of something.
    assert ended.count("error") > len(ended) / 2, ended
