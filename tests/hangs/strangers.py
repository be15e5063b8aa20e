"""Programs as a stranger writes them, tried after the rules were made."""

from __future__ import annotations

from hangs.hang import Hang

STRANGERS = [
    Hang(
        "nested groups",
        """\
tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
x = torch.ones(2)
dist.all_reduce(x, group=tp)
if rank != 3:
    dist.all_reduce(x, group=dp)
else:
    time.sleep(600)
dist.barrier()""",
        (
            "ranks 0-2 wait for rank 3, which is asleep",
            "rank 1 in all_reduce of float32[2] (#1 of the group of ranks 1,3)",
            "at line 8: dist.all_reduce",
            "line 10: time.sleep(600)",
        ),
    ),
    Hang(
        "DDP with a branch on one rank",
        """\
from torch.nn.parallel import DistributedDataParallel as DDP
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x, use_b):
        return self.b(self.a(x)) if use_b else self.a(x)
model = DDP(Two())
for step in range(3):
    loss = model(torch.ones(2, 4), use_b=(rank != 2 or step < 1)).sum()
    loss.backward()
    dist.barrier()""",
        (
            "stuck: ranks 0-3 called different collectives",
            "ranks 0-1,3 in all_reduce of float32[40]",
            "at line 13: loss.backward()",
            "rank 2 in barrier",
            "at line 14",
        ),
        imports=True,
    ),
    Hang(
        "DDP with fewer batches on one rank",
        """\
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in [torch.ones(2, 4)] * (5 if rank == 1 else 7):
    opt.zero_grad()
    model(batch).sum().backward()
    opt.step()""",
        (
            "ranks 0,2-3 wait for rank 1, which finished without calling all_reduce()",
            "in all_reduce of float32[20]",
            "line 8: model(batch).sum().backward()",
        ),
        imports=True,
    ),
    Hang(
        "two groups of all ranks in another order",
        """\
a, b = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
x = torch.ones(3)
for g in ((a, b) if rank != 1 else (b, a)):
    dist.all_reduce(x, group=g)""",
        (
            "ranks 0-3 wait for each other in different groups",
            "ranks 0,2-3 in all_reduce of float32[3] (#1 of group 1 of ranks 0-3)",
            "rank 1 in all_reduce of float32[3] (#1 of group 2 of ranks 0-3)",
            "line 6",
        ),
    ),
    Hang(
        "a mesh of devices with one rank late",
        """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
devices = init_device_mesh('cpu', (4,), mesh_dim_names=('dp',))
d = distribute_tensor(torch.ones(8, 2), devices, [Shard(0)])
if rank == 3: time.sleep(600)
d.full_tensor()""",
        (
            "ranks 0-2 wait for rank 3, which is asleep",
            "in all_gather",
            "line 8: d.full_tensor()",
            "line 7: if rank == 3",
        ),
        imports=True,
    ),
    Hang(
        "a functional collective",
        """\
import torch.distributed._functional_collectives as fc
if rank == 1:
    time.sleep(600)
y = fc.all_reduce(torch.ones(3), 'sum', dist.group.WORLD)
print(y.sum())""",
        (
            "ranks 0,2-3 wait for rank 1, which is asleep",
            "in all_reduce of float32[3]",
            "line 7: print(y.sum())",
            "line 5: time.sleep(600)",
        ),
        imports=True,
    ),
    Hang(
        "a collective in a thread",
        """\
import threading
def sync():
    dist.all_reduce(torch.ones(1))
if rank != 2:
    t = threading.Thread(target=sync, name='syncer'); t.start(); t.join()
else:
    time.sleep(600)""",
        (
            "ranks 0-1,3 wait for rank 2, which is asleep",
            "in thread 'syncer'",
            "line 5 in sync: dist.all_reduce",
            "line 9: time.sleep(600)",
        ),
    ),
    Hang(
        "an exception in a loop",
        """\
for step in range(4):
    try:
        if rank == 2 and step == 1: raise RuntimeError('out of memory')
        dist.all_reduce(torch.ones(3))
    except RuntimeError:
        continue
dist.barrier()""",
        (
            "stuck: ranks 0-3 called different collectives",
            "ranks 0-1,3 in all_reduce of float32[3]",
            "rank 2 in barrier",
            "line 9: dist.barrier()",
        ),
    ),
    Hang(
        "a generator left early",
        """\
def steps():
    for i in range(3):
        yield i
        dist.barrier()
for i in steps():
    if rank == 0 and i == 1: break""",
        (
            "ranks 1-3 wait for rank 0, which finished without calling barrier()",
            "line 6 in steps: dist.barrier()",
        ),
    ),
    Hang(
        "scatter from two ranks",
        """\
out, src = torch.zeros(2), 1 if rank == 1 else 0
dist.scatter(out, [torch.ones(2)] * 4 if rank == src else None, src=src)
dist.barrier()""",
        (
            "passed different src or dst ranks",
            "rank 0 in scatter of float32[2] (root 0",
            "rank 1 in scatter of float32[2] (root 1",
            "line 4: dist.scatter",
        ),
    ),
    Hang(
        "objects against a tensor",
        """\
if rank == 2:
    dist.all_reduce(torch.ones(1))
else:
    dist.broadcast_object_list([{'a': 1}] if rank == 0 else [None], src=0)""",
        (
            "stuck: ranks 0-3 called different collectives",
            "rank 2 in all_reduce of float32[1]",
            "line 4",
            "ranks 0-1,3 in broadcast_object_list",
        ),
    ),
    Hang(
        "all_to_all against all_gather",
        """\
if rank < 3:
    dist.all_to_all_single(torch.zeros(8), torch.ones(8))
else:
    dist.all_gather_into_tensor(torch.zeros(8), torch.ones(2))""",
        (
            "stuck: ranks 0-3 called different collectives",
            "ranks 0-2 in all_to_all_single of float32[8]",
            "rank 3 in all_gather_into_tensor",
            "line 6",
        ),
    ),
    Hang(
        "send without recv",
        """\
big = torch.ones(50_000_000)
if rank == 0:
    dist.send(big, dst=2)
dist.barrier()""",
        (
            "wait for messages that do not match",
            "rank 0 in send of float32[50000000] (to rank 2",
            "ranks 1-3 in barrier",
            "line 5: dist.send(big, dst=2)",
        ),
    ),
    Hang(
        "recv from the wrong rank",
        """\
x = torch.ones(1)
if rank == 0: dist.send(x, dst=1)
if rank == 1: dist.recv(x, src=2)
dist.barrier()""",
        (
            "wait for messages that do not match",
            "rank 1 in recv of float32[1] (from rank 2",
            "line 5",
            "ranks 2-3 in barrier",
        ),
    ),
    Hang(
        "a ring that misses a send",
        """\
x, y = torch.ones(4), torch.zeros(4)
ops = [dist.P2POp(dist.isend, x, (rank + 1) % 4), dist.P2POp(dist.irecv, y, (rank - 1) % 4)]
if rank == 2: ops = ops[1:]
for work in dist.batch_isend_irecv(ops): work.wait()
dist.barrier()""",
        (
            "wait for messages that do not match",
            "ranks 0-2 in barrier",
            "rank 3 in irecv",
            "line 6: for work in",
        ),
    ),
    Hang(
        "stages that all receive first",
        """\
x = torch.ones(4)
if rank > 0: dist.recv(x, src=rank - 1)
if rank < 3: dist.recv(x, src=rank + 1)
if rank < 3: dist.send(x, dst=rank + 1)""",
        (
            "wait for messages that do not match",
            "rank 0 in recv of float32[4] (from rank 1",
            "rank 1 in recv of float32[4] (from rank 0",
            "line 5",
        ),
    ),
    Hang(
        "a checkpoint without one rank",
        """\
import tempfile
import torch.distributed.checkpoint as dcp
if rank != 1:
    dcp.save({'w': torch.ones(4)}, checkpoint_id=tempfile.mkdtemp(prefix='monarch-hangs'))""",
        (
            "ranks 0,2-3 wait for rank 1, which finished without calling gather_object()",
            "line 6: dcp.save",
        ),
        imports=True,
    ),
    Hang(
        "a child process that cannot write",
        """\
import subprocess, sys
if rank == 1:
    p = subprocess.Popen([sys.executable, '-c', 'print("x" * 10**6)'], stdout=subprocess.PIPE)
    try:
        p.wait()
    finally:
        p.kill(); p.communicate()
dist.barrier()""",
        (
            "rank 1, which is waiting for a child process",
            "which is waiting to write to a pipe",
            "line 7: p.wait()",
        ),
    ),
    Hang(
        "output of a silent child process",
        """\
import subprocess
if rank == 1:
    p = subprocess.Popen(['sleep', '600'], stdout=subprocess.PIPE, text=True)
    try:
        for line in p.stdout: pass
    finally:
        p.kill(); p.communicate()
dist.barrier()""",
        (
            "rank 1, which is waiting for a pipe: shared with child process sleep 600",
            "line 7: for line in p.stdout",
        ),
    ),
    Hang(
        "a pool of processes",
        """\
import multiprocessing as mp
if rank == 1:
    with mp.get_context('fork').Pool(2) as pool:
        pool.map(time.sleep, [300, 300])
dist.barrier()""",
        (
            "rank 1, which is waiting for a child process: a pool of 2 processes",
            "line 6: pool.map",
        ),
    ),
    Hang(
        "a worker of a data loader",
        """\
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        if rank == 1 and i == 12:
            time.sleep(600)
        return torch.ones(2) * i
for batch in DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context='fork'):
    dist.all_reduce(batch)""",
        (
            "rank 1, which is waiting for a child process: DataLoader worker 1",
            "which is asleep",
            "line 10: for batch in DataLoader",
            "all_reduce of float32[4, 2]",
        ),
        imports=True,
    ),
    Hang(
        "a semaphore",
        """\
import threading
s = threading.Semaphore(1)
if rank == 1:
    for _ in range(2): s.acquire()
dist.barrier()""",
        (
            "rank 1, which is waiting for a lock: Semaphore",
            "line 6",
        ),
    ),
    Hang(
        "a lock between processes",
        """\
import multiprocessing as mp
lock = mp.get_context('fork').Lock()
if rank == 1:
    lock.acquire(); lock.acquire()
dist.barrier()""",
        (
            "rank 1, which is waiting for a lock: multiprocessing.Lock",
            "line 6",
        ),
    ),
    Hang(
        "a lock on a file",
        """\
import fcntl, tempfile
file = open(tempfile.gettempdir() + '/monarch-hangs.lock', 'w')
if rank == 0:
    fcntl.flock(file, fcntl.LOCK_EX)
    dist.barrier()
else:
    time.sleep(0.5)
    fcntl.flock(file, fcntl.LOCK_EX)
    dist.barrier()""",
        (
            "stuck: ranks 0-3 wait for each other",
            "ranks 1-3 waiting for a lock: a file lock",
            "line 7: dist.barrier()",
            "line 10: fcntl.flock",
        ),
    ),
    Hang(
        "a database that is locked",
        """\
import os, sqlite3, tempfile
path = tempfile.gettempdir() + f'/monarch-hangs-{os.getppid()}.db'
db = sqlite3.connect(path, timeout=12, isolation_level=None)
if rank == 0:
    db.execute('create table if not exists t (a)')
    db.execute('begin exclusive')
dist.barrier()
if rank == 1:
    db.execute('insert into t values (1)')
dist.barrier()""",
        (
            "rank 1, which is waiting for a lock: a SQLite database lock",
            "line 11: db.execute",
        ),
    ),
    Hang(
        "a FIFO that nobody writes",
        """\
import os, tempfile
if rank == 1:
    path = tempfile.mkdtemp(prefix='monarch-hangs') + '/fifo'
    os.mkfifo(path)
    open(path).read()
dist.barrier()""",
        (
            "rank 1, which is waiting for a file: opening it",
            "line 7: open(path).read()",
        ),
    ),
    Hang(
        "select on a pipe",
        """\
import os, select
r, w = os.pipe()
if rank == 0: select.select([r], [], [])
dist.barrier()""",
        (
            "rank 0, which is waiting for a pipe",
            "line 5",
        ),
    ),
    Hang(
        "a server that does not answer",
        """\
import socket, urllib.request
if rank == 1:
    s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()
    urllib.request.urlopen(f'http://127.0.0.1:{s.getsockname()[1]}/')
dist.barrier()""",
        (
            "rank 1, which is waiting for a socket: port ",
            "of 127.0.0.1",
            "line 6: urllib",
        ),
    ),
    Hang(
        "tasks of asyncio",
        """\
import asyncio
async def fetch(i):
    if i == 2 and rank == 1: await asyncio.Event().wait()
    return i
async def main():
    return await asyncio.gather(*[fetch(i) for i in range(4)])
asyncio.run(main())
dist.barrier()""",
        (
            "rank 1, which is at an await",
            "line 5 in fetch",
        ),
    ),
    Hang(
        "sleep in a destructor",
        """\
class Handle:
    def __del__(self): time.sleep(600)
h = Handle()
if rank == 2: del h
dist.barrier()""",
        (
            "rank 2, which is asleep",
            "line 4 in __del__",
        ),
    ),
    Hang(
        "a thread that waits for an event",
        """\
import threading
ready = threading.Event()
def prefetch():
    ready.wait()
loader = threading.Thread(target=prefetch, name='prefetch', daemon=True)
loader.start()
if rank != 0: ready.set()
loader.join()
dist.barrier()""",
        (
            "rank 0, which is waiting for a thread: thread 'prefetch' at line 6",
            "line 10: loader.join()",
        ),
    ),
    Hang(
        "a socket of ZeroMQ",
        """\
import zmq
if rank == 1:
    context = zmq.Context()
    receiver = context.socket(zmq.PULL)
    receiver.bind_to_random_port('tcp://127.0.0.1')
    try: receiver.recv()
    finally: context.destroy(0)
dist.barrier()""",
        (
            "rank 1, which is waiting for a socket: a ZeroMQ socket",
            "line 8: try: receiver.recv()",
        ),
    ),
    Hang(
        "a receive from any rank",
        """\
if rank == 0:
    senders = [dist.irecv(torch.ones(1)).wait() for _ in range(4)]
else:
    dist.send(torch.ones(1), dst=0)""",
        (
            "rank 0 waits for ranks 1-3, which are idle",
            "rank 0 in irecv",
            "line 4",
        ),
    ),
    Hang(
        "a signal that never comes",
        """\
import signal
if rank == 2: signal.pause()
dist.barrier()""",
        (
            "rank 2, which is waiting for an event or condition: a signal",
            "line 4",
        ),
    ),
    Hang(
        "C code with the GIL in the first second",
        """\
import ctypes
if rank == 1:
    ctypes.PyDLL(None).sleep(6)
dist.barrier()""",
        (
            "ranks 0,2-3 wait for rank 1, which is in C code that holds the GIL",
            "line 5",
        ),
    ),
]
