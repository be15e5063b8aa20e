"""Ranks enter different collectives."""

from __future__ import annotations

from hangs.hang import Hang

COLLECTIVES = [
    Hang(
        "a collective under an if",
        """\
if rank == 0:
    dist.all_reduce(torch.ones(1))
else:
    time.sleep(600)""",
        (
            "waiting: rank 0 waits for ranks 1-3, which are asleep",
            "rank 0 in all_reduce of float32[1]",
            "at line 4",
            "line 6: time.sleep(600)",
        ),
    ),
    Hang(
        "one rank late",
        """\
if rank == 2:
    while True: time.sleep(1)
dist.barrier()""",
        (
            "ranks 0-1,3 wait for rank 2, which is asleep",
            "line 4: while True: time.sleep(1)",
            "barrier",
        ),
    ),
    Hang(
        "different kinds",
        """\
if rank == 1:
    dist.barrier()
else:
    dist.all_reduce(torch.ones(2))""",
        (
            "stuck: ranks 0-3 called different collectives",
            "rank 1 in barrier",
            "at line 4",
            "ranks 0,2-3 in all_reduce",
        ),
    ),
    Hang(
        "broadcast against all_reduce",
        """\
if rank == 3:
    dist.broadcast(torch.ones(2), src=0)
else:
    dist.all_reduce(torch.ones(2))""",
        (
            "called different collectives",
            "rank 3 in broadcast",
            "ranks 0-2 in all_reduce",
        ),
    ),
    Hang(
        "order swapped",
        """\
x = torch.ones(2)
y = [torch.ones(2) for _ in range(4)]
if rank % 2:
    dist.all_gather(y, x)
    dist.barrier()
else:
    dist.barrier()
    dist.all_gather(y, x)""",
        (
            "called different collectives",
            "ranks 1,3 in all_gather",
            "ranks 0,2 in barrier",
        ),
    ),
    Hang(
        "different sources",
        """\
dist.broadcast(torch.ones(2), src=1 if rank == 1 else 0)
dist.barrier()
dist.broadcast(torch.ones(2), src=0)""",
        ("rank",),
    ),
    Hang(
        "one rank leaves the loop early",
        """\
for i in range(5 if rank == 0 else 6):
    dist.all_reduce(torch.ones(3))
if rank == 0:
    time.sleep(600)""",
        (
            "ranks 1-3 wait for rank 0, which is asleep",
            "all_reduce of float32[3]",
            "line 6: time.sleep(600)",
        ),
    ),
    Hang(
        "one rank returns without it",
        """\
if rank != 3:
    dist.barrier()""",
        (
            "ranks 0-2 wait for rank 3, which finished without calling barrier()",
            "barrier",
            "at line 4",
        ),
    ),
    Hang(
        "an exception swallowed",
        """\
try:
    if rank == 1: raise ValueError('bad sample')
    dist.barrier()
except ValueError:
    pass""",
        (
            "ranks 0,2-3 wait for rank 1, which finished without calling barrier()",
            "barrier",
        ),
    ),
    Hang(
        "groups in a different order",
        """\
a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
x = torch.ones(1)
if rank < 2:
    first, second = (a, b) if rank == 0 else (b, a)
    dist.all_reduce(x, group=first)
    dist.all_reduce(x, group=second)""",
        (
            "ranks 0-1 wait for each other in different groups",
            "group 1 of ranks 0-1",
            "group 2 of ranks 0-1",
            "line 7",
        ),
    ),
    Hang(
        "group forgotten",
        """\
g = dist.new_group([0, 1])
if rank == 0:
    dist.barrier(group=g)
elif rank == 1:
    dist.barrier()""",
        (
            "rank 0",
            "rank 1",
            "barrier",
        ),
    ),
]
