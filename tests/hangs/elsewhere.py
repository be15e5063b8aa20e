"""Ranks that are elsewhere."""

from __future__ import annotations

from hangs.hang import Hang

ELSEWHERE = [
    Hang(
        "a lock",
        """\
import threading
lock = threading.Lock()
lock.acquire()
if rank == 1:
    lock.acquire()
dist.barrier()""",
        (
            "ranks 0,2-3 wait for rank 1, which is waiting for a lock",
            "line 7: lock.acquire()",
        ),
    ),
    Hang(
        "an RLock of another thread",
        """\
import threading
owned = threading.RLock()
def hold():
    with owned: time.sleep(600)
if rank == 1:
    threading.Thread(target=hold, daemon=True, name='holder').start()
    time.sleep(0.1)
    with owned:
        pass
dist.barrier()""",
        (
            "rank 1, which is waiting for a lock: held by thread 'holder'",
            "with owned:",
        ),
    ),
    Hang(
        "a lock in a with block of another thread",
        """\
import threading
guard = threading.Lock()
def hold():
    with guard:
        time.sleep(600)
if rank == 1:
    threading.Thread(target=hold, daemon=True, name='holder').start()
    time.sleep(0.1)
    with guard:
        pass
dist.barrier()""",
        (
            "rank 1, which is waiting for a lock: held by thread 'holder' at line 7, taken at line 6",
            "line 11: with guard:",
        ),
    ),
    Hang(
        "two locks in opposite order",
        """\
import threading
class Pool: pass
pool = Pool()
pool.jobs, pool.results = threading.Lock(), threading.Lock()
def collect():
    with pool.results:
        time.sleep(0.3)
        with pool.jobs:
            pass
if rank == 2:
    threading.Thread(target=collect, daemon=True, name='collector').start()
    pool.jobs.acquire()
    time.sleep(0.5)
    pool.results.acquire()
dist.barrier()""",
        (
            "stuck: ranks 0-1,3 wait for rank 2, which is waiting for a lock: held by thread 'collector' at line 10",
            "taken at line 8, which waits for a lock held by this thread, taken at line 14: a deadlock",
            "take locks in the same order in all threads",
        ),
    ),
    Hang(
        "a queue",
        """\
import queue
q = queue.Queue()
if rank == 3:
    q.get()
dist.barrier()""",
        (
            "rank 3, which is waiting on a queue",
            "line 6: q.get()",
        ),
    ),
    Hang(
        "an event",
        """\
import threading
if rank == 0:
    threading.Event().wait()
dist.barrier()""",
        (
            "rank 0, which is waiting for an event or condition: Event",
            "line 5: threading.Event().wait()",
        ),
    ),
    Hang(
        "a thread",
        """\
import threading
if rank == 0:
    t = threading.Thread(target=time.sleep, args=(60,), name='loader', daemon=True)
    t.start()
    t.join()
dist.barrier()""",
        (
            "rank 0, which is waiting for a thread: thread 'loader'",
            "line 7: t.join()",
        ),
    ),
    Hang(
        "a pool",
        """\
from concurrent.futures import ThreadPoolExecutor
if rank == 0:
    ThreadPoolExecutor(1).submit(time.sleep, 20).result()
dist.barrier()""",
        (
            "rank 0, which is waiting for a thread",
            "line 5",
        ),
    ),
    Hang(
        "a child process",
        """\
import subprocess
if rank == 2:
    subprocess.run(['sleep', '600'])
dist.barrier()""",
        (
            "rank 2, which is waiting for a child process: sleep 600",
            "line 5: subprocess.run",
        ),
    ),
    Hang(
        "a child process without subprocess",
        """\
import os
if rank == 2:
    pid = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600')
    try:
        os.waitpid(pid, 0)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
dist.barrier()""",
        (
            "rank 2, which is waiting for a child process",
            "line 7: os.waitpid(pid, 0)",
        ),
    ),
    Hang(
        "a socket",
        """\
import socket
if rank == 1:
    s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()
    s.accept()
dist.barrier()""",
        (
            "rank 1, which is waiting for a socket",
            "line 6: s.accept()",
        ),
    ),
    Hang(
        "a pipe",
        """\
import os
if rank == 1:
    r, w = os.pipe()
    os.read(r, 1)
dist.barrier()""",
        (
            "rank 1, which is waiting for a pipe",
            "line 6: os.read(r, 1)",
        ),
    ),
    Hang(
        "asyncio",
        """\
import asyncio
async def main():
    await asyncio.Event().wait()
if rank == 1:
    asyncio.run(main())
dist.barrier()""",
        (
            "rank 1, which is at an await: Event.wait",
            "line 5 in main: await asyncio.Event().wait()",
        ),
    ),
    Hang(
        "C code that has released the GIL",
        """\
import ctypes
if rank == 1:
    ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(32))
dist.barrier()""",
        (
            "rank 1, which is in C code that has released the GIL",
            "line 5: ctypes.CDLL(None).sem_wait",
        ),
    ),
    Hang(
        "C code with the GIL",
        """\
import ctypes
if rank == 1:
    time.sleep(1.5)
    ctypes.PyDLL(None).sleep(7)
dist.barrier()""",
        (
            "ranks 0,2-3 wait for rank 1, which is in C code that holds the GIL",
            "barrier",
            "line 7",
        ),
    ),
    Hang(
        "an endless loop",
        """\
if rank == 1:
    while True: pass
dist.barrier()""",
        (
            "ranks 0,2-3 wait for rank 1, which is running Python",
            "line 4: while True: pass",
        ),
    ),
    Hang(
        "monitored_barrier",
        """\
if rank == 2:
    time.sleep(600)
dist.monitored_barrier()""",
        (
            "rank 2, which is asleep",
            "monitored_barrier",
            "line 4: time.sleep(600)",
        ),
    ),
    Hang(
        "objects",
        """\
out = [None] * 4
if rank == 2:
    time.sleep(600)
dist.all_gather_object(out, rank)""",
        (
            "ranks 0-1,3 wait for rank 2, which is asleep",
            "all_gather_object",
            "line 5: time.sleep(600)",
        ),
    ),
    Hang(
        "gather without one rank",
        """\
x = torch.ones(1)
if rank == 0:
    dist.gather(x, [torch.ones(1) for _ in range(4)])
elif rank != 2:
    dist.gather(x)
else:
    time.sleep(600)""",
        (
            "rank 0 waits for rank 2, which is asleep",
            "gather",
            "line 9: time.sleep(600)",
        ),
    ),
    Hang(
        "every rank in a lock",
        """\
import threading
lock = threading.Lock()
lock.acquire()
lock.acquire()""",
        (
            "ranks 0-3 are waiting for a lock",
            "line 6: lock.acquire()",
        ),
    ),
    Hang(
        "new_group on some ranks only",
        """\
if rank < 2:
    g = dist.new_group([0, 1, 2])
else:
    time.sleep(600)""",
        (
            "ranks 0-1 wait for",
            "new_group",
            "line 6: time.sleep(600)",
        ),
    ),
]
