"""Messages that nobody sends or takes."""

from __future__ import annotations

import sys

from hangs.hang import Hang

MESSAGES = [
    Hang(
        "both receive",
        """\
if rank < 2:
    dist.recv(torch.ones(1), src=1 - rank)""",
        (
            "ranks 0-1 wait for messages that do not match",
            "from rank 1",
            "from rank 0",
            "line 4",
        ),
    ),
    Hang(
        "recv without send",
        """\
if rank == 1:
    dist.recv(torch.ones(1), src=3)
elif rank == 3:
    time.sleep(600)""",
        (
            "rank 1 waits for rank 3, which is asleep",
            "recv",
            "line 6: time.sleep(600)",
        ),
    ),
    Hang(
        "recv from a rank that has ended",
        """\
if rank == 1:
    dist.recv(torch.ones(1), src=3)""",
        (
            "rank 1 waits for rank 3, which is idle",
            "recv",
            "line 4",
        ),
    ),
    Hang(
        "tags that differ",
        """\
if rank == 0:
    dist.send(torch.ones(1), dst=1, tag=7)
    dist.recv(torch.ones(1), src=1)
elif rank == 1:
    dist.recv(torch.ones(1), src=0, tag=8)""",
        (
            "rank 1",
            "tag 8",
            "line 7",
        ),
    ),
    Hang(
        "batch of messages, one without a counterpart",
        """\
if rank == 0:
    ops = [dist.P2POp(dist.isend, torch.ones(2), 1), dist.P2POp(dist.irecv, torch.ones(3), 3, tag=5)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
elif rank == 1:
    dist.recv(torch.ones(2), 0)""",
        (
            "rank 0 waits for rank 3, which is idle" if sys.version_info >= (3, 11) else "rank 0 waits for",
            "irecv of float32[3] (from rank 3, tag 5" if sys.version_info >= (3, 11) else "irecv",
            "line 6: work.wait()",
        ),
    ),
    Hang(
        "irecv and wait",
        """\
if rank == 0:
    work = dist.irecv(torch.ones(1), src=2)
    work.wait()
elif rank == 2:
    time.sleep(600)""",
        (
            "rank 0 waits for rank 2, which is asleep" if sys.version_info >= (3, 11) else "rank 0 waits for",
            "irecv of float32[1] (from rank 2" if sys.version_info >= (3, 11) else "irecv",
            "line 5: work.wait()",
            "time.sleep(600)",
        ),
    ),
    Hang(
        "async work waited for",
        """\
if rank != 2:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
else:
    time.sleep(600)""",
        (
            "ranks 0-1,3 wait for rank 2",
            "all_reduce",
            "line 5: work.wait()",
            "time.sleep(600)",
        ),
    ),
]
