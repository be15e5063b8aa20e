"""Stop reaches actors in threads, on event loops and in main threads, from their cells and from plain cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kernels import Cell, Notebook

pytestmark = pytest.mark.slow

IN_TIME = 2.0
ACTORS = """
import asyncio, os, time
from monarch.actor import Actor, endpoint
def say(): print('runs', flush=True)
class Works(Actor):
    def __init__(self): self.kept = 'kept'
    @endpoint
    def loop(self):
        say()
        while True: pass
    @endpoint
    def nap(self):
        from monarch._actors import interruptible
        # Python's own, which goes on after any signal.
        say(); interruptible._sleep(5)
    @endpoint
    def swallow(self, path):
        say()
        while not os.path.exists(path):
            try: time.sleep(0.01)
            except KeyboardInterrupt: pass
    @endpoint
    def queue(self):
        import queue
        say(); queue.Queue().get()
    @endpoint
    def store(self):
        from datetime import timedelta
        from torch.distributed import TCPStore
        server = TCPStore('127.0.0.1', 0, 1, True, wait_for_workers=False)
        client = TCPStore('127.0.0.1', server.port, 1, False)
        say(); client.wait(['never'], timedelta(hours=1))
    @endpoint
    def lock(self):
        import threading
        Works.held = threading.Lock()
        Works.held.acquire()
        say(); Works.held.acquire()
    @endpoint
    def get(self): return self.kept
class Awaits(Actor):
    def __init__(self): self.kept = 'kept'
    @endpoint
    async def loop(self):
        say()
        while True: pass
    @endpoint
    async def wait(self):
        say(); await asyncio.sleep(50)
    @endpoint
    async def get(self): return self.kept
"""


@pytest.fixture(scope="module")
def book(notebook: Notebook) -> Iterator[Notebook]:
    notebook.run(ACTORS).ok()
    notebook.run(
        "from monarch.actor import this_host\n"
        "own = this_host().spawn_procs({'gpus': 4})\n"
        "procs = get_ipython().magics_manager.registry['MeshMagics'].meshes.get(None).procs\n"
        # In threads, on loops in threads; in main threads, on loops in main threads.
        "works, awaits = procs.spawn('works', Works), procs.spawn('awaits', Awaits)\n"
        "mains = own.spawn('mains', Works)\n"
        "loops = this_host().spawn_procs({'gpus': 4}).spawn('loops', Awaits)\n"
        "for each in (works, awaits, mains, loops): each.initialized.get()"
    ).ok()
    for name in ("works", "awaits", "mains", "loops"):
        # The first cell in a process creates its notes file.
        notebook.mesh("1", name).ok()
    yield notebook


def stop(book: Notebook, cell: Cell) -> float:
    cell.until(lambda: cell.said().get("runs") == {0, 1, 2, 3})
    begun = time.perf_counter()
    book.interrupt()
    cell.wait()
    return time.perf_counter() - begun


@pytest.mark.parametrize("call", ["works.loop", "mains.loop", "awaits.loop", "loops.loop", "awaits.wait", "loops.wait"])
@pytest.mark.parametrize("form", ["{}.call().get()", "await {}.call()"])
def test_stop_reaches_actors_called_by_a_plain_cell(book: Notebook, call: str, form: str) -> None:
    cell = book.send(form.format(call))
    assert stop(book, cell) < IN_TIME
    assert cell.reply["ename"] in ("KeyboardInterrupt", "CancelledError")
    # On a busy machine one may be late for the first rung, but none needs more than an interrupt.
    said = cell.stream("stderr")
    assert "interrupted" in said and "C call" not in said and "after each interrupt" not in said
    assert "loop.py" not in cell.text
    name = call.partition(".")[0]
    assert book.run(f"set({name}.get.call().get().values())").ok().shown == "{'kept'}"


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("works", "while True: pass"),
        ("mains", "while True: pass"),
        ("awaits", "while True: pass"),
        ("awaits", "import asyncio\nawait asyncio.sleep(60)"),
        ("loops", "import asyncio\nawait asyncio.sleep(60)"),
    ],
)
def test_stop_reaches_a_cell_inside_actors(book: Notebook, line: str, body: str) -> None:
    cell = book.send(f"%%mesh {line}\nself.kept = 'kept'\nprint('runs')\n{body}")
    assert stop(book, cell) < IN_TIME
    assert cell.status == "error"
    assert "stopped: ranks 0-3: interrupted" in cell.stream("stderr")
    assert book.mesh("self.kept", line).ok().shown == "[ranks 0-3] 'kept'"


def test_actor_inside_a_c_call_finishes_it(book: Notebook) -> None:
    cell = book.send("works.nap.call().get()")
    assert stop(book, cell) < IN_TIME
    assert "inside a C call" in cell.stream("stderr")
    # Then it handles the next message.
    assert book.run("set(works.get.call().get().values())").ok().shown == "{'kept'}"


@pytest.mark.parametrize(
    ("wait", "words"),
    [("queue", "interrupted"), ("store", "were waiting for a connection (connection closed)")],
)
def test_wait_in_a_thread_is_freed(book: Notebook, wait: str, words: str) -> None:
    """No signal reaches the thread, and Python raises nothing in a thread that waits without a timeout."""
    cell = book.send(f"works.{wait}.call().get()")
    assert stop(book, cell) < IN_TIME
    assert f"stopped: ranks 0-3: {words}" in cell.stream("stderr")
    assert book.run("set(works.get.call().get().values())").ok().shown == "{'kept'}"


def test_wait_for_a_lock_is_reported(book: Notebook) -> None:
    cell = book.send("works.lock.call().get()")
    assert stop(book, cell) < IN_TIME
    said = cell.stream("stderr")
    assert "waiting for a lock, a socket or another thread" in said and "C call" not in said
    # Releasing the lock leaves the actor intact.
    book.mesh(
        "import gc, threading\nfor each in gc.get_objects():\n"
        "    if getattr(each, '__name__', '') == 'Works' and hasattr(each, 'held'): each.held.release()"
    ).ok()
    assert book.run("set(works.get.call().get().values())").ok().shown == "{'kept'}"


def test_actor_ignoring_interrupts_is_kept_by_the_first_stop(book: Notebook, tmp_path: object) -> None:
    cell = book.send(f"works.swallow.call('{tmp_path}/end').get()")
    assert stop(book, cell) < IN_TIME
    assert "still running; ignored each interrupt" in cell.stream("stderr")
    open(f"{tmp_path}/end", "w").close()
    assert book.run("set(works.get.call().get().values())").ok().shown == "{'kept'}"


def test_stop_ends_only_calls_of_the_cell(book: Notebook, tmp_path: object) -> None:
    book.run(
        f"def wait(path):\n    import os, time\n    while not os.path.exists(path): time.sleep(0.01)\n"
        f"    return 'ended'\nbefore = mains.swallow.call('{tmp_path}/other')"
    ).ok()
    cell = book.send("works.loop.call().get()")
    assert stop(book, cell) < IN_TIME
    assert book.run("before.done").ok().shown == "False"
    open(f"{tmp_path}/other", "w").close()
    assert book.run("set(before.get().values())").ok().shown == "{None}"


STOP_IN_A_FLUSH = """
import os, signal, sys, threading, time, traceback
main, over = threading.main_thread().ident, threading.Event()
def stop():
    while "notebook_stream" not in str(traceback.extract_stack(sys._current_frames()[main])): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    over.set()
threading.Thread(target=stop).start()
# Nothing is sent meanwhile.
get_ipython().kernel.iopub_thread.schedule(lambda: over.wait(30))
print('more', flush=True)
"""


def test_stop_of_notebook_code_works_as_usual(book: Notebook) -> None:
    cell = book.send("print('begun', flush=True)\nwhile True: pass")
    cell.until(lambda: "begun" in cell.stream())
    book.interrupt()
    assert cell.wait().reply["ename"] == "KeyboardInterrupt" and "Traceback (most recent call last)" in cell.text
    assert "kernel.py" not in cell.text
    cell = book.run(STOP_IN_A_FLUSH)
    assert cell.reply["ename"] == "KeyboardInterrupt" and "Traceback (most recent call last)" in cell.text
    assert "flush=" in cell.reply["traceback"][-2] and "notebook_stream" not in cell.text, cell.text
    # Printed by the loop, so that the cell awaits by then.
    cell = book.send("import asyncio\nasyncio.get_running_loop().call_soon(print, 'begun')\nawait asyncio.sleep(60)")
    cell.until(lambda: "begun" in cell.stream())
    begun = time.perf_counter()
    book.interrupt()
    assert "stopped at an await" in cell.wait().text and time.perf_counter() - begun < IN_TIME
    assert (
        "CancelledError" in book.run("task = asyncio.ensure_future(asyncio.sleep(9)); task.cancel()\nawait task").text
    )
    assert book.run("1 + 1").ok().shown == "2"


PROGRAM = """
from monarch.actor import Actor, endpoint, this_host
class Works(Actor):
    def __init__(self): self.kept = 'kept'
    @endpoint
    def loop(self):
        print('runs', flush=True)
        while True: pass
    @endpoint
    def get(self): return self.kept
    @endpoint
    def leave(self):
        import os
        os._exit(3)
works = this_host().spawn_procs({'gpus': 2}).spawn('works', Works)
works.loop.call().get()
"""


def test_stop_reaches_actors_of_a_program_without_magics(own: Callable[[], Notebook]) -> None:
    book = own()
    # It opens its session in the cell that is stopped.
    cell = book.send(PROGRAM)
    cell.until(lambda: cell.said().get("runs") == {0, 1})
    book.interrupt()
    assert "stopped: ranks 0-1: interrupted" in cell.wait().text
    assert "'kept', 'kept'" in book.run("works.get.call().get().values()").ok().shown
    # Its actors are those of cells too; after their deaths, the error is about the cell.
    assert book.mesh("self.kept", "works").ok().shown == "[ranks 0-1] 'kept'"
    assert book.run("works.leave.call().get()").status == "error"
    assert "the cell failed: the processes of all 2 ranks of works exited with code 3" in book.mesh("1", "works").text
