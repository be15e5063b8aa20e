"""The timeout of a process group does not count while a rank of the mesh is paused, and ends collectives otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kernels import Notebook
from leaks import wait_until

pytestmark = pytest.mark.slow
SECONDS = 2
GROUP = f"""import time
from datetime import timedelta
short = dist.new_group(timeout=timedelta(seconds={SECONDS}))
dist.all_reduce(torch.ones(1), group=short)"""
SUM = "x = torch.ones(1); dist.all_reduce(x, group=short); x.item()"


@pytest.fixture(autouse=True)
def short_group(notebook: Notebook) -> Iterator[None]:
    notebook.mesh(GROUP).ok()
    yield
    notebook.run("%mesh resume").ok()
    notebook.run("%mesh interrupt")
    assert wait_until(lambda: notebook.mesh("dist.barrier()").status == "ok")
    notebook.mesh("dist.destroy_process_group(short)").ok()


def ranks_wait(notebook: Notebook, ranks: str) -> bool:
    """Return whether ranks wait in the collective."""
    return f"{ranks}: running at cell" in notebook.run("%mesh where").ok().stream()


def test_paused_rank_does_not_time_out_the_others(notebook: Notebook) -> None:
    notebook.mesh(
        f"if rank == 2:\n    while not globals().pop('go', 0): time.sleep(0.01)\n{SUM}", "--nowait --out h"
    ).ok()
    assert "paused rank 2" in notebook.run("%mesh pause mesh[2]").ok().stream()
    paused = time.monotonic()
    assert wait_until(lambda: ranks_wait(notebook, "ranks 0-1,3"))
    assert wait_until(lambda: time.monotonic() > paused + 2.5 * SECONDS, 4 * SECONDS)
    notebook.run("%%mesh [2] --in-frame\ngo = True").ok()
    assert "resumed rank 2" in notebook.run("%mesh resume").ok().stream()
    assert "ranks 0-3: 4.0" in notebook.run("h.result()").ok().shown


def test_rank_at_a_breakpoint_does_not_time_out_the_others(notebook: Notebook) -> None:
    cell = notebook.send(f"%%mesh --nowait --out h\nif rank == 1: breakpoint()\n{SUM}")
    cell.wait().ok()
    assert wait_until(lambda: "rank 1: paused (breakpoint)" in notebook.run("%mesh where").stream())
    paused = time.monotonic()
    assert wait_until(lambda: time.monotonic() > paused + 2.5 * SECONDS, 4 * SECONDS)
    notebook.run("%mesh continue").ok()
    assert "ranks 0-3: 4.0" in notebook.run("h.result()").ok().shown


def test_timeout_begins_again_when_the_rank_is_resumed(notebook: Notebook) -> None:
    """A rank that does not come after its pause is not waited for longer than the timeout."""
    body = f"if rank == 3:\n    while not globals().get('never'): time.sleep(0.01)\n{SUM}"
    notebook.mesh(body, "--nowait --out h").ok()
    notebook.run("%mesh pause mesh[3]").ok()
    paused = time.monotonic()
    assert wait_until(lambda: time.monotonic() > paused + 1.5 * SECONDS, 4 * SECONDS)
    assert ranks_wait(notebook, "ranks 0-2")
    # Before it is: on a busy machine the answer comes late.
    resumed = time.monotonic()
    notebook.run("%mesh resume").ok()
    assert wait_until(lambda: "running" not in notebook.run("%mesh where mesh[0:3]").stream(), 5 * SECONDS)
    assert time.monotonic() - resumed > SECONDS * 0.95
    notebook.run("h.cancel()")


def test_timeout_ends_collectives_and_says_so_on_all_ranks(notebook: Notebook) -> None:
    begun = time.monotonic()
    cell = notebook.mesh(f"if rank == 2: time.sleep({2 * SECONDS})\n{SUM}")
    assert cell.status == "error" and time.monotonic() - begun < 4 * SECONDS
    wanted = f"GroupError: timed out after {SECONDS} s: other ranks have not joined all_reduce of the group"
    assert wanted in cell.text and "ranks 0-3" in cell.text and "gloo/" not in cell.text, cell.text
    # Its groups work again, with the timeout that they had.
    assert notebook.mesh(SUM).ok().shown == "[ranks 0-3] 4.0"
    again = notebook.mesh(f"if rank == 0: time.sleep({2 * SECONDS})\n{SUM}")
    assert again.status == "error" and f"timed out after {SECONDS} s" in again.text, again.text


def test_slow_training_within_the_timeout_goes_on(notebook: Notebook) -> None:
    """Each collective has the timeout for itself, much of which is left for a busy machine."""
    body = f"for step in range(4):\n    if rank == step: time.sleep({SECONDS} * 0.35)\n    {SUM}"
    assert notebook.mesh(body).status == "ok"


def test_asynchronous_operations_time_out_too(notebook: Notebook) -> None:
    body = "x = torch.ones(1)\nif rank:\n    dist.all_reduce(x, group=short, async_op=True).wait()\n"
    cell = notebook.mesh(f"{body}else: time.sleep({2 * SECONDS})")
    assert cell.status == "error" and f"timed out after {SECONDS} s" in cell.text, cell.text


def test_checked_collectives_wait_for_paused_ranks_too(notebook: Notebook) -> None:
    notebook.run("%mesh check on").ok()
    try:
        body = f"if rank == 2:\n    while not globals().get('go2'): time.sleep(0.01)\n{SUM}"
        notebook.mesh(body, "--nowait --out h").ok()
        notebook.run("%mesh pause mesh[2]").ok()
        paused = time.monotonic()
        assert wait_until(lambda: time.monotonic() > paused + 2 * SECONDS, 4 * SECONDS)
        notebook.run("%%mesh [2] --in-frame\ngo2 = True").ok()
        notebook.run("%mesh resume").ok()
        assert "ranks 0-3: 4.0" in notebook.run("h.result()").ok().shown
    finally:
        notebook.run("%mesh interrupt")
        notebook.run("%mesh check off").ok()


SHORT_RECEIVE = (
    "x = torch.zeros(1)\nif rank == 0: {0}\nelif rank == 2: dist.send(torch.ones(1), 0, group=short)\nx.item()"
)
RECEIVES = {
    "recv": "dist.recv(x, 2, group=short)",
    "irecv": "dist.irecv(x, 2, group=short).wait()",
    "any": "dist.recv(x, group=short)",
    "batch": "[each.wait() for each in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 2, short)])]",
}


@pytest.mark.parametrize("how", RECEIVES)
def test_paused_rank_does_not_time_out_a_receive(notebook: Notebook, how: str) -> None:
    receive = SHORT_RECEIVE.format(RECEIVES[how])
    notebook.mesh(
        f"if rank == 2:\n    while not globals().pop('go', 0): time.sleep(0.01)\n{receive}", "--nowait --out h"
    ).ok()
    notebook.run("%mesh pause mesh[2]").ok()
    assert wait_until(lambda: "rank 2: paused" in notebook.run("%mesh where").stream())
    paused = time.monotonic()
    assert wait_until(lambda: time.monotonic() > paused + 1.5 * SECONDS, 4 * SECONDS)
    notebook.run("%%mesh [2] --in-frame\ngo = True").ok()
    notebook.run("%mesh resume").ok()
    assert "rank 0:    1.0" in notebook.run("h.result()").ok().shown


@pytest.mark.parametrize("how", RECEIVES)
def test_receive_without_a_message_ends_with_the_timeout(notebook: Notebook, how: str) -> None:
    begun = time.monotonic()
    cell = notebook.mesh(f"x = torch.zeros(1)\nif rank == 0: {RECEIVES[how]}")
    assert cell.status == "error" and SECONDS * 0.9 < time.monotonic() - begun < 4 * SECONDS
    who = "no rank has" if how == "any" else "rank 2 has not"
    assert f"GroupError: timed out after {SECONDS} s: {who} sent a message in the group" in cell.text, cell.text
    # Its groups work again.
    assert notebook.mesh(SUM).ok().shown == "[ranks 0-3] 4.0"


def test_send_that_nobody_receives_ends_with_the_timeout(notebook: Notebook) -> None:
    cell = notebook.mesh("if rank == 1: dist.send(torch.ones(100_000_000), 3, group=short)")
    assert f"GroupError: timed out after {SECONDS} s: rank 3 has not received a message in the group" in cell.text, (
        cell.text
    )


def test_timeout_of_a_wait_counts_as_asked(notebook: Notebook) -> None:
    wait = "dist.irecv(torch.zeros(1), 2, group=short).wait(timedelta(seconds=0.2))"
    cell = notebook.mesh(f"from datetime import timedelta\nif rank == 0: {wait}")
    assert cell.status == "error" and "200ms" in cell.text, cell.text
