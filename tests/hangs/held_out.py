"""Programs that were held out: tried once, after all rules were made."""

from __future__ import annotations

from hangs.hang import Hang

HELD_OUT = [
    Hang(
        "gathered objects without one rank",
        """\
metrics = {'loss': 1.0 / (rank + 1)}
if metrics['loss'] > 0.3:
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, metrics)
else:
    time.sleep(600)""",
        (
            "ranks 0-2 wait for rank 3, which is asleep",
            "all_gather_object",
            "line 8",
        ),
    ),
    Hang(
        "a barrier in one branch",
        """\
def save():
    dist.barrier()
if rank == 0:
    save()
x = torch.ones(1)
dist.all_reduce(x)""",
        (
            "rank 0 in barrier",
            "ranks 1-3 in all_reduce",
            "line 4 in save",
            "line 8",
        ),
    ),
    Hang(
        "monitored_barrier against all_reduce",
        """\
if rank == 1:
    dist.all_reduce(torch.ones(2))
else:
    dist.monitored_barrier()""",
        (
            "monitored_barrier",
            "rank 1",
            "all_reduce",
            "line 4",
        ),
    ),
    Hang(
        "a rank that has destroyed its group",
        """\
x = torch.ones(1)
dist.all_reduce(x)
if rank == 1:
    dist.destroy_process_group()
    time.sleep(600)
else:
    dist.all_reduce(x)""",
        (
            "rank 1",
            "asleep",
            "line 7",
        ),
    ),
    Hang(
        "an HTTP server",
        """\
from http.server import HTTPServer, BaseHTTPRequestHandler
if rank == 3:
    s = HTTPServer(('127.0.0.1', 0), BaseHTTPRequestHandler)
    try: s.serve_forever()
    finally: s.server_close()
dist.barrier()""",
        (
            "rank 3, which is waiting for a socket",
            "line 6",
        ),
    ),
    Hang(
        "a key that nobody stores",
        """\
import datetime
from torch.distributed import TCPStore
if rank == 0:
    store = TCPStore('127.0.0.1', 0, 1, True, timeout=datetime.timedelta(seconds=600))
    store.get('model_ready')
dist.barrier()""",
        (
            "rank 0",
            "line 7",
        ),
    ),
    Hang(
        "a queue between processes",
        """\
import multiprocessing as mp
if rank == 1:
    q = mp.get_context('fork').Queue()
    q.get()
dist.barrier()""",
        (
            "rank 1, which is waiting on a queue",
            "line 6",
        ),
    ),
    Hang(
        "a lock on a part of a file",
        """\
import fcntl, tempfile, os
f = open(tempfile.gettempdir() + '/monarch-hangs-lockf', 'w')
if rank == 0:
    fcntl.lockf(f, fcntl.LOCK_EX)
    dist.barrier()
    dist.barrier()
else:
    dist.barrier()
    fcntl.lockf(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_UN)
    dist.barrier()""",
        (
            "rank 0",
            "a file lock",
            "line 11",
        ),
    ),
    Hang(
        "a pipeline that misses a send",
        """\
x, g = torch.ones(2), torch.zeros(2)
def fwd():
    if rank: dist.recv(x, rank - 1)
    if rank < 3: dist.send(x, rank + 1)
def bwd():
    if rank < 3: dist.recv(g, rank + 1)
    if 0 < rank < 3: dist.send(g, rank - 1)
for i in range(2):
    fwd(); bwd()""",
        (
            "rank 2",
            "in bwd",
        ),
    ),
    Hang(
        "gathered objects against a barrier",
        """\
objs = [None] * 4 if rank == 0 else None
if rank != 1: dist.gather_object(rank, objs, dst=0)
else: dist.barrier()""",
        (
            "rank 1 in barrier",
            "gather_object",
        ),
    ),
    Hang(
        "a barrier of threads",
        """\
import threading
b = threading.Barrier(2)
if rank == 1: b.wait()
dist.barrier()""",
        (
            "rank 1",
            "line 5",
        ),
    ),
    Hang(
        "different dimensions of a device mesh",
        """\
from torch.distributed.device_mesh import init_device_mesh
dm = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
x = torch.ones(2)
dist.all_reduce(x, group=dm.get_group('tp'))
if rank == 0: dist.all_reduce(x, group=dm.get_group('dp'))
if rank == 2: dist.all_reduce(x, group=dm.get_group('tp'))""",
        (
            "rank 0",
            "line 7",
        ),
    ),
    Hang(
        "sys.exit that is caught",
        """\
import sys
try:
    if rank == 2: sys.exit(0)
    dist.barrier()
except SystemExit:
    pass""",
        (
            "rank 2",
            "finished without calling barrier()",
            "line 6",
        ),
    ),
    Hang(
        "a selector",
        """\
import selectors, socket
a, b = socket.socketpair()
if rank == 0:
    s = selectors.DefaultSelector(); s.register(a, selectors.EVENT_READ); s.select()
dist.barrier()""",
        (
            "rank 0",
            "line 6",
        ),
    ),
    Hang(
        "asynchronous collectives in another order",
        """\
a, b = torch.ones(4), torch.ones(4)
parts = [torch.zeros(4) for _ in range(4)]
calls = [lambda: dist.all_reduce(a, async_op=True), lambda: dist.all_gather(parts, b, async_op=True)]
works = [call() for call in (calls[::-1] if rank == 2 else calls)]
works[1 if rank == 2 else 0].wait()""",
        (
            "stuck: ranks 0-3 called different collectives",
            "ranks 0-1,3 in all_reduce of float32[4]",
            "rank 2 in all_gather of float32[4]",
            "at line 7: works",
        ),
    ),
    Hang(
        "a collective in a thread that is awaited",
        """\
import asyncio
async def sync():
    if rank == 1: await asyncio.Event().wait()
    await asyncio.to_thread(dist.barrier)
await sync()""",
        (
            "ranks 0,2-3 wait for rank 1, which is at an await: Event.wait",
            "ranks 0,2-3 in barrier",
            "at line 6 in sync: await asyncio.to_thread(dist.barrier)",
            "line 5 in sync",
        ),
    ),
    Hang(
        "work of a pool that waits for its own pool",
        """\
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
def load():
    return pool.submit(int).result()
if rank == 1: pool.submit(load).result()
dist.barrier()""",
        (
            "rank 1, which is waiting for a thread: a pool task in thread 'ThreadPoolExecutor-",
            "at line 6, which waits for a pool task that has not started",
            "at line 7: if rank == 1",
        ),
    ),
    Hang(
        "a key of the store that nobody sets",
        """\
store = dist.distributed_c10d._get_default_store()
if rank == 0: store.set("ready0", "1")
else: store.wait(["ready"])
dist.barrier()""",
        (
            "rank 0 waits for ranks 1-3",
            "a reply from a torch.distributed store",
            "line 5: else: store.wait",
        ),
    ),
]
