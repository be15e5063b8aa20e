"""``breakpoint()``, ``%mesh break`` and steps: ranks stop by themselves, others wait for them, and all go on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dialogs import Dialog, said
from kernels import ALL, Cell, Notebook
from leaks import wait_until

STOPS = """import time
def work(n):
    total = 0
    for i in range(n):
        total += i
    return total
print('runs')
if rank == 1:
    x = 5
    breakpoint()
    y = x + 1
    z = work(3)
for i in range(30):
    time.sleep(0.02)
rank * 0"""


@pytest.fixture(autouse=True)
def nothing_is_left_paused(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.interrupt()
    notebook.run("%mesh clear").ok()
    notebook.run("%mesh resume").ok()
    notebook.run("%mesh interrupt")


def test_breakpoint_stops_a_rank_and_parks_the_others(notebook: Notebook) -> None:
    cell = notebook.mesh(STOPS, "--nowait --out h").ok()
    cell.until(lambda: "resume with %mesh continue" in cell.stream("stderr"))
    assert re.search(r"rank 1: paused \(breakpoint\) at cell \[\d+\] line 11: breakpoint\(\)", cell.stream("stderr"))
    assert wait_until(lambda: said(notebook, "%mesh where").count("while another rank is at a breakpoint") == 1)
    assert said(notebook, "%mesh print --on [1:2] x") == "rank 1: 5\n"
    assert "rank 1: paused at cell" in said(notebook, "%mesh next 1")
    assert said(notebook, "%mesh print --on [1:2] x") == "rank 1: 5\n"
    assert "resumed rank 1" in said(notebook, "%mesh continue 1")
    assert notebook.run("h.result()").ok().shown.endswith("ranks 0-3: 0")


def test_prompt_of_a_foreground_cell(notebook: Notebook) -> None:
    dialog = Dialog(notebook, f"%%mesh\n{STOPS}")
    assert dialog.prompt() == "(mesh rank 1) "
    assert "rank 1: paused (breakpoint) at cell" in dialog.shown()
    assert dialog.ask("x * 2").endswith("rank 1: 10\n")
    assert "line 12: y = x + 1" in dialog.ask("n")
    assert "line 13: z = work(3)" in dialog.ask("next")
    assert "line 4 in work: total = 0" in dialog.ask("step")
    assert "line 6 in work: total += i" in dialog.ask("until 6")
    assert "returns 3" in dialog.ask("finish")
    assert "NameError" in dialog.ask("print missing")
    assert "in work" in dialog.ask("where")
    dialog.answer("continue")
    dialog.cell.wait().ok()
    assert dialog.cell.shown == "[ranks 0-3] 0"
    assert dialog.cell.said()["runs"] == ALL


def test_stop_ends_the_prompt_and_the_cell(notebook: Notebook) -> None:
    dialog = Dialog(notebook, f"%%mesh\n{STOPS}")
    dialog.prompt()
    notebook.interrupt()
    assert dialog.cell.wait().status == "error"
    assert "stopped: ranks 0-3" in dialog.cell.text
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"
    dialog = Dialog(notebook, f"%%mesh\n{STOPS}")
    dialog.prompt()
    dialog.answer("quit")
    assert dialog.cell.wait().status == "error"
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_foreground_cell_without_prompt_resumes_from_elsewhere(notebook: Notebook) -> None:
    shell = notebook.control("create_subshell_request")["subshell_id"]
    cell = notebook.send(f"%%mesh\n{STOPS}")
    cell.until(lambda: "no prompt here" in cell.stream())
    assert "resumed rank 1" in notebook.run("%mesh continue 1", subshell=shell).ok().stream()
    assert cell.wait().ok().shown == "[ranks 0-3] 0"


def test_question_that_is_over_says_so(notebook: Notebook) -> None:
    shell = notebook.control("create_subshell_request")["subshell_id"]
    dialog = Dialog(notebook, "%%mesh\nbreakpoint()\nrank * 0")
    dialog.prompt()
    notebook.run("%mesh resume", subshell=shell).ok()
    assert dialog.cell.wait().ok().shown == "[ranks 0-3] 0"
    assert "if its input box is still open, press Enter in it" in dialog.cell.stream()


def test_all_ranks_stop_at_the_same_line(notebook: Notebook) -> None:
    dialog = Dialog(notebook, "%%mesh\nfor i in range(2):\n    breakpoint()\nrank * 0")
    assert dialog.prompt() == "(mesh ranks 0-3) "
    assert "ranks 0-3: paused (breakpoint) at cell" in dialog.shown()
    dialog.answer("rank 0,2")
    assert dialog.prompt() == "(mesh ranks 0,2) "
    dialog.answer("print rank")
    dialog.prompt()
    assert dialog.shown().endswith("rank 0: 0\nrank 2: 2\n")
    dialog.answer("rank all")
    dialog.prompt()
    assert "ranks 0-3: paused (breakpoint)" in dialog.ask("continue")
    dialog.answer("c")
    assert dialog.cell.wait().ok().shown == "[ranks 0-3] 0"


def test_breakpoints_with_conditions_on_some_ranks(notebook: Notebook) -> None:
    made = notebook.mesh(
        "def count(n):\n    total = 0\n    for i in range(n):\n        total += i\n    return total"
    ).ok()
    number = made.reply["execution_count"]
    assert f"breakpoint 1: cell [{number}] line 5 if i == 7 on rank 2" in said(
        notebook, f"%mesh break {number}:5 if i == 7 on [2:3]"
    )
    dialog = Dialog(notebook, "%%mesh\ncount(1000)")
    assert dialog.prompt() == "(mesh rank 2) "
    assert "rank 2: paused (breakpoint 1 if i == 7) at cell" in dialog.shown()
    assert dialog.ask("i, total").endswith("rank 2: (7, 21)\n")
    dialog.answer("c")
    assert dialog.cell.wait().ok().shown == "[ranks 0-3] 499500"
    assert "cleared breakpoint 1" in said(notebook, "%mesh clear 1")
    assert notebook.mesh("count(10)").ok().shown == "[ranks 0-3] 45"
    said(notebook, "%mesh break count if n == 3")
    assert notebook.mesh("count(10)").ok().shown == "[ranks 0-3] 45"
    dialog = Dialog(notebook, "%%mesh\ncount(3)")
    dialog.prompt()
    assert "line 3 in count: total = 0" in dialog.shown()
    dialog.answer("c")
    dialog.cell.wait().ok()


def test_breakpoint_in_a_running_loop_and_in_a_module(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "mod_bp.py").write_text("def double(x):\n    y = 2 * x\n    return y\n")
    notebook.mesh(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport mod_bp").ok()
    assert "line 2" in said(notebook, f"%mesh break {tmp_path}/mod_bp.py:2 on [3:4]")
    cell = notebook.mesh("print('runs')\nn = 0\nwhile True:\n    n = mod_bp.double(1)", "--nowait --out h").ok()
    cell.until(lambda: "rank 3: paused (breakpoint" in cell.stream("stderr"))
    said(notebook, "%mesh clear")
    said(notebook, "%mesh continue")
    number = cell.reply["execution_count"]
    said(notebook, f"%mesh break {number}:5 on [0:1]")
    assert wait_until(lambda: re.search(r"rank 0: paused \(breakpoint \d+\)", cell_text(cell, notebook)))
    notebook.run("h.cancel()")


def test_breakpoint_takes_effect_in_a_long_call_of_an_actor(notebook: Notebook) -> None:
    """In its own thread, and also in the frame that it is in."""
    code = """%%mesh spawn loopers
import time
class Looper(Actor):
    @endpoint
    def loop(self, n):
        i = 0
        while i < n:
            i += self.one()
            time.sleep(0.002)
        return i
    def one(self):
        return 1"""
    spawned = notebook.run(code).ok()
    number = spawned.reply["execution_count"]
    notebook.run("h = loopers.loop.call(10**9)")
    assert wait_until(lambda: "in loop: " in said(notebook, "%mesh where"))
    said(notebook, "%mesh break Looper.one on [2:3]")
    assert wait_until(
        lambda: re.search(r"rank 2:\n  paused \(breakpoint \d+\)\n.* in one: ", said(notebook, "%mesh where"))
    )
    said(notebook, "%mesh clear")
    said(notebook, "%mesh continue")
    assert wait_until(lambda: "paused" not in said(notebook, "%mesh where"))
    said(notebook, f"%mesh break {number}:8 on [1:2]")
    assert wait_until(
        lambda: re.search(r"rank 1: paused \(breakpoint \d+\) at .* line 8", said(notebook, "%mesh where"))
    )
    said(notebook, "%mesh clear")
    notebook.run("%mesh interrupt")
    notebook.run("loopers.stop().get()")


def cell_text(cell: Cell, notebook: Notebook) -> str:
    notebook.run("1")
    return cell.stream("stderr")


def test_wrong_arguments_are_explained(notebook: Notebook) -> None:
    assert "expected a place such as" in notebook.run("%mesh break").text
    assert "expected a place such as" in notebook.run("%mesh break a b").text
    assert "expected an expression after 'if'" in notebook.run("%mesh break f if x =").text
    assert "breakpoint 99 does not exist" in notebook.run("%mesh clear 99").text
    assert "no rank of mesh 'mesh' is paused" in notebook.run("%mesh next").text
    assert "has no breakpoints" in said(notebook, "%mesh breaks")


def test_breakpoints_in_unknown_code_are_noted(notebook: Notebook) -> None:
    cell = notebook.mesh("class Trainer:\n    def step(self):\n        # a comment\n        return 1").ok()
    number = cell.reply["execution_count"]
    assert "note: rank 0 has not loaded the function 'nowhere' yet" in said(notebook, "%mesh break nowhere")
    assert "note: rank 2 has not loaded the file 'nowhere.py' yet" in said(
        notebook, "%mesh break nowhere.py:3 on [2:4]"
    )
    assert "note: cell [9999] has not run on ranks yet" in said(notebook, "%mesh break 9999:1")
    assert f"cell [{number}] line 5; line 4 has no code\n" in said(notebook, f"%mesh break {number}:4")
    for place in ("Trainer.step", "linear.Linear.forward", f"{number}:3", f"{os.__file__}:60"):
        assert "note" not in said(notebook, f"%mesh break {place}")


def test_killed_rank_at_a_breakpoint_strands_nobody(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 3").ok()
    body = "import os, time\nprint('pid', os.getpid())\nif rank == 1: breakpoint()\ntime.sleep(0.2)\nrank * 0"
    cell = book.mesh(body, "--nowait --out h").ok()
    cell.until(lambda: "breakpoint" in cell.stream("stderr"))
    assert wait_until(lambda: book.run("%mesh where").text.count("while another") == 1)
    pid = int(re.findall(r"\[rank 1\] pid (\d+)", cell.stream())[0])
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: "paused" not in book.run("%mesh where").text)
    assert "Error" in book.run("h.result()").text
    book.run("%mesh heal").ok()
    assert book.mesh("rank * 0").ok().shown == "[ranks 0-2] 0"


def test_endpoints_stop_too(notebook: Notebook) -> None:
    code = """%%mesh spawn adders
class Adder(Actor):
    @endpoint
    def add(self, x):
        breakpoint()
        return x + 1"""
    notebook.run(code)
    notebook.run("h = adders.add.call(1)")
    assert wait_until(lambda: "paused (breakpoint)" in said(notebook, "%mesh where")), said(notebook, "%mesh where")
    said(notebook, "%mesh continue")
    assert "2" in notebook.run("h.get()").ok().shown


def test_cell_that_waits_for_an_endpoint_has_the_prompt(notebook: Notebook) -> None:
    code = """%%mesh spawn twos
class Two(Actor):
    @endpoint
    def double(self, x):
        breakpoint()
        return 2 * x"""
    notebook.run(code).ok()
    dialog = Dialog(notebook, "twos.double.call(4).get().item(procs=1)")
    assert dialog.prompt() == "(mesh ranks 0-3) "
    assert "ranks 0-3: paused (breakpoint) at cell" in dialog.shown()
    assert dialog.ask("x").endswith("ranks 0-3: 4\n")
    assert "return 2 * x" in dialog.ask("next")
    dialog.answer("continue")
    assert dialog.cell.wait().ok().shown == "8"
    dialog = Dialog(notebook, "(await twos.double.call(4)).item(procs=1)")
    assert dialog.prompt() == "(mesh ranks 0-3) "
    assert dialog.ask("x + 1").endswith("ranks 0-3: 5\n")
    dialog.answer("continue")
    assert dialog.cell.wait().ok().shown == "8"
    dialog = Dialog(notebook, "twos.double.call(4).get()")
    dialog.prompt()
    dialog.answer("quit")
    assert dialog.cell.wait().status == "error"
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_prompt_looks_at_waiting_ranks(notebook: Notebook) -> None:
    dialog = Dialog(notebook, f"%%mesh\n{STOPS}")
    dialog.prompt()
    dialog.answer("rank 2")
    assert dialog.prompt() == "(mesh rank 2) "
    dialog.seen = len(dialog.cell.stream())
    assert dialog.ask("rank * 10").endswith("rank 2: 20\n")
    dialog.answer("rank all")
    assert dialog.prompt() == "(mesh ranks 0-3) "
    dialog.answer("c")
    assert dialog.cell.wait().ok().shown == "[ranks 0-3] 0"


def test_thread_of_a_cell_stops_and_a_stop_of_the_cell_frees_it(notebook: Notebook) -> None:
    body = """import threading
def work():
    here = 'thread'
    breakpoint()
    done.append(here)
done = []
threading.Thread(target=work).start()
while not done:
    pass
done[0]"""
    dialog = Dialog(notebook, f"%%mesh\n{body}")
    assert dialog.prompt() == "(mesh ranks 0-3) "
    assert "line 5 in work: breakpoint()" in dialog.shown()
    assert dialog.ask("here").endswith("ranks 0-3: 'thread'\n")
    dialog.answer("c")
    assert dialog.cell.wait().ok().shown == "[ranks 0-3] 'thread'"
    dialog = Dialog(notebook, f"%%mesh\n{body}")
    dialog.prompt()
    notebook.interrupt()
    assert "stopped: ranks 0-3" in dialog.cell.wait().text
    assert wait_until(lambda: "ranks 0-3: idle" in said(notebook, "%mesh where"))
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_pause_and_stop_work_while_there_are_breakpoints(notebook: Notebook) -> None:
    said(notebook, "%mesh break never_called")
    body = """from monarch.actor import Actor, endpoint, this_proc
class Sum(Actor):
    @endpoint
    def add(self, x):
        return x
adder = this_proc().spawn('adder', Sum)
print('runs')
n = 0
while n < 100_000_000:
    n = adder.add.call_one(n).get() + 1"""
    cell = notebook.mesh(body, "--nowait --out h").ok()
    cell.until(lambda: cell.said().get("runs") == ALL)
    answers = [""]

    def are_paused() -> bool:
        answers.append(said(notebook, "%mesh pause"))
        return answers[-1].startswith("paused ranks 0-3")

    for _ in range(5):
        assert wait_until(are_paused), answers[-3:]
        text = said(notebook, "%mesh pause")
        assert re.search(r"paused at cell \[\d+\] line \d+: (n = |while )", text), text
        assert "paused at cell" in said(notebook, "%mesh next")
        said(notebook, "%mesh resume")
    notebook.run("h.cancel()")
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_others_run_on_if_they_are_told_to(own: Callable[..., Notebook]) -> None:
    book = own(MONARCH_BREAK_ALONE="1")
    book.run("%mesh up --procs 2").ok()
    cell = book.mesh("if rank == 1: breakpoint()\nprint('done')\nrank * 0", "--nowait --out h").ok()
    cell.until(lambda: cell.said().get("done") == {0} and "breakpoint" in cell.stream("stderr"))
    assert "rank 0: idle" in book.run("%mesh where").ok().stream()
    book.run("%mesh continue").ok()
    assert book.run("h.result()").ok().shown.endswith("ranks 0-1: 0")


def test_killed_kernel_leaves_no_rank_at_a_breakpoint(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    cell = book.mesh("import os\nprint('pid', os.getpid(), flush=True)\nif rank == 1: breakpoint()\n"
                     "while True: pass", "--nowait --out h").ok()  # fmt: skip
    cell.until(lambda: cell.stream().count("pid") == 2 and "breakpoint" in cell.stream("stderr"))
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", cell.stream())]
    provisioner: Any = book.manager.provisioner
    os.kill(provisioner.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_mesh_is_restarted_at_a_breakpoint(own: Callable[..., Notebook]) -> None:
    notebook = own()
    notebook.run("%mesh up --procs 2").ok()
    cell = notebook.mesh(STOPS, "--nowait --out h").ok()
    cell.until(lambda: "breakpoint" in cell.stream("stderr"))
    said(notebook, "%mesh break never_called")
    notebook.run("%mesh restart").ok()
    # A new rank hears of breakpoints beside its first cells.
    traced = "import sys\nsys.gettrace() is not None"
    assert wait_until(lambda: notebook.mesh(traced).ok().shown == "[ranks 0-1] True")
    said(notebook, "%mesh clear")
    assert notebook.mesh("sys.gettrace() is not None").ok().shown == "[ranks 0-1] False"


@pytest.mark.parametrize("verb", ["down", "restart"])
def test_end_of_a_mesh_aborts_paused_code(own: Callable[..., Notebook], tmp_path: Path, verb: str) -> None:
    notebook = own()
    notebook.run("%mesh up --procs 3").ok()
    body = f"""import os, threading, time
def note(name):
    open({str(tmp_path)!r} + f'/{{name}}-{{rank}}', 'w').close()
def thread():
    breakpoint()
    note('thread')
try:
    if rank == 0: threading.Thread(target=thread).start()
    if rank == 1: breakpoint()
    if rank == 2: time.sleep(1000)
    while rank == 0: time.sleep(0.01)
    note('after')
finally:
    note('finally')"""
    cell = notebook.mesh(body, "--nowait --out h").ok()
    cell.until(lambda: "rank 1: paused (breakpoint)" in cell.stream("stderr"))
    notebook.mesh("note('queued')", "--nowait --out later").ok()
    assert wait_until(lambda: "rank 2: paused (while another rank" in said(notebook, "%mesh where"))
    notebook.run(f"%mesh {verb}").ok()
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["finally-0", "finally-1", "finally-2"]


def test_stop_while_a_thread_of_the_code_stands(notebook: Notebook) -> None:
    body = "import threading\ndef f():\n    breakpoint()\nthreading.Thread(target=f, daemon=True).start()"
    for _ in range(6):
        notebook.mesh(body).ok()
        assert wait_until(lambda: "ranks 0-3: paused (breakpoint)" in said(notebook, "%mesh where"))
        # The next call waits too, until it is stopped.
        cell = notebook.send("%%mesh\nrank")
        cell.until(lambda cell=cell: "no prompt here" in cell.stream())
        notebook.interrupt()
        assert cell.wait().status == "error"
        assert wait_until(lambda: "ranks 0-3: idle" in said(notebook, "%mesh where"))
        assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_condition_that_exits_stops_the_rank(notebook: Notebook) -> None:
    number = notebook.run("%mesh breaks").ok().reply["execution_count"] + 2
    said(notebook, f"%mesh break {number}:3 if exit()")
    notebook.mesh("x = 1\nx = 2\nx", "--nowait --out h").ok()
    assert wait_until(lambda: "whose condition raises SystemExit" in said(notebook, "%mesh where"))
    said(notebook, "%mesh continue")
    assert notebook.run("h.result()").ok().shown.endswith("ranks 0-3: 2")
