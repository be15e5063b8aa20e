"""A Stop in an unlucky moment: before or after the code, in a finalizer, or on its way when the next cell begins."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import ALL, Notebook
from leaks import Kit


@pytest.fixture(autouse=True)
def same_ranks(notebook: Notebook, leaks: Kit) -> Iterator[None]:
    """Do not count replaced ranks as leaks, but do count programs started by ranks."""
    yield
    notebook.run("1").ok()
    leaks.rebase()


EARLY = """
import os, signal
shell = get_ipython()

def at(event):
    def stop(*_):
        shell.events.unregister(event, stop)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    return stop

{}
"""


def test_stop_just_before_or_after_the_code_works(notebook: Notebook) -> None:
    """A stop during kernel work must not cut it off: the first ends the code, the second nothing."""
    stop = "stop = at('pre_run_cell'); shell.events.register('pre_run_cell', stop)"
    notebook.run(EARLY.format(stop)).ok()
    cell = notebook.run("import time\ntime.sleep(600)")
    assert cell.reply["ename"] == "KeyboardInterrupt"
    notebook.run("stop = at('post_run_cell'); shell.events.register('post_run_cell', stop)").ok()
    assert notebook.run("'after'").ok().shown == "'after'"
    assert notebook.run("'next'").ok().shown == "'next'"
    assert notebook.mesh("1").ok().shown == "[ranks 0-3] 1"


@pytest.mark.parametrize("step", ["should_handle", "pre_handler_hook"])
def test_stop_before_a_cell_that_front_ends_see_begins_ends_it(notebook: Notebook, step: str) -> None:
    """Between the state busy and the code, ipykernel drops an interrupt, or ends the cell without a reply."""
    notebook.run(
        f"import os, signal\nkernel = get_ipython().kernel\nreal = kernel.{step}\n"
        f"def early(*args):\n    del kernel.{step}\n    handled = real(*args)\n"
        f"    os.kill(os.getpid(), signal.SIGINT)\n    return handled\nkernel.{step} = early"
    ).ok()
    cell = notebook.run("%%mesh\nimport time\ntime.sleep(600)")
    assert cell.status == "error" and cell.reply["ename"] == "KeyboardInterrupt"
    assert notebook.mesh("1").ok().shown == "[ranks 0-3] 1"


def test_stop_that_no_cell_takes_is_one_at_idle(notebook: Notebook) -> None:
    """After an error, the cells behind it are aborted: a Stop then must not wait for their code."""
    notebook.run(
        "import os, signal, time\nkernel, seen = get_ipython().kernel, []\n"
        "says, real = kernel._say_what_runs, kernel.set_parent\nkernel._say_what_runs = lambda: seen.append(1)\n"
        "def abort(ident, parent, channel='shell'):\n    real(ident, parent, channel)\n"
        "    if channel == 'shell' and parent['content'].get('code') == 'aborted':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\nkernel.set_parent = abort"
    ).ok()
    failing = notebook.send("time.sleep(0.5)\n1 / 0", stop_on_error=True)
    aborted = notebook.send("aborted")
    failing.wait()
    assert aborted.wait().status == "aborted"
    waits = "until = time.monotonic() + 20\nwhile not seen and time.monotonic() < until: time.sleep(0.05)"
    cell = notebook.run(f"{waits}\ndel kernel.set_parent\nkernel._say_what_runs = says\nseen")
    assert cell.ok().shown == "[1]"


def test_stop_of_a_cell_in_the_background_is_not_lost(notebook: Notebook) -> None:
    """It comes while the handle of the cell is made."""
    notebook.mesh("import time\nends = False").ok()
    cell = notebook.run(
        "import os, signal\nfrom monarch_kernel.cells.outcomes import Outcomes\nreal = Outcomes.handle\n"
        "def handle(*args):\n    Outcomes.handle = real\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(*args)\nOutcomes.handle = handle\n"
        "get_ipython().run_cell_magic('mesh', '--nowait', 'while not ends: time.sleep(0.01)')"
    )
    assert cell.status == "error" and cell.reply["ename"] == "KeyboardInterrupt"
    assert notebook.mesh("ends", "--timeout 20").ok().shown == "[ranks 0-3] False"


def agent_of(pid: int) -> int:
    """Return the host agent of a rank, which is the parent of its zygote."""
    import psutil

    return next(each.pid for each in psutil.Process(pid).parents() if each.name().startswith("monarch-agent"))


@pytest.mark.slow
def test_late_interrupt_does_not_hit_the_next_cell(notebook: Notebook, tmp_path: Path) -> None:
    notebook.mesh("import os, time").ok()
    rank = int(notebook.mesh("os.getpid()", "[0]").ok().shown.rpartition(" ")[2])
    agent = agent_of(rank)
    waits = f"print('runs')\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)"
    cell = notebook.send(f"%%mesh\n{waits}")
    cell.until(lambda: cell.said().get("runs") == ALL)
    os.kill(agent, signal.SIGSTOP)
    try:
        notebook.interrupt()
        (tmp_path / "go").touch()
        cell.wait()
        following = notebook.send("%%mesh\nprint('follows')\ntime.sleep(1.5)\n'whole'")
        time.sleep(0.5)  # the cell is to begin with the signal still under way, if anything lets it
    finally:
        os.kill(agent, signal.SIGCONT)
    following.wait()
    assert following.ok().shown == "[ranks 0-3] 'whole'"


def test_stop_during_a_finalizer_of_ours_is_not_lost(notebook: Notebook) -> None:
    """Python prints and drops what is raised in one."""
    held = "class Held:\n def __del__(self):\n  os.kill(os.getpid(), signal.SIGINT)\n  sum(range(1000))"
    cell = notebook.run(
        f"import monarch, os, signal, time\nexec(compile({held!r}, monarch.__file__, 'exec'))\n"
        "made = Held()\ndel made\nuntil = time.monotonic() + 20\nwhile time.monotonic() < until: pass"
    )
    assert cell.status == "error" and cell.contents("error")[0]["ename"] == "KeyboardInterrupt"
    assert "Exception ignored" not in cell.text


def test_stop_waits_for_the_end_of_a_finalizer(notebook: Notebook) -> None:
    """All of the time is in finalizers: Python reports the interrupt of one, and continues."""
    notebook.mesh("import time\nkept = rank\nclass Slow:\n    def __del__(self): time.sleep(0.01)").ok()
    for _ in range(3):
        cell = notebook.send("%%mesh\nprint('runs')\nwhile True: Slow()")
        cell.until(lambda cell=cell: cell.said().get("runs") == ALL)
        notebook.interrupt()
        cell.wait()
        assert "stopped: ranks 0-3: interrupted" in cell.stream(), cell.text
        assert "Exception ignored" not in cell.text
    assert notebook.mesh("kept == rank").ok().shown == "[ranks 0-3] True"


BLOCKS = {
    "a method": "class Blocks:\n    def __del__(self): time.sleep(1000)\nblock = Blocks",
    "another name": "class Blocks:\n    def close(self): time.sleep(1000)\n    __del__ = close\nblock = Blocks",
    "a generator": "def make():\n    try: yield\n    finally: time.sleep(1000)\ndef block(): next(make())",
    "cleanup": "class Blocks:\n  def __del__(self):\n    try: time.sleep(1000)\n    finally: clean()\nblock = Blocks",
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_finalizer_that_blocks_is_interrupted_once(notebook: Notebook, kind: str) -> None:
    clean = "cleaned = []\ndef clean():\n    for step in range(5): time.sleep(0.05); cleaned.append(step)"
    notebook.mesh(f"import time\nkept = rank\n{clean}\n{BLOCKS[kind]}").ok()
    cell = notebook.send("%%mesh\nprint('runs')\nblock()\nprint('past it')\ntime.sleep(1000)")
    cell.until(lambda: cell.said().get("runs") == ALL)
    notebook.interrupt()
    cell.wait()
    assert "stopped: ranks 0-3: interrupted" in cell.stream(), cell.text
    assert "Exception ignored" not in cell.text
    shown = notebook.mesh("kept == rank, cleaned").ok().shown
    assert shown == f"[ranks 0-3] (True, {[*range(5)] if kind == 'cleanup' else []})"


def test_stop_in_a_finalizer_cuts_no_cleanup_and_no_later_cell(notebook: Notebook) -> None:
    notebook.mesh(
        "import signal, time\ndone = 0\nclass Closes:\n    def __del__(self):\n"
        "        try: time.sleep(1000)\n        except KeyboardInterrupt: clean()\n"
        "def clean():\n    global done\n    for _ in range(8): time.sleep(0.1); done += 1"
    ).ok()
    cell = notebook.send("%%mesh\nprint('runs')\nheld = Closes()\nheld.__del__()")
    cell.until(lambda: cell.said().get("runs") == ALL)
    notebook.interrupt()
    cell.wait()
    # Whoever catches an interrupt in a method that it has called has all the time that it needs.
    assert notebook.mesh("done").ok().shown == "[ranks 0-3] 8"
    notebook.mesh("held.__class__.__del__ = lambda self: None").ok()
    after = notebook.mesh("try: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: print('taken')")
    assert after.ok().said() == {"taken": ALL}


SENDS = """
import os, signal
from monarch._meshes.actors import sending

def take_and_stop(receivers, cost, take=sending.take_all):
    sending.take_all = take
    os.kill(os.getpid(), signal.SIGINT)
    return take(receivers, cost)

sending.take_all = take_and_stop
"""
"""Code of a cell whose next message to ranks or actors is accompanied by a Ctrl-C."""


@pytest.mark.parametrize("line", ["", "[0:2]", "[0,2]", "--nowait"])
def test_stop_while_a_cell_is_sent_stops_its_ranks(notebook: Notebook, line: str) -> None:
    """The ranks would run it on with nobody who waits for them, and later cells would wait behind it."""
    notebook.mesh("import time\nends = False").ok()
    cell = notebook.run(f"{SENDS}get_ipython().run_cell_magic('mesh', {line!r}, 'while not ends: time.sleep(0.01)')")
    assert cell.status == "error" and cell.reply["ename"] == "KeyboardInterrupt"
    ranks = {"[0:2]": "0-1", "[0,2]": "0,2"}.get(line, "0-3")
    assert f"stopped: ranks {ranks}: interrupted" in cell.stream("stderr"), cell.text
    assert notebook.mesh("ends", "--timeout 20").ok().shown == "[ranks 0-3] False"


def test_stop_while_a_call_is_sent_stops_its_actors(notebook: Notebook) -> None:
    notebook.run(
        "%%mesh spawn loops\nimport time\nfrom monarch.actor import Actor, endpoint\nclass Loops(Actor):\n"
        "    @endpoint\n    def loop(self):\n        while True: time.sleep(0.01)\n"
        "    @endpoint\n    def lives(self): return True"
    ).ok()
    cell = notebook.run(f"{SENDS}loops.loop.call()")
    assert "stopped: ranks 0-3: interrupted" in cell.stream("stderr"), cell.text
    assert "True" in notebook.run("loops.lives.call().get(timeout=20)").ok().shown
    notebook.run("loops.stop().get(timeout=20)").ok()


def test_cell_that_cannot_reach_all_ranks_ends_on_the_others(notebook: Notebook) -> None:
    notebook.mesh("import time\nends = False").ok()
    cell = notebook.run(
        "import monarch_kernel.calls.cell_run as running\nfrom contextlib import contextmanager\n"
        "real = running.called\n"
        "@contextmanager\ndef failing(name):\n    with real(name):\n        yield\n        raise OSError('no room')\n"
        "running.called = failing\n"
        "try: get_ipython().run_cell_magic('mesh', '', 'while not ends: time.sleep(0.01)')\n"
        "finally: running.called = real"
    )
    assert "no room" in cell.text
    assert notebook.mesh("ends", "--timeout 20").ok().shown == "[ranks 0-3] False"
