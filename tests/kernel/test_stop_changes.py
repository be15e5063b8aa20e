"""Stop while a mesh or actors are being made: the work completes or is undone, and a line says so."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import Cell, Notebook
from leaks import Kit

pytestmark = pytest.mark.slow

SPAWN = """%%mesh spawn {0}
from monarch.actor import Actor, endpoint
class Slow(Actor):
    def __init__(self, path=''):
        import os, time
        if path: open('-'.join([path, str(os.getpid()), str(time.time())]), 'w').close()
        while path and not os.path.exists(path): time.sleep(0.05)
    @endpoint
    def get(self): return 1
"""


@pytest.fixture(autouse=True)
def same_ranks(notebook: Notebook, leaks: Kit) -> Iterator[None]:
    yield
    notebook.run("1").ok()
    leaks.rebase()


def stop_after(notebook: Notebook, cell: Cell, words: str, times: int = 1) -> Cell:
    cell.until(lambda: words in cell.text)
    for _ in range(times):
        notebook.interrupt()
        time.sleep(0.02)
    return cell.wait()


@pytest.mark.parametrize("times", [1, 3])
def test_stopped_restart_continues_and_reports(notebook: Notebook, times: int) -> None:
    notebook.mesh("kept = 1").ok()
    cell = stop_after(notebook, notebook.send("%mesh restart"), "restarting", times)
    continues = "the restart of mesh 'mesh' continues" in cell.text
    # Each of the two may have been faster than the other.
    before = cell.status == "error" and not continues
    if continues or "was not restarted" in cell.text:
        assert "Traceback" not in cell.text and "threading" not in cell.text
    after = notebook.mesh("'kept' in globals()").ok()
    assert after.shown == f"[ranks 0-3] {before}"
    if continues:
        cell.until(lambda: "mesh 'mesh' restarted" in cell.text)


STOP_AT_THE_START = """
import threading
usual = threading.Thread.start
def start(thread):
    if not thread.name.startswith("monarch-restart"): return usual(thread)
    threading.Thread.start = usual
    {0}
    raise KeyboardInterrupt
threading.Thread.start = start
"""


@pytest.mark.parametrize("begun", [False, True])
def test_stop_as_a_restart_begins_says_what_happens(notebook: Notebook, begun: bool) -> None:
    notebook.mesh("kept = 1").ok()
    notebook.run(STOP_AT_THE_START.format("usual(thread)" if begun else "")).ok()
    cell = notebook.run("%mesh restart")
    said = "the restart of mesh 'mesh' continues" if begun else "mesh 'mesh' was not restarted; its variables are unch"
    assert said in cell.text and "Traceback" not in cell.text, cell.text
    assert notebook.mesh("'kept' in globals()").ok().shown == f"[ranks 0-3] {not begun}"


def test_stopped_start_cleans_up_and_reports(notebook: Notebook) -> None:
    cell = stop_after(notebook, notebook.send("%mesh up other --procs 2"), "of 2 ", 2)
    if cell.status == "error":
        # The second Stop may come while they end.
        assert re.search(r"mesh 'other' was not started; its processes (have been ended|are still ending)", cell.text)
        assert "Traceback" not in cell.text and "AttributeError" not in cell.text
        assert "other" not in notebook.run("%mesh").ok().text
    else:
        notebook.run("%mesh down other").ok()
    notebook.run("%mesh use mesh").ok()


SUSPEND = """
import os, signal
from monarch._node.current import current_node
from monarch._session.session import need_session
agent = need_session(current_node()).agent_pid
pids = open(f"/proc/{agent}/task/{agent}/children").read().split()
zygotes = [int(pid) for pid in pids if open(f"/proc/{pid}/comm").read().startswith("monarch-")]
[os.kill(pid, signal.SIGSTOP) for pid in zygotes];
"""
RESUME = "[os.kill(pid, signal.SIGCONT) for pid in zygotes];"


def stop_at_line(notebook: Notebook, code: str, words: str) -> str:
    """Stop a cell when its waiting line has some words; return its text."""
    cell = notebook.send(code)
    cell.until(lambda: any(words in str(each["data"]) for each in cell.contents("display_data", "update_display_data")))
    notebook.interrupt()
    return cell.wait().text


def test_stopped_resize_and_heal_say_what_is_left(notebook: Notebook) -> None:
    notebook.run("%mesh up tiny --procs 1").ok()
    notebook.run(SUSPEND).ok()
    text = stop_at_line(notebook, "%mesh resize tiny procs=2", "rank 1 starting for")
    assert "the resize of mesh 'tiny' was stopped, and it has procs=2 now; %mesh resize tiny procs=2" in text
    notebook.run(RESUME).ok()
    notebook.run("%mesh resize tiny procs=2").ok()
    notebook.run("%mesh kill tiny 1" if False else "%%mesh tiny [1]\nimport os\nos._exit(3)")
    notebook.run(SUSPEND).ok()
    text = stop_at_line(notebook, "%mesh heal tiny", "rank 1 starting for")
    assert "the heal of mesh 'tiny' was stopped: rank 1 has not started; %mesh heal tiny completes it" in text
    notebook.run(RESUME).ok()
    notebook.run("%mesh heal tiny").ok()
    assert notebook.run("%%mesh tiny\nrank").ok().shown
    notebook.run("%mesh down tiny").ok()
    notebook.run("%mesh use mesh").ok()


def test_stopped_spawn_leaves_no_actors(notebook: Notebook, tmp_path: Path) -> None:
    for times in (1, 2):
        cell = notebook.send(SPAWN.format(f"slow('{tmp_path}/go')"))
        cell.until(lambda times=times: len(list(tmp_path.glob("go-*"))) == 4 * times)
        notebook.interrupt()
        cell.wait()
        assert cell.reply["ename"] == "KeyboardInterrupt"
        assert "slow: the spawn was stopped; no actors were created" in cell.stream("stderr")
        assert "slow" not in notebook.run("%mesh").ok().text
    (tmp_path / "go").touch()
    cell = notebook.run(SPAWN.format("slow")).ok()
    assert "slow: 4 actors of Slow" in cell.stream() and "keep" not in cell.text and "cannot be edited" not in cell.text
    assert notebook.run("set(slow.get.call().get().values())").ok().shown == "{1}"
    notebook.run("slow.stop().get()").ok()


def test_spawn_warns_of_ignored_arguments(notebook: Notebook) -> None:
    cell = (
        "%%mesh spawn kept({0})\nfrom monarch.actor import Actor\nclass Kept(Actor):\n"
        "    def __init__(self, x): self.x = x"
    )
    assert "not used" not in notebook.run(cell.format(1)).ok().text
    assert "not used" not in notebook.run(cell.format(1)).ok().text
    assert "the arguments (5) are ignored" in notebook.run(cell.format(5)).ok().stream("stderr")
    notebook.run("kept.stop().get()").ok()


STOP_DURING_THE_END = """
import os, signal
from monarch_kernel.meshes.mesh import Mesh
usual = Mesh.end
def end(mesh):
    Mesh.end = usual
    os.kill(os.getpid(), signal.SIGINT)
    usual(mesh)
Mesh.end = end
"""


def test_stop_during_mesh_down_ends_only_the_wait(notebook: Notebook) -> None:
    notebook.run("%mesh up other 2").ok()
    notebook.mesh("import atexit, time\natexit.register(time.sleep, 1)", "other").ok()
    notebook.run(STOP_DURING_THE_END).ok()
    cell = notebook.run("%mesh down other")
    assert "KeyboardInterrupt: mesh 'other' is ending; its ranks may still run for some seconds" in cell.text
    assert "no mesh named 'other'" in notebook.run("%mesh down other").text
    assert notebook.mesh("1").ok().shown == "[ranks 0-3] 1"


DEATH_AT_THE_START = """
import os, signal
from monarch.actor import Actor, endpoint
from monarch_kernel.meshes.recipe import Recipe
class Pid(Actor):
    @endpoint
    def get(self): return os.getpid()
usual = Recipe.spawn
def spawn(recipe, hosts):
    Recipe.spawn = usual
    procs = usual(recipe, hosts)
    pids = procs.spawn("pid", Pid).get.call().get()
    if silent: os.kill(pids.item(procs=0), signal.SIGSTOP)
    os.kill(pids.item(procs=1), signal.SIGKILL)
    return procs
Recipe.spawn = spawn
"""


@pytest.mark.parametrize("silent", [False, True])
def test_failed_start_advises_to_start_again(notebook: Notebook, silent: bool) -> None:
    notebook.run(f"silent = {silent}{DEATH_AT_THE_START}").ok()
    cell = notebook.run("%mesh up other 2")
    assert "rank 1 of other was killed by signal 9 (SIGKILL)\nmesh 'other' was not started" in cell.text, cell.text
    assert (
        "its other processes have been ended; run the line again to start it" in cell.text and "heal" not in cell.text
    )
    notebook.run("%mesh up other 2").ok()
    notebook.run("%mesh down other").ok()
