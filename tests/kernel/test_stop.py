"""Stop: the notebook is back within two seconds whatever ranks do, and keeps all variables it can."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernels import ALL, Cell, Notebook, tells_in
from leaks import Kit
from monarch._core.stop_ladder import PATIENCE

IN_TIME = 2.0
BUSY = {
    "python": "while True: pass",
    "sleep": "import time; time.sleep(600)",
    "collective": "if rank != 0: dist.barrier()\nelse:\n    import time; time.sleep(600)",
    "receive": "if rank == 0: dist.recv(torch.ones(1))\nelse:\n    import time; time.sleep(600)",
    "await": "import asyncio; await asyncio.sleep(600)",
    "lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "program": "import subprocess; subprocess.run(['sleep', '600'])",
}
SWALLOWS = """import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException: pass"""


@pytest.fixture(autouse=True)
def same_ranks(notebook: Notebook, leaks: Kit) -> Iterator[None]:
    """Do not count replaced ranks as leaks, but do count programs started by ranks."""
    yield
    notebook.run("1").ok()
    leaks.rebase()


def stopped(notebook: Notebook, body: str, there: Callable[[Cell], bool] | None = None) -> tuple[Cell, float]:
    """Run an endless cell, stop it once it runs on all ranks, and return the seconds that the stop took."""
    cell = notebook.send("%%mesh\nprint('runs')\n" + body)
    cell.until(lambda: there(cell) if there is not None else cell.said().get("runs") == ALL)
    begun = time.perf_counter()
    notebook.interrupt()
    cell.wait()
    return cell, time.perf_counter() - begun


def is_stopped(cell: Cell) -> str:
    """Return the line of the cell about its stop; its reply must be an interrupt."""
    assert cell.status == "error" and cell.reply["ename"] == "KeyboardInterrupt"
    heads = ("stopped:", "not stopped yet:")
    (line,) = [line for line in cell.stream("stderr").splitlines() if line.startswith(heads)]
    return line


TAKES = """import os, signal, time
main = f'/proc/self/task/{os.getpid()}/status'
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
def pending():
    with open(main) as file:
        return [line for line in file if line.startswith('SigPnd:') and int(line.split()[1], 16) & 2]
while not pending(): time.sleep(0.01)
is_mine = True
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
time.sleep(600)"""


def test_interrupt_is_for_the_main_thread(notebook: Notebook) -> None:
    """Another thread that took it would leave the main one asleep until the ladder's next rung."""
    cell, _ = stopped(notebook, TAKES)
    assert "interrupted" in is_stopped(cell)
    assert notebook.mesh("is_mine").ok().shown == "[ranks 0-3] True"


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUSY)
def test_stop_is_quick_and_keeps_variables(notebook: Notebook, kind: str) -> None:
    notebook.mesh("kept = rank + 100\nimport os\npid = os.getpid()", "--out before").ok()
    cell, seconds = stopped(notebook, BUSY[kind])
    line = is_stopped(cell)
    assert "replaced" not in line and "C call" not in line
    assert "interrupt" in line if kind != "collective" else "collective" in line
    assert seconds < IN_TIME
    after = notebook.mesh("assert kept == rank + 100 and pid == os.getpid()\nworld_size").ok()
    assert after.shown == "[ranks 0-3] 4" and "waiting" not in after.stream()


@pytest.mark.slow
def test_stopped_receive_from_any_rank_takes_no_later_message(notebook: Notebook) -> None:
    messages = """x = torch.zeros(1)
if rank: dist.send(torch.full((1,), 1.0 + rank), dst=0)
else: senders = sorted((dist.recv(x), x.item())[0] for _ in range(3))
senders if rank == 0 else None"""
    assert notebook.mesh(messages).ok().shown == "[rank 0] [1, 2, 3]"
    for body in ("dist.recv(x)", "dist.irecv(x).wait()"):
        _, seconds = stopped(notebook, f"if rank == 0: {body}\nelse:\n    import time; time.sleep(600)")
        assert seconds < IN_TIME
        assert notebook.mesh(messages).ok().shown == "[rank 0] [1, 2, 3]"


WAITS = {
    "sleep": "time.sleep(600)",
    "event": "threading.Event().wait()",
    "queue": "queue.Queue().get(timeout=600)",
    "future": "concurrent.futures.Future().result()",
}


def test_training_goes_on_after_a_stop(notebook: Notebook) -> None:
    """With the same model: neither DDP nor the optimizer is made again."""
    notebook.mesh(
        """
import time, torch
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
def train(steps, slow=-1):
    for step in range(steps):
        if rank == slow and step == 1: time.sleep(600)
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        optimizer.step()
        if step == 0: print("runs")
    return model.module.weight.sum().item()
train(2)"""
    ).ok()
    for _ in range(2):
        cell, _ = stopped(notebook, "train(9, slow=2)")
        assert is_stopped(cell).startswith("stopped:")
        after = notebook.mesh("train(3)").ok()
        assert after.shown.startswith("[ranks 0-3] ")


def test_groups_are_made_again_after_a_stopped_ddp_constructor(notebook: Notebook) -> None:
    body = """
import time
from torch.nn.parallel import DistributedDataParallel
dist.barrier()
halves = []
class Half(DistributedDataParallel):
    def __init__(self, module):
        halves.append(self)
        super().__init__(module)
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "module": print("makes")
if rank == 1: time.sleep(600)
Half(torch.nn.Linear(2, 2))"""
    cell, _ = stopped(notebook, body, lambda cell: cell.said().get("makes") == {0, 2, 3})
    assert is_stopped(cell).startswith("stopped:")
    after = notebook.mesh("t = torch.ones(1)\ndist.all_reduce(t)\nlen(halves), t.item()").ok()
    assert "[ranks 0,2-3] (1, 4.0)" in after.shown and "[rank 1] (0, 4.0)" in after.shown
    assert "not created" not in after.text
    assert notebook.mesh("'process_group' in vars(halves[0])", "[0,2,3]").ok().shown == "[ranks 0,2-3] True"
    notebook.mesh("halves.clear()").ok()


@pytest.mark.parametrize("how", WAITS)
def test_stop_ends_waits_of_actors_in_threads_of_their_own(notebook: Notebook, how: str) -> None:
    """Python itself raises nothing there before the wait has ended; decision 0070."""
    notebook.run(f"""import concurrent.futures, queue, threading, time
from monarch.actor import Actor, endpoint
class Waits(Actor):
    @endpoint
    def begin(self):
        print('waits')
        try:
            {WAITS[how]}
        finally:
            print('cleans up')
    @endpoint
    def one(self):
        return 1
waits = mesh.spawn('waits', Waits)""").ok()
    cell = notebook.send("waits.begin.call().get()")
    cell.until(lambda: cell.said().get("waits") == ALL)
    notebook.interrupt()
    cell.wait()
    assert "ranks 0-3: interrupted" in is_stopped(cell)
    assert cell.said().get("cleans up") == ALL
    assert notebook.run("waits.one.call().get(timeout=20).values()").ok().shown == "[1, 1, 1, 1]"
    notebook.run("waits.stop().get()").ok()


@pytest.mark.slow
def test_stop_is_quick_beside_busy_threads(notebook: Notebook) -> None:
    # On two ranks, so that what makes a Stop late is their GIL, not the load of the machine.
    notebook.mesh(
        "import threading\ngo = True\ndef spin():\n    while go: pass\n"
        "for _ in range(3 if rank < 2 else 0): threading.Thread(target=spin, daemon=True).start()"
    ).ok()
    try:
        for kind in ("sleep", "python") * 3:
            cell, seconds = stopped(notebook, BUSY[kind])
            assert "replaced" not in is_stopped(cell)
            assert seconds < IN_TIME
    finally:
        notebook.mesh("go = False").ok()
    assert notebook.mesh("import os\nos.getsid(0) == os.getpid()").ok().shown == "[ranks 0-3] True"


@pytest.mark.slow
def test_collective_works_after_a_stop_in_one(notebook: Notebook) -> None:
    is_stopped(stopped(notebook, BUSY["collective"])[0])
    cell = notebook.mesh("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").ok()
    assert cell.shown == "[ranks 0-3] 4.0"


OF_USER = {
    "new_group": "group = dist.new_group([0, 1, 2, 3])",
    "device mesh": "from torch.distributed.device_mesh import init_device_mesh\n"
    "group = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))['tp'].get_group()",
}


WATCH = """
import sys, threading, time
def tell(main, place=None, looks=0):
    while looks < 10:
        time.sleep(0.01)
        frame = sys._current_frames()[main]
        looks = looks + 1 if place == (place := (frame.f_code.co_name, frame.f_lasti)) and place[0] == "barrier" else 0
    print("in barrier")
if rank in (0, 2): threading.Thread(target=tell, args=[threading.get_ident()]).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", OF_USER)
def test_stop_frees_collectives_of_groups_made_by_a_cell(notebook: Notebook, how: str) -> None:
    """And no other connections that user code has to its own machine."""
    notebook.mesh("dist.barrier()\nimport os, socket\nstarted = os.getpid()").ok()
    notebook.mesh(
        "server = socket.create_server(('127.0.0.1', 0))\none = socket.create_connection(server.getsockname())"
    )
    body = (
        f"{OF_USER[how]}\n{WATCH}\nif rank in (0, 2): dist.barrier(group=group)\n"
        "else:\n    print('in barrier')\n    import time; time.sleep(600)"
    )
    line = is_stopped(stopped(notebook, body, lambda cell: cell.said().get("in barrier") == ALL)[0])
    assert "ranks 0,2: " in line and "collective" in line and "replaced" not in line
    after = notebook.mesh("two, _ = server.accept()\none.sendall(b'kept')\ntwo.recv(4), started == os.getpid()").ok()
    assert after.shown == "[ranks 0-3] (b'kept', True)"
    assert notebook.mesh("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").ok().shown == "[ranks 0-3] 4.0"


@pytest.mark.slow
def test_rank_ignoring_interrupts_is_replaced(notebook: Notebook) -> None:
    notebook.mesh("kept = rank").ok()
    cell, seconds = stopped(notebook, f"if rank == 2:\n    exec({SWALLOWS!r})")
    assert "rank 2: replaced by a new process" in is_stopped(cell)
    # The cell waits for the new process.
    assert seconds < IN_TIME
    after = notebook.mesh("'kept' in globals(), rank, world_size").ok().shown
    assert "[rank 2] (False, 2, 4)" in after and "[rank 3] (True, 3, 4)" in after
    assert notebook.mesh("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").ok().shown == "[ranks 0-3] 4.0"


@pytest.mark.slow
def test_rank_blocking_all_signals_is_replaced(notebook: Notebook) -> None:
    """Its code runs, although no signal can show that."""
    blocks = "import signal, time\nsignal.signal(2, signal.SIG_IGN)\nsignal.pthread_sigmask(0, signal.valid_signals())"
    cell, seconds = stopped(notebook, f"if rank == 2:\n    exec({blocks!r})\nwhile rank == 2: time.sleep(0.1)")
    assert "rank 2: replaced by a new process (ignored interrupts)" in is_stopped(cell)
    assert seconds < IN_TIME
    notebook.mesh("rank").ok()


@pytest.mark.slow
def test_several_replaced_ranks_are_named_in_the_plural(notebook: Notebook) -> None:
    cell, _ = stopped(notebook, f"if rank in (1, 3):\n    exec({SWALLOWS!r})")
    text = cell.stream("stderr")
    # On a busy machine one of them is known to ignore interrupts before the other.
    if "rank 3: ignored interrupts" not in text and "rank 1: ignored interrupts" not in text:
        assert (
            "ranks 1,3: ignored interrupts, so new processes replace them now; their variables and actor state" in text
        )
    assert "ranks 1,3: replaced by new processes (ignored interrupts); their variables and actor state" in text
    notebook.mesh("rank").ok()


IN_C = """import hashlib, time
def derive(rounds): return hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
begun = time.thread_time()
derive(100_000)
rounds = int(100_000 * 4 / (time.thread_time() - begun))
print("derives")
if rank == 1: derive(rounds)"""
"""Four seconds of CPU in one C call on rank 1, on any machine."""


@pytest.mark.slow
def test_rank_inside_c_finishes_and_the_next_cell_reports_it(notebook: Notebook) -> None:
    notebook.mesh("kept = 1").ok()
    cell, seconds = stopped(notebook, IN_C, lambda cell: cell.said().get("derives") == ALL)
    assert "rank 1: still inside a C call" in is_stopped(cell) and seconds < IN_TIME
    after = notebook.mesh("kept").ok()
    assert "waiting for rank 1" in after.stream("stderr") and after.shown == "[ranks 0-3] 1"


@pytest.mark.slow
def test_stop_at_idle_replaces_a_rank_inside_c(notebook: Notebook) -> None:
    notebook.mesh("kept = 1\na = torch.randn(2000, 2000)").ok()
    cell, seconds = stopped(notebook, "if rank == 1: b = torch.linalg.matrix_power(a, 2**30 - 1)")
    assert "rank 1: still inside a C call" in is_stopped(cell) and seconds < IN_TIME
    # The other ranks are usable meanwhile.
    assert notebook.mesh("kept", "[0,2,3]").ok().shown == "[ranks 0,2-3] 1"
    cell = notebook.send("%%mesh\nkept")
    cell.until(lambda: "waiting for rank 1" in cell.stream())
    begun = time.perf_counter()
    notebook.interrupt()
    cell.wait()
    assert time.perf_counter() - begun < IN_TIME
    # This Stop ends only the wait; the next one comes while no cell runs.
    assert "rank 1: replaced" not in is_stopped(cell)
    notebook.interrupt()
    cell.until(lambda: "rank 1: replaced by a new process" in cell.stream("stderr"))
    assert notebook.mesh("'kept' in globals()").ok().shown.splitlines() == ["[ranks 0,2-3] True", "[rank 1] False"]


@pytest.mark.slow
def test_wait_in_a_store_is_freed_and_keeps_the_rank(notebook: Notebook) -> None:
    """Neither a signal nor aborting groups frees it: Stop closes the connection that it waits for."""
    notebook.mesh("dist.barrier()\nimport os\npid = os.getpid()").ok()
    body = (
        "from datetime import timedelta\nfrom torch.distributed import TCPStore\n"
        "server = TCPStore('127.0.0.1', 0, 1, True, wait_for_workers=False)\n"
        "client = TCPStore('127.0.0.1', server.port, 1, False)\n"
        "print('waits')\nclient.wait(['never'], timedelta(hours=1)) if rank < 2 else client.get('never')"
    )
    cell, seconds = stopped(notebook, body)
    assert "ranks 0-3: were waiting for a connection (connection closed)" in is_stopped(cell)
    assert seconds < IN_TIME
    # Nor does torch's warning about that connection say more.
    assert "TCPStore.cpp" not in cell.text and "C++ frames" not in cell.text, cell.text
    # The groups of the mesh were not involved, and are the same.
    assert notebook.mesh("pid == os.getpid()").ok().shown == "[ranks 0-3] True"
    assert notebook.mesh("dist.barrier()\nworld_size").ok().shown == "[ranks 0-3] 4"


def is_suspended(path: Path) -> bool:
    """Return whether the process whose id is in a file is suspended."""
    pid = path.read_text().strip()
    return bool(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


@pytest.mark.slow
def test_rank_that_a_stop_kills_is_not_called_stopped(notebook: Notebook, tmp_path: Path) -> None:
    body = (
        "import os, signal, time\n"
        f"if rank == 1: signal.signal(signal.SIGINT, signal.SIG_DFL)\nopen(f'{tmp_path}/{{rank}}', 'w').close()\n"
        "time.sleep(600)"
    )
    cell, _ = stopped(notebook, body, lambda _: len(os.listdir(tmp_path)) == 4)
    line = is_stopped(cell)
    assert "ranks 0,2-3: interrupted" in line
    assert "rank 1: killed by signal 2 (SIGINT) during the stop; variables are lost; %mesh heal starts" in line
    notebook.run("%mesh heal").ok()


@pytest.mark.slow
def test_suspended_rank_is_reported_and_stops_when_resumed(notebook: Notebook, tmp_path: Path) -> None:
    notebook.mesh("kept = rank\nimport os, signal, time").ok()
    # Its output may arrive only after it resumes.
    body = (
        f"with open(f'{tmp_path}/{{rank}}', 'w') as file: print(os.getpid(), file=file)\n"
        "if rank == 1: os.kill(os.getpid(), 19)\ntime.sleep(600)"
    )
    cell, seconds = stopped(notebook, body, lambda _: len(os.listdir(tmp_path)) == 4 and is_suspended(tmp_path / "1"))
    line = is_stopped(cell)
    assert "rank 1: suspended by a signal such as SIGSTOP" in line and "C call" not in line
    assert "ranks 0,2-3: interrupted" in line and seconds < IN_TIME
    pid = int(line.partition("kill -CONT ")[2].partition(")")[0])
    # The next cell says so too.
    waits = notebook.send("%%mesh [1]\nkept == rank and os.getpid()")
    waits.until(lambda: f"kill -CONT {pid} resumes it" in waits.stream("stderr"))
    assert "waiting for rank 1, suspended by a signal" in waits.stream() and "C call" not in waits.stream()
    os.kill(pid, signal.SIGCONT)
    assert waits.wait().ok().shown == f"[rank 1] {pid}"


class Lock:
    """A mutex in a file, which another process waits for in C with the GIL held: no signal ends that.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(128))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 128)
        attributes, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        libc.pthread_mutexattr_init(attributes)
        # PTHREAD_PROCESS_SHARED
        libc.pthread_mutexattr_setpshared(attributes, 1)
        self._mutex = ctypes.c_char.from_buffer(self._memory)
        libc.pthread_mutex_init(ctypes.byref(self._mutex), attributes)
        libc.pthread_mutex_lock(ctypes.byref(self._mutex))

    def release(self) -> None:
        """Let the one that waits have it."""
        ctypes.CDLL(None).pthread_mutex_unlock(ctypes.byref(self._mutex))


MANY = """
import ctypes, mmap, os, signal, time
kind = rank % 4
open(f"{PATH}/{rank}", "w").close()
if kind == 0 and rank:
    with open(f"{PATH}.{rank}", "r+b") as file:
        mutex = ctypes.c_char.from_buffer(mmap.mmap(file.fileno(), 128))
    ctypes.PyDLL(None).pthread_mutex_lock(ctypes.byref(mutex))
elif kind == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
elif kind == 2:
    dist.barrier()
else:
    time.sleep(600)
"""


@pytest.mark.slow
def test_stop_of_many_kinds_of_ranks_is_quick(own: Callable[..., Notebook], tmp_path: Path) -> None:
    book = own()
    book.run("%mesh up --procs 16").ok()
    book.mesh("dist.barrier()\nkept = rank").ok()
    locks = [Lock(Path(f"{tmp_path}.{rank}")) for rank in (4, 8, 12)]
    body = f"PATH = {str(tmp_path)!r}\n{MANY}"
    cell, seconds = stopped(book, body, lambda _: len(os.listdir(tmp_path)) == 16)
    line = is_stopped(cell)
    # Sixteen ranks share the cores; tests/core checks that the bound holds for any number.
    assert seconds < IN_TIME + PATIENCE, line
    # On a busy machine a rank may be interrupted just before its collective.
    for words in ("in a collective", "interrupted", "inside a C call that holds the GIL"):
        assert words in line, line
    # Each names its own pid.
    assert line.count("suspended by a signal") == 4
    for pid in re.findall(r"kill -CONT (\d+)", line):
        os.kill(int(pid), signal.SIGCONT)
    for lock in locks:
        lock.release()
    book.guard = 90
    after = book.mesh("dist.barrier()\nkept == rank").ok()
    assert after.shown == "[ranks 0-15] True"


@pytest.mark.parametrize("command", ["sleep 600", "sleep 600 | cat; sleep 600"])
def test_stop_ends_a_shell_command(notebook: Notebook, command: str) -> None:
    """While ``os.system`` runs, the C library ignores the signal."""
    cell, seconds = stopped(notebook, f"import os\nos.system({command!r})\nprint('goes on')")
    assert is_stopped(cell) == "stopped: ranks 0-3: interrupted" and "goes on" not in cell.stream()
    assert cell.reply["evalue"] == "cell interrupted on ranks 0-3"
    assert seconds < IN_TIME
    shown = notebook.mesh("import os\nos.system('exit 3') >> 8").ok().shown
    assert shown == "[ranks 0-3] 3"


def test_child_forked_by_a_cell_ends_with_the_cell(notebook: Notebook) -> None:
    notebook.mesh("import os, signal, sys\nkept = rank").ok()
    body = "pid = os.fork()\nif not pid: sys.exit(3)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    assert notebook.mesh(body).ok().shown == "[ranks 0-3] 3"
    # The child ends with the cell, and ignores the interrupt handling of the rank.
    body = (
        "pid = os.fork()\nif not pid: os._exit(signal.getsignal(signal.SIGINT) is not signal.SIG_DFL)\n"
        "code = os.waitpid(pid, 0)[1]\npid = os.fork()\nif pid: code += os.waitpid(pid, 0)[1]\ncode"
    )
    assert notebook.mesh(body).ok().shown == "[ranks 0-3] 0"
    body = "pid = os.fork()\nif not pid: raise ValueError('child')\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    failing = notebook.mesh(body).ok()
    assert failing.shown == "[ranks 0-3] 1" and "[ranks 0-3] ValueError: child" in failing.stream("stderr")
    notebook.run("import os, sys\npid = os.fork()\nif not pid: sys.exit(3)\nos.waitpid(pid, 0)[1]").ok()
    assert notebook.mesh("kept == rank").ok().shown == "[ranks 0-3] True"


def test_stop_of_a_plain_wait_shows_the_line_of_the_user(notebook: Notebook) -> None:
    notebook.run("from monarch.actor import Channel\nport, receiver = Channel.open()").ok()
    cell = notebook.send(f"{tells_in('get')}\nreceiver.recv().get()")
    cell.until(lambda: "waits" in cell.stream())
    notebook.interrupt()
    cell.wait()
    (error,) = cell.contents("error")
    assert error["ename"] == "KeyboardInterrupt"
    trace = "\n".join(error["traceback"])
    assert "receiver.recv().get()" in trace and "loop.py" not in trace and len(trace.splitlines()) < 6
    notebook.run("receiver.close()").ok()


def test_stop_names_the_lines_of_the_ranks(notebook: Notebook) -> None:
    notebook.mesh("import time\ndef work():\n    time.sleep(1000)").ok()
    cell = notebook.send("%%mesh\nprint('runs')\nif rank == 3: work()\nelse:\n    while True: time.sleep(0.01)")
    cell.until(lambda: cell.said().get("runs") == ALL)
    notebook.interrupt()
    said = cell.wait().text
    assert "stopped: ranks 0-3: interrupted\n" in said
    assert re.search(r"^  ranks 0-2 at cell \[\d+\] line 5: while True: time.sleep\(0.01\)$", said, re.M), said
    place = (
        r"^  rank 3 at cell \[\d+\] line 4: time.sleep\(1000\), called at cell \[\d+\] line 3: if rank == 3: work\(\)$"
    )
    assert re.search(place, said, re.M), said
    assert "line 1: %%mesh" not in said


@pytest.mark.slow
def test_repeated_stops_work(notebook: Notebook) -> None:
    for _ in range(3):
        cell, seconds = stopped(notebook, BUSY["python"])
        assert seconds < IN_TIME and "ranks 0-3: interrupted" in is_stopped(cell)
    assert notebook.mesh("1").ok().shown == "[ranks 0-3] 1"


@pytest.mark.slow
def test_impatient_stops_do_no_harm(notebook: Notebook) -> None:
    cell = notebook.send("%%mesh\nprint('runs')\nimport time; time.sleep(600)")
    cell.until(lambda: "runs" in cell.stream())
    for _ in range(3):
        notebook.interrupt()
    cell.wait()
    assert cell.reply["ename"] == "KeyboardInterrupt"
    assert notebook.mesh("1").ok().shown == "[ranks 0-3] 1"
    assert notebook.run("2").ok().shown == "2"


def test_stop_while_idle_does_no_harm(notebook: Notebook) -> None:
    notebook.mesh("kept = 7").ok()
    notebook.interrupt()
    assert notebook.run("1").status in ("ok", "error")
    assert notebook.mesh("kept").ok().shown == "[ranks 0-3] 7"


@pytest.mark.slow
def test_queued_cells_do_not_run_after_a_stop(notebook: Notebook) -> None:
    notebook.run("ran = []").ok()
    cell = notebook.send("%%mesh\nprint('runs')\nwhile True: pass", stop_on_error=True)
    after = notebook.send("ran.append(1)")
    cell.until(lambda: "runs" in cell.stream())
    notebook.interrupt()
    cell.wait()
    after.wait()
    assert notebook.run("print(ran)").stream() == "[]\n"


def test_kernel_answers_while_a_cell_runs(notebook: Notebook) -> None:
    cell = notebook.send("%%mesh\nprint('runs')\nwhile True: pass")
    cell.until(lambda: "runs" in cell.stream())
    assert notebook.control("kernel_info_request")["status"] == "ok"
    subshell = notebook.control("create_subshell_request")["subshell_id"]
    table = notebook.send("%mesh", subshell=subshell).wait().ok()
    assert "mesh" in table.shown and not cell.idle
    # Each cell gets only its own output.
    assert "runs" not in table.stream() and "in use" not in cell.text
    assert notebook.control("delete_subshell_request", subshell_id=subshell)["status"] == "ok"
    notebook.interrupt()
    is_stopped(cell.wait())


def test_stop_by_message_works(notebook: Notebook) -> None:
    """Front ends send messages to kernels on other machines."""
    cell = notebook.send("%%mesh\nkept = rank\nprint('runs')\nwhile True: pass")
    cell.until(lambda: cell.said().get("runs") == ALL)
    begun = time.perf_counter()
    assert notebook.control("interrupt_request")["status"] == "ok"
    cell.wait()
    assert time.perf_counter() - begun < IN_TIME
    assert cell.status == "error" and "ranks 0-3: interrupted" in cell.stream("stderr")
    assert notebook.mesh("kept == rank").ok().shown == "[ranks 0-3] True"
