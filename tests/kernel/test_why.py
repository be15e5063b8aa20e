"""Why ranks wait: a running cell says it unasked, ``%mesh why`` and ``mesh.why()`` at any time."""

from __future__ import annotations

import gc
import os
import re
import runpy
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangs import HANGS, Hang
from kernels import Cell, Notebook
from leaks import Kit, wait_until
from monarch_kernel.output.waiting import MARK

pytestmark = pytest.mark.slow
BOUND = 1.0
"""Seconds of a wait from which on a running cell of this module says why; other modules have the usual 3 s."""
LIMIT = 8.0
"""Seconds within which a cell says why its ranks wait, on a busy machine."""
MANY = 200
"""File descriptors of a rank: programs that are stopped leave groups, and ``select`` takes no number above 1,023."""


@pytest.fixture(scope="module", autouse=True)
def bound(notebook: Notebook) -> None:
    notebook.run(f"import os; os.environ['MONARCH_STUCK_WAIT_S'] = '{BOUND}'").ok()


@pytest.fixture(autouse=True)
def leaks(notebook: Notebook) -> Iterator[Kit]:
    """Restarts ranks that earlier programs have filled with groups, before it notes what is there."""
    if "True" in notebook.mesh(f"import os; len(os.listdir('/proc/self/fd')) > {MANY}").shown:
        notebook.run("%mesh down").ok()
        notebook.run("%mesh up 4").ok()
    kit = Kit()
    yield kit
    gc.collect()
    left = kit.left()
    assert not left, "the test has left behind: " + ", ".join(left)


def explained(cell: Cell) -> list[str]:
    """Return what the line of a running cell has said, without what rank each is in."""
    displays = cell.contents("display_data", "update_display_data")
    return [each["data"].get("text/plain", "") for each in displays if MARK in each["metadata"]]


def until_said(cell: Cell, *parts: str) -> float:
    """Wait until a running cell has said all of some parts at once; return the seconds."""
    begun = time.monotonic()
    cell.until(lambda: any(all(part in text for part in parts) for text in explained(cell)), f"{parts}")
    return time.monotonic() - begun


def ended(notebook: Notebook, cell: Cell) -> None:
    notebook.interrupt()
    cell.wait()


@pytest.fixture(autouse=True)
def nothing_runs_on(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run("%mesh resume").ok()
    notebook.run("%mesh interrupt")
    # Stop has freed all ranks, and they have a group again.
    assert wait_until(lambda: notebook.mesh("dist.barrier()").status == "ok")
    # Files and folders of programs that lock or open some.
    for path in Path(tempfile.gettempdir()).glob("monarch-hangs*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("hang", HANGS, ids=[each.name for each in HANGS])
def test_running_cell_says_why_it_hangs(notebook: Notebook, hang: Hang) -> None:
    cell = notebook.send(f"%%mesh\nimport time\n{hang.body}")
    try:
        seconds = until_said(cell, *hang.said)
    finally:
        ended(notebook, cell)
    assert seconds < (3 * LIMIT if hang.imports else LIMIT)
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_stop_names_the_wait_that_it_ends(notebook: Notebook) -> None:
    cell = notebook.send("%%mesh\nif rank == 0: dist.all_reduce(torch.ones(1))")
    until_said(cell, "rank 0 waits for ranks 1-3")
    ended(notebook, cell)
    text = cell.stream("stderr")
    assert "stopped: rank 0: was waiting in a collective" in text
    assert "\nwhen stopped: rank 0 waits for ranks 1-3, which finished without calling all_reduce()\n" in text, text
    assert "call it on all ranks of the group" in text


def test_interrupt_beside_a_cell_names_the_wait_that_it_ends(notebook: Notebook) -> None:
    """As the button of a view sends it."""
    subshell = notebook.control("create_subshell_request")["subshell_id"]
    cell = notebook.send("%%mesh\nif rank == 0: dist.all_reduce(torch.ones(1))")
    until_said(cell, "rank 0 waits for ranks 1-3")
    notebook.run("%mesh interrupt", subshell=subshell)
    text = cell.wait().stream("stderr")
    notebook.control("delete_subshell_request", subshell_id=subshell)
    reason = "rank 0 waits for ranks 1-3, which finished without calling all_reduce()"
    assert f"\nwhen stopped: {reason}\n" in text, text
    # Views show it too.
    told = notebook.run("[entry.event.reason for entry in mesh.events().of_kind('call waits')]").ok().shown
    assert f"stuck: {reason}" in told


def test_timeout_names_the_wait_that_it_ends(notebook: Notebook) -> None:
    cell = notebook.mesh("import time\nif rank == 2: time.sleep(600)\ndist.barrier()", "--timeout 4")
    assert "\nwhen stopped: ranks 0-1,3 wait for rank 2, which is asleep\n" in cell.stream("stderr"), cell.text
    # A terminal keeps what it shows while a cell runs.
    cell = notebook.send("%%mesh\nif rank == 0: dist.all_reduce(torch.ones(1))", cell_id="")
    cell.until(lambda: "rank 0 waits for ranks 1-3" in cell.stream("stderr"))
    ended(notebook, cell)
    assert "when stopped" not in cell.stream("stderr")


def test_why_explains_background_cells(notebook: Notebook) -> None:
    notebook.mesh("import time\nif rank == 2: time.sleep(600)\ndist.barrier()", "--nowait --out h").ok()
    assert wait_until(lambda: "ranks 0-1,3 wait for rank 2, which is asleep" in notebook.run("%mesh why").ok().stream())
    text = notebook.run("%mesh why").ok().stream()
    assert re.search(r"rank 2 asleep( for \d+s)? at cell \[\d+\] line 3: if rank == 2: time.sleep\(600\)", text), text
    assert "is_stuck" in notebook.run("mesh.why()").shown or "wait for rank 2" in notebook.run("print(mesh.why())").text
    notebook.run("h.cancel()")


WAITS_FOR_CHILDREN = """import os, subprocess, time
if rank < 2:
    child = subprocess.Popen(['sleep', '600'])
    os.waitpid(child.pid, 0) if rank == 0 else os.waitid(os.P_PID, child.pid, os.WEXITED)
else:
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    os.waitpid(child if rank == 2 else -1, 0)"""


def test_children_that_are_waited_for_by_pid_are_named(notebook: Notebook) -> None:
    notebook.mesh(WAITS_FOR_CHILDREN, "--nowait --out h").ok()

    def lines() -> list[str]:
        return notebook.run("%mesh why").ok().stream().splitlines()

    def named(rank: int, what: str) -> bool:
        pattern = rf"rank {rank} waiting for a child process: {what} \(pid \d+\), which is asleep"
        return any(re.search(pattern, line) for line in lines())

    for rank, what in enumerate(["sleep 600", "sleep 600", "a fork of this process", "a fork of this process"]):
        assert wait_until(lambda rank=rank, what=what: named(rank, what)), "\n".join(lines())
    notebook.run("h.cancel()")
    notebook.mesh("pid = child.pid if rank < 2 else child\nos.kill(pid, 9)\nos.waitpid(pid, 0)").ok()


CHILDREN = """import os, time
import torch.multiprocessing as mp
def train(i, pipe):
    if i == 0:
        os.read(pipe[0], 1)
    while True:
        time.sleep(600)
mp.start_processes(train, args=(os.pipe(),), nprocs=3, start_method="fork")"""


def test_places_of_spawned_processes_are_told(notebook: Notebook) -> None:
    notebook.mesh(CHILDREN, "[0] --nowait --out h").ok()
    wanted = (
        r"is waiting for a child process: processes 0 \(pid \d+\), 1 \(pid \d+\), 2 \(pid \d+\) of mp.spawn\n",
        r"\n    2 child processes asleep at cell \[\d+\] line 8 in train: time.sleep\(600\)\n",
        r"\n    1 child process waiting to read from a pipe at cell \[\d+\] line 6 in train: os.read\(pipe\[0\], 1\)\n",
    )

    def told() -> bool:
        text = notebook.run("%mesh why").ok().stream()
        return all(re.search(each, text) for each in wanted)

    assert wait_until(told), notebook.run("%mesh why").text
    notebook.run("h.cancel()")
    ends = "import multiprocessing\nfor each in multiprocessing.active_children(): each.kill(); each.join()"
    notebook.mesh(ends, "[0]").ok()


def test_places_of_processes_of_a_module_are_told(notebook: Notebook, tmp_path: Path) -> None:
    text = "import time\n\ndef train():\n    while True:\n        time.sleep(600)\n"
    (tmp_path / "trains_in_child.py").write_text(text)
    path = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport multiprocessing as mp, trains_in_child\n"
    start = "child = mp.get_context('spawn').Process(target=trains_in_child.train)\nchild.start()\nchild.join()"
    # Of its own, as multiprocessing leaves a process that tracks resources.
    notebook.run("%mesh up parents --procs 1").ok()
    notebook.run(f"%%mesh parents --nowait --out h\n{path}{start}").ok()
    wanted = "1 child process asleep at trains_in_child.py line 5 in train: time.sleep(600)"
    why = "%mesh why parents"
    assert wait_until(lambda: wanted in notebook.run(why).ok().stream()), notebook.run(why).text
    notebook.run("h.cancel()")
    notebook.run("%mesh down parents").ok()
    notebook.run("%mesh use mesh").ok()


def test_idle_and_computing_ranks_are_not_stuck(notebook: Notebook) -> None:
    assert "nothing appears to be stuck\n  ranks 0-3 are idle" in notebook.run("%mesh why").ok().stream()
    notebook.mesh("while True: rank + 1", "--nowait --out h").ok()
    text = notebook.run("%mesh why").ok().stream()
    assert text.startswith("nothing appears to be stuck") and "running Python" in text, text
    notebook.run("h.cancel()")


def test_slow_training_raises_no_alarm(notebook: Notebook) -> None:
    """A rank that computes longer than the bound, one that writes a checkpoint, and child processes that compile."""
    body = f"""import subprocess, sys, tempfile, time
model = torch.nn.Linear(256, 256)
def busy(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until: torch.ones(200, 200) @ torch.ones(200, 200)
for step in range(20):
    dist.all_reduce(model.weight.data)
    time.sleep(0.02 * rank)
if rank == 1: busy({BOUND + 1.5})
dist.barrier()
if rank == 0:
    subprocess.run([sys.executable, '-c', 'import time as t\\nu = t.time() + {BOUND + 1.5}\\nwhile t.time() < u: pass'])
dist.barrier()"""
    cell = notebook.mesh(body).ok()
    assert not [text for text in explained(cell) if "stuck" in text or "waiting:" in text], explained(cell)


@pytest.mark.timeout(600)
def test_training_with_checkpoints_and_compilers_raises_no_alarm(notebook: Notebook) -> None:
    """One round of what the script runs for longer."""
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "false_alarms.py"))
    before, notebook.guard = notebook.guard, 500.0
    try:
        cell = notebook.run(script["program"](0)).ok()
    finally:
        notebook.guard = before
    assert cell.shown == "[ranks 0-3] 1"
    parts = {line.partition("s: ")[2] for line in cell.said()}
    assert {"compiling by inductor", "building C++ on one rank", "checkpoint of all ranks"} <= parts
    shown = cell.contents("display_data", "update_display_data")
    assert not (alarms := [alarm for each in shown if (alarm := script["alarms_in"](each))]), "\n".join(alarms)


def test_late_rank_is_not_said_to_have_ended_without_the_others(notebook: Notebook, tmp_path: Path) -> None:
    # A read by C code that holds the GIL, until something is written.
    os.mkfifo(pipe := str(tmp_path / "pipe"))
    held = os.open(pipe, os.O_RDWR)
    read = f"ctypes.PyDLL(None).read(os.open({pipe!r}, os.O_RDWR), ctypes.create_string_buffer(1), 1)"
    cell = notebook.send(f"%%mesh\nimport ctypes, os\nif rank == 1: {read}\ndist.barrier()")
    try:
        until_said(cell, "holds the GIL")
    finally:
        os.write(held, b"x")
        os.close(held)
    said = explained(cell.wait().ok())
    assert any("holds the GIL" in text for text in said), said
    assert not [text for text in said if "stuck" in text], said


def test_rank_that_runs_another_program_is_named(notebook: Notebook, leaks: Kit) -> None:
    cell = notebook.send("%%mesh\nimport os\nif rank == 1: os.execv('/bin/sleep', ['sleep', '600'])\ndist.barrier()")
    until_said(cell, "wait for rank 1, which now runs sleep (os.exec)")
    ended(notebook, cell)
    assert "rank 1 of mesh 'mesh': a new process" in notebook.run("%mesh heal").ok().stream()
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"
    leaks.rebase()


def test_suspended_rank_is_named(notebook: Notebook) -> None:
    pids = notebook.mesh("import os\nos.getpid()").ok().shown
    pid = int(re.findall(r"\[rank 1\] (\d+)", pids)[0])
    notebook.mesh("dist.barrier()").ok()
    os.kill(pid, signal.SIGSTOP)
    try:
        cell = notebook.send("%%mesh\ndist.barrier()")
        until_said(cell, "rank 1, which is suspended by a signal", f"resume it with kill -CONT {pid}", "line 2")
    finally:
        os.kill(pid, signal.SIGCONT)
    cell.wait().ok()


def test_paused_rank_is_named(notebook: Notebook) -> None:
    body = "import time\nprint('runs')\nfor i in range(2000):\n    time.sleep(0.002)\n    dist.barrier()\ni"
    cell = notebook.mesh(body, "--nowait --out h").ok()
    cell.until(lambda: len(cell.said().get("runs", ())) == 4)
    began = time.monotonic()
    notebook.run("%mesh pause 1").ok()
    assert wait_until(lambda: "rank 1, which is paused by the debugger" in notebook.run("%mesh why").stream())
    # Counted from the pause on, however long the rank was idle before.
    paused = re.search(r"rank 1 paused by the debugger for (\d+)s", notebook.run("%mesh why").stream())
    assert paused is None or int(paused[1]) <= time.monotonic() - began
    notebook.run("%mesh resume").ok()
    notebook.run("h.cancel()")


def test_actor_that_waits_for_a_busy_one(notebook: Notebook) -> None:
    notebook.run(
        "%%mesh spawn pairs\nimport time\nclass Pair(Actor):\n    @endpoint\n    def ask(self, other):\n"
        "        return other.slow.call_one().get()\n    @endpoint\n    def slow(self):\n        time.sleep(600)"
    ).ok()
    cell = notebook.send("pairs.slice(procs=0).ask.call_one(pairs.slice(procs=3)).get()")
    until_said(cell, "rank 0 waits for rank 3, which is asleep", "in ask: return other.slow", "in slow: time.sleep")
    assert re.search(r"rank 3 asleep .* at cell \[\d+\] line 9 in slow: time.sleep\(600\)", explained(cell)[-1])
    ended(notebook, cell)
    notebook.run("pairs.stop().get()")


def test_terminal_shows_each_reason_once(notebook: Notebook) -> None:
    cell = notebook.send("%%mesh\nimport time\nif rank == 2: time.sleep(600)\ndist.barrier()", cell_id="")
    cell.until(lambda: "ranks 0-1,3 wait for rank 2" in cell.stream("stderr"))
    before = time.monotonic()
    cell.until(lambda: time.monotonic() > before + 2 * BOUND)
    assert cell.stream("stderr").count("ranks 0-1,3 wait for rank 2") == 1
    ended(notebook, cell)


def test_looks_take_little_of_a_training_step(notebook: Notebook) -> None:
    """A rank is asked once a second at most; a loop of 400,000 turns is a percent of that."""
    body = """import threading, time
from monarch._debug.why.probing import facts
model = torch.nn.Linear(256, 256)
seconds = []
def look():
    facts()
    begun = time.thread_time()
    for _ in range(20): facts()
    seconds.append((time.thread_time() - begun) / 20)
    begun = time.thread_time()
    for _ in range(400_000): pass
    seconds.append(time.thread_time() - begun)
looking = threading.Thread(target=look)
looking.start()
while True:
    model(torch.ones(64, 256)).sum().backward()
    for each in model.parameters(): dist.all_reduce(each.grad)
    left = torch.tensor([float(looking.is_alive())])
    dist.all_reduce(left)
    if not left.item(): break
print(seconds)
seconds[0] < seconds[1]"""
    cell = notebook.mesh(body).ok()
    assert cell.shown == "[ranks 0-3] True", cell.text


def test_bound_is_configurable(notebook: Notebook) -> None:
    notebook.run("import os; os.environ['MONARCH_STUCK_WAIT_S'] = '60'").ok()
    cell = notebook.mesh(f"import time\nif rank == 1: time.sleep({BOUND + 1.5})\ndist.barrier()").ok()
    assert not any("waiting:" in text for text in explained(cell))
    notebook.run(f"os.environ['MONARCH_STUCK_WAIT_S'] = '{BOUND}'").ok()
