"""``%mesh frame``, ``vars``, ``diff`` and ``%%mesh --in-frame``: looking at paused, running and idle ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest

from kernels import ALL, Cell, Notebook
from leaks import wait_until

LOOP = """import time
def outer(until):
    name = 'outer'
    return inner(until, rank + 1)
def inner(until, step):
    n = 0
    same = torch.arange(6.)
    bad = torch.ones(4, 3)
    if rank == 2:
        bad[1, 2] = 1.5
        bad[3, 0] = float('nan')
    nested = {'a': 1, 'b': [torch.ones(300, 300), 'text'], 'c': 2.5}
    if rank == 1:
        nested['b'][0][2, 7] = 3
    if rank == 3:
        del nested['c']
    while n < until:
        time.sleep(0.002)
    return n, step
print('runs')
model = torch.nn.Linear(2, 3)
with torch.no_grad():
    model.bias[:] = rank == 0
    model.weight[:] = 1
outer(1)"""


@pytest.fixture(autouse=True)
def nothing_is_left_paused(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run("%mesh resume").ok()
    notebook.run("%mesh interrupt")


@pytest.fixture
def loop(notebook: Notebook) -> Cell:
    cell = notebook.mesh(LOOP, "--nowait --out h").ok()
    return cell.until(lambda: cell.said().get("runs") == ALL)


def said(notebook: Notebook, line: str) -> str:
    return notebook.run(line).ok().stream("stdout")


def paused(notebook: Notebook) -> None:
    wait_until(lambda: said(notebook, "%mesh where").count("in inner") == 1)
    assert said(notebook, "%mesh pause").startswith("paused ranks 0-3")


def test_selected_frame_is_marked_and_used_until_resume(notebook: Notebook, loop: Cell) -> None:
    paused(notebook)
    text = said(notebook, "%mesh frame")
    assert re.search(r"ranks 0-3:\n  paused\n  > 0  cell \[\d+\] line \d+ in inner: ", text), text
    assert re.search(r"\n    1  cell \[\d+\] line 5 in outer: return inner\(until, rank \+ 1\)", text)
    assert "> 1  cell" in said(notebook, "%mesh frame up")
    assert "  > cell" in said(notebook, "%mesh where").splitlines()[3]
    assert said(notebook, "%mesh print name") == "ranks 0-3: 'outer'\n"
    assert "NameError" in said(notebook, "%mesh print --up 1 name")
    assert "> 2  cell" in said(notebook, "%mesh frame mesh 2")
    assert "expected a frame from 0 (innermost) to 2, got 3" in notebook.run("%mesh frame up").text
    assert "> 1  cell" in said(notebook, "%mesh frame down")
    said(notebook, "%mesh resume")
    said(notebook, "%mesh pause")
    assert said(notebook, "%mesh print step").splitlines()[:2] == ["rank 0: 1", "rank 1: 2"]


def test_stacks_of_all_threads_are_folded_across_ranks(notebook: Notebook) -> None:
    body = """import queue, threading, time
from concurrent.futures import ThreadPoolExecutor
waited = queue.Queue()
def load():
    return waited.get()
def work(seconds):
    return load() if seconds else time.sleep(seconds)
if rank != 1:
    threading.Thread(target=load, name=f'loader {rank}', daemon=True).start()
pool = ThreadPoolExecutor(3)
futures = [pool.submit(work, 1) for _ in range(3)]
print('runs')
while waited.empty(): time.sleep(0.002)"""
    cell = notebook.mesh(body, "--nowait --out h").ok()
    cell.until(lambda: cell.said().get("runs") == ALL)
    text = said(notebook, "%mesh where --threads")
    assert re.search(r"^ranks 0-3, main thread: cell \[\d+\] line 14: while waited", text, re.M), text
    assert re.search(r"^ranks 0,2-3, thread 'loader 0': cell \[\d+\] line 6 in load: return waited.get\(\)", text, re.M)
    assert re.search(
        r"^ranks 0-3, 3 threads such as 'ThreadPoolExecutor-\d+_0':\n  cell \[\d+\] line 6 in load", text, re.M
    )
    assert "monarch-" not in text
    only = said(notebook, "%mesh where mesh 1 --threads")
    assert "loader" not in only and only.startswith("rank 1, main thread: ")
    assert notebook.run("[len(each) for each in mesh.threads().values()]").ok().shown == "[5, 4, 5, 5]"
    said(notebook, "%mesh pause 2")
    assert "rank 2, main thread (paused): " in said(notebook, "%mesh where --threads")
    said(notebook, "%mesh resume")
    notebook.run("h.cancel()")
    notebook.mesh("for _ in range(9): waited.put(1)").ok()
    assert "ranks 0-3, main thread: idle" in said(notebook, "%mesh where --threads")


def test_frame_of_idle_ranks_cannot_be_selected(notebook: Notebook) -> None:
    assert "are idle; run a cell, then %mesh pause" in notebook.run("%mesh frame 1").text
    assert said(notebook, "%mesh frame") == "ranks 0-3: idle\n"


def rows(cell: Cell) -> dict[str, list[str]]:
    """The lines of a table, by name; a line without one belongs to the name above it."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in cell.ok().shown.splitlines()[2:]:
        name = line.split()[0] if not line.startswith(" ") else name
        found.setdefault(name, []).append(" ".join(line.removeprefix(name).split()))
    return found


def test_variables_of_the_frame_are_folded_across_ranks(notebook: Notebook, loop: Cell) -> None:
    running = rows(notebook.run("%mesh vars"))
    paused(notebook)
    cell = notebook.run("%mesh vars")
    table = rows(cell)
    assert running.keys() == table.keys() == {"bad", "n", "nested", "same", "step", "until"}
    assert re.match(r"ranks 0-3 of mesh 'mesh': cell \[\d+\] line (18|19|20) in inner", cell.shown)
    assert table["until"] == ["int 1 28 B 0-3 equal"]
    assert [line.split()[-2:] for line in table["step"]] == [[str(rank), "differ"] for rank in range(4)]
    assert table["bad"] == [
        "Tensor float32[4, 3] on cpu, min 1, max 1, mean 1 48 B 0-1,3 differ",
        "Tensor float32[4, 3] on cpu, min 1, max 1.5, mean 1.045, 1 NaN 48 B 2 differ",
    ]
    assert "<table" in cell.bundles[0]["text/html"]
    assert rows(notebook.run("%mesh vars mesh 0,2 s*")).keys() == {"same", "step"}
    assert "no variable matches 'zz*'" in notebook.run("%mesh vars zz*").text
    said(notebook, "%mesh frame 1")
    assert rows(notebook.run("%mesh vars")).keys() == {"name", "until"}
    said(notebook, "%mesh frame 2")
    assert {"model", "outer", "time"} <= rows(notebook.run("%mesh vars")).keys()


def test_variables_of_idle_ranks_are_those_of_cells(notebook: Notebook) -> None:
    notebook.mesh("alone = torch.full((3,), 2.)").ok()
    cell = notebook.run("%mesh vars [0:2] alone")
    assert cell.shown.startswith("ranks 0-1 of mesh 'mesh': no code is running; variables of cells")
    assert rows(cell) == {"alone": ["Tensor float32[3] on cpu = [2, 2, 2] 12 B 0-1 equal"]}


@pytest.mark.parametrize("stopped", [True, False])
def test_diff_names_ranks_keys_and_indices(notebook: Notebook, loop: Cell, stopped: bool) -> None:
    if stopped:
        paused(notebook)
    assert said(notebook, "%mesh diff same") == (
        "ranks 0-3 agree on same: Tensor float32[6] = [0, 1, 2, 3, 4, 5], norm 7.4162\n"
    )
    bad = said(notebook, "%mesh diff bad").splitlines()
    assert bad[0] == "bad differs: ranks 0-1,3 agree; rank 2"
    assert "norm 3.4641" in bad[1] and "1 non-finite" in bad[2]
    assert bad[3] == "  first difference at [1, 2]: 1 on ranks 0-1,3, 1.5 on rank 2"
    assert bad[4] == "  2 of 12 elements differ, by at most 0.5"
    nested = said(notebook, "%mesh diff nested").splitlines()
    assert nested[0] == "nested differs: ranks 0,2 agree; rank 1; rank 3"
    assert nested[1] == "rank 1 vs ranks 0,2 at ['b'][0] (1 of 4 parts differs):"
    assert nested[4] == "  first difference at [2, 7]: 1 on ranks 0,2, 3 on rank 1"
    assert nested[6:] == [
        "rank 3 vs ranks 0,2 at ['c'] (1 of 4 parts differs):", "  ranks 0,2: 2.5", "  rank 3: missing",
    ]  # fmt: skip
    step = said(notebook, "%mesh diff step").splitlines()
    assert step[:3] == ["step differs: no two of ranks 0-3 agree", "  rank 0: 1", "  rank 1: 2"]
    assert "rank 0 vs ranks 1-3 at .bias (1 of 2 parts differs)" in said(notebook, "%mesh diff model")
    assert said(notebook, "%mesh diff --on [0:2] model.weight.shape").startswith("ranks 0-1 agree on")
    assert "ranks 0-3: NameError" in said(notebook, "%mesh diff missing")


def test_diff_of_idle_ranks_and_of_wrong_expressions(notebook: Notebook) -> None:
    notebook.mesh("x = torch.zeros(3 + (rank == 3))\nopt = torch.optim.Adam([torch.ones(2)], lr=0.1 * (rank + 1))").ok()
    text = said(notebook, "%mesh diff x")
    assert "rank 3" in text and "float32[4]" in text and "first difference" not in text
    assert "at ['param_groups'][0]['lr']" in said(notebook, "%mesh diff opt")
    assert "expected an expression" in notebook.run("%mesh diff").text
    assert "all_reduce would wait for other ranks" in notebook.run("%mesh diff dist.all_reduce(x)").text
    assert "is not an expression" in notebook.run("%mesh diff x = 1").text


def test_large_arrays_are_compared_without_being_sent(notebook: Notebook) -> None:
    notebook.mesh("large = torch.zeros(3000, 2000)\nif rank == 1: large[1234, 567] = 1e-3\nspread = large + rank").ok()
    text = said(notebook, "%mesh diff large")
    assert "first difference at [1234, 567]: 0 on ranks 0,2-3, 0.00100000005 on rank 1" in text
    assert "1 of 6,000,000 elements differs, by at most 0.001" in text
    everywhere = said(notebook, "%mesh diff --on [0:2] spread")
    assert re.search(
        r"at least 1[34]\d,\d+ of 6,000,000 elements differ; the largest difference is at least 1", everywhere
    ), everywhere


def test_statements_run_in_the_selected_frame(notebook: Notebook, loop: Cell) -> None:
    paused(notebook)
    cell = notebook.mesh(
        "print('in', step)\nprint('same')\ndouble = [each * 2 for each in [step]]\nstep * 10", "--in-frame"
    )
    assert cell.ok().said()["same"] == ALL and cell.said()["in 3"] == {2}
    assert "[rank 0] 10" in cell.shown and "[rank 3] 40" in cell.shown
    assert said(notebook, "%mesh print --on [1:2] double, (lambda: double)()") == "rank 1: ([4], [4])\n"
    said(notebook, "%mesh frame 1")
    assert notebook.mesh("name", "[0:2] --in-frame").ok().shown == "[ranks 0-1] 'outer'"


def test_changed_local_variables_take_effect(notebook: Notebook, loop: Cell) -> None:
    paused(notebook)
    notebook.mesh("global Z\nZ = 7\ndel bad\nstep = 100\nuntil = 0 if rank else until", "--in-frame").ok()
    assert "bad" not in rows(notebook.run("%mesh vars"))
    said(notebook, "%mesh resume")
    wait_until(lambda: re.search(r"ranks 1-3: idle", said(notebook, "%mesh where")))
    said(notebook, "%mesh pause 0")
    notebook.mesh("n, until = 5, 5", "[0:1] --in-frame").ok()
    said(notebook, "%mesh resume")
    shown = notebook.run("h.result()").ok().shown
    assert re.search(r"rank 0: +\(5, 100\)\nranks 1-3: +\(0, 100\)", shown)
    assert notebook.mesh("Z").ok().shown == "[ranks 0-3] 7"


def test_changed_variables_stay_through_steps(notebook: Notebook) -> None:
    body = """def outer():
    found = inner(1)
    return found
def inner(x):
    breakpoint()
    y = x + 1
    z = y * 10
    return x, y, z
print('runs')
outer()"""
    notebook.mesh(body, "--nowait --out h").ok()
    assert wait_until(lambda: said(notebook, "%mesh where").startswith("ranks 0-3:\n  paused (breakpoint)"))
    said(notebook, "%mesh frame 1")
    notebook.mesh("note = 5", "--in-frame").ok()
    notebook.run("%mesh next").ok()
    # The step has reset the selection.
    assert notebook.mesh("x = 100 + rank\nx", "--in-frame").ok().shown.startswith("[rank 0] 100")
    for _ in range(2):
        notebook.run("%mesh next").ok()
    assert said(notebook, "%mesh print --on [2:3] x, y") == "rank 2: (102, 103)\n"
    assert said(notebook, "%mesh print --up 1 note") == "ranks 0-3: 5\n"
    said(notebook, "%mesh resume")
    assert re.search(r"rank 3: +\(103, 104, 1040\)", notebook.run("h.result()").ok().shown)


ACTOR = """from monarch.actor import Actor, endpoint
class First(Actor):
    @endpoint
    def idle(self): pass
class Second(Actor):
    @endpoint
    def work(self, value):
        import time
        breakpoint()
        return value
second = mesh.spawn('first', First) and mesh.spawn('second', Second)
call = second.work.call(1)"""


def test_statements_run_in_further_actors(notebook: Notebook) -> None:
    """They have threads of their own, which a signal does not reach."""
    notebook.run(ACTOR).ok()
    assert wait_until(lambda: said(notebook, "%mesh where").startswith("ranks 0-3: paused (breakpoint)"))
    assert notebook.mesh("value += 10\nvalue", "[1:2] --in-frame").ok().shown == "[rank 1] 11"
    cell = notebook.send("%%mesh --in-frame\nprint('begun')\nwhile True: time.sleep(0.01)")
    cell.until(lambda: cell.said().get("begun") == ALL)
    notebook.interrupt()
    assert "ranks 0-3 stopped in the frame; the ranks are still paused" in cell.wait().text
    said(notebook, "%mesh resume")
    assert notebook.run("call.get(timeout=20).values()").ok().shown == "[1, 11, 1, 1]"


def test_statements_run_in_an_endpoint_that_awaits(notebook: Notebook) -> None:
    work = ACTOR.replace("def work", "async def work").replace("second", "third").replace("Second", "Third")
    work = work.replace("import time", "import asyncio\n        await asyncio.sleep(0)")
    notebook.run(work).ok()
    assert wait_until(lambda: said(notebook, "%mesh where").startswith("ranks 0-3: paused (breakpoint)"))
    assert notebook.mesh("value += 10\nvalue", "[1:2] --in-frame").ok().shown == "[rank 1] 11"
    said(notebook, "%mesh resume")
    assert notebook.run("call.get(timeout=20).values()").ok().shown == "[1, 11, 1, 1]"


def test_errors_of_statements_are_folded_and_end_nothing(notebook: Notebook, loop: Cell) -> None:
    paused(notebook)
    cell = notebook.mesh("x = 1\nif rank:\n    raise ValueError('no')\nn", "--in-frame")
    assert cell.status == "error" and "[rank 0] 0" in cell.shown
    failed = r"cell \[\d+\] failed on ranks 1-3\n  ranks 1-3: ValueError: no\n      cell \[\d+\] line 4: "
    assert re.search(failed, cell.text)
    assert "SyntaxError" in notebook.mesh("x = = 1", "--in-frame").text
    assert "SystemExit" in notebook.mesh("raise SystemExit", "--in-frame").text
    assert said(notebook, "%mesh where").startswith("ranks 0-3:\n  paused")


def test_statements_need_paused_ranks_and_no_collective(notebook: Notebook, loop: Cell) -> None:
    assert "ranks 0-3: not paused" in notebook.mesh("n", "--in-frame").text
    paused(notebook)
    said(notebook, "%mesh resume 3")
    cell = notebook.mesh("n", "--in-frame")
    assert cell.ok().shown == "[ranks 0-2] 0" and "rank 3: not paused" in cell.stream("stderr")
    assert (
        "barrier would wait for other ranks"
        in notebook.mesh("for i in range(2):\n    dist.barrier()", "--in-frame").text
    )
    assert "cannot be combined with --nowait" in notebook.mesh("n", "--in-frame --nowait").text
    assert "--force applies only to cells with --in-frame" in notebook.mesh("n", "--force").text
    text = notebook.mesh("dist.get_backend()\ndist.barrier\nrank * 0", "--in-frame --force").ok().shown
    assert text == "[ranks 0-2] 0"


def test_stop_ends_statements_and_not_the_pause(notebook: Notebook, loop: Cell) -> None:
    paused(notebook)
    cell = notebook.send("%%mesh --in-frame\nprint('begun')\nimport time\ntime.sleep(1000)")
    cell.until(lambda: cell.said().get("begun") == ALL)
    notebook.interrupt()
    assert "ranks 0-3 stopped in the frame; the ranks are still paused" in cell.wait().text
    assert said(notebook, "%mesh print n") == "ranks 0-3: 0\n"
    assert notebook.mesh("until = 0", "--in-frame").ok().shown == ""
    said(notebook, "%mesh resume")
    assert "rank 0: (0, 1)" in notebook.run("h.result()").ok().shown


def test_interrupt_of_the_paused_code_ends_statements_too(notebook: Notebook, loop: Cell) -> None:
    paused(notebook)
    subshell = notebook.control("create_subshell_request")["subshell_id"]
    cell = notebook.send("%%mesh --in-frame\nprint('begun')\nimport time\ntime.sleep(1000)")
    cell.until(lambda: cell.said().get("begun") == ALL)
    assert "stopped: ranks 0-3" in notebook.run("%mesh interrupt", subshell=subshell).text
    assert "KeyboardInterrupt" in cell.wait().text
    assert "KeyboardInterrupt" in notebook.run("h.result()").text
    notebook.control("delete_subshell_request", subshell_id=subshell)
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


@pytest.mark.slow
def test_expressions_on_paused_ranks_are_quick(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 8").ok()
    cell = book.mesh("import time\nx = 0\nprint('runs')\nwhile True: time.sleep(0.01)", "--nowait --out h")
    cell.until(lambda: cell.said().get("runs") == set(range(8)))
    book.run("%mesh pause").ok()
    took: list[float] = []
    for _ in range(20):
        begun = time.perf_counter()
        assert said(book, "%mesh print x + 1") == "ranks 0-7: 1\n"
        took.append(time.perf_counter() - begun)
    print(f"seconds for an expression on 8 paused ranks: {sorted(took)[10]:.4f}")
    assert sorted(took)[5] < 0.05, took
