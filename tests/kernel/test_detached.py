"""Detached meshes in notebooks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from kernels import Notebook
from leaks import processes, session_folders, wait_until
from monarch._procs.agent.detached_records import find, records
from monarch.actor import shutdown_context
from monarch.job import attach, keep

pytestmark = pytest.mark.slow

ENDS = 5.0
"""Seconds for processes to end on a busy machine."""

ACTORS = """%%mesh spawn counter(10)
class Counter(Actor):
    def __init__(self, start):
        self.count = start
    @endpoint
    def add(self):
        self.count += 1
        return self.count
"""


@pytest.fixture(scope="module", autouse=True)
def first_client(spec: str) -> None:
    """Make the lasting event loop of the first client of a process."""
    Notebook("python3").close(now=True)


@pytest.fixture
def books(own: Callable[..., Notebook]) -> Iterator[Callable[[], Notebook]]:
    """A function that starts notebooks; their detached meshes end with the test."""

    def start() -> Notebook:
        book = own()
        return book

    yield start
    for record, _ in records():
        if record is not None and record.alive():
            os.kill(record.pid, signal.SIGTERM)
    assert wait_until(lambda: not records(), ENDS)


def kill(book: Notebook, *names: str) -> None:
    """Kill the kernel without any chance to clean up."""
    pid = int(book.run("import os; os.getpid()").shown)
    os.kill(pid, signal.SIGKILL)
    provisioner: Any = book.manager.provisioner
    assert wait_until(lambda: provisioner.process.poll() is not None, ENDS)
    for name in names:
        assert wait_until(lambda name=name: not find(name).user, ENDS)


def test_detached_mesh_outlives_its_kernel(books: Callable[[], Notebook], tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = books()
    said = first.run("%mesh up m --procs 2 --env COLOUR=green --keep 1h").ok().text
    assert "mesh 'm' is up: procs=2" in said and "keeps running for 1h; %mesh attach m attaches it again" in said
    first.run("from monarch.actor import Actor, endpoint").ok()
    first.run(ACTORS).ok()
    first.run("counter.add.call().get()").ok()
    first.mesh("x = rank * 10\ndef twice(n):\n    return 2 * n").ok()
    first.run("%mesh up other --procs 1").ok()
    first.run("%mesh use m").ok()
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    first.mesh(f"{wait}x += 1\nprint('meanwhile', rank)", "--nowait").ok()
    kill(first, "m")
    go.touch()

    second = books()
    said = second.run("%mesh list --all").ok().stream()
    assert "this notebook has no meshes" in said
    assert re.search(r"detached mesh 'm': free until \S+ \S+, for (1h|59m \d+s)\n", said)
    cell = second.run("%mesh attach m").ok()
    assert "attached mesh 'm': procs=2; it outlives this notebook by 1h" in cell.stream()
    assert "actors 'counter': Counter on 2 ranks, as the variable counter" in cell.stream()
    # The running cell has finished without its notebook.
    got = second.mesh("x, twice(x), os.environ['COLOUR'], world_size").ok()
    assert got.shown == "[rank 0] (1, 2, 'green', 2)\n[rank 1] (11, 22, 'green', 2)"
    shown = cell.stream() + got.stream()
    assert shown.count("meanwhile 0") == 1 == shown.count("meanwhile 1")
    assert second.run("counter.add.call().get()").ok().shown.endswith("12")
    assert ", in use, kept for 1h after the notebook ends\n" in second.run("%mesh list --all").ok().stream()
    # A replaced rank gets the definitions from cells of the first notebook.
    second.mesh("import signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert "2 cells" in second.run("%mesh heal m").ok().stream()
    assert second.mesh("twice(4)").ok().shown == "[ranks 0-1] 8"
    assert "is down" in second.run("%mesh down m").ok().stream()
    assert not records()


def test_paused_detached_mesh_continues_when_its_kernel_dies(books: Callable[[], Notebook], tmp_path: Path) -> None:
    first = books()
    first.run("%mesh up m --procs 2 --keep 1h").ok()
    body = f"""import time
print('runs')
for n in range(200):
    time.sleep(0.01)
open(f'{tmp_path}/{{rank}}', 'w').close()"""
    cell = first.mesh(body, "--nowait").ok()
    cell.until(lambda: cell.said().get("runs") == {0, 1})
    assert "paused ranks 0-1" in first.run("%mesh pause").ok().stream()
    kill(first, "m")
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2, ENDS)
    second = books()
    second.run("%mesh attach m").ok()
    assert "down" in second.run("%mesh down m").ok().stream()


@pytest.mark.parametrize("restart", [True, False], ids=["restart", "shutdown"])
def test_running_cell_of_a_kept_mesh_outlasts_its_kernel(
    books: Callable[[], Notebook], tmp_path: Path, restart: bool
) -> None:
    """Jupyter interrupts the cell before it ends the kernel; a person who presses Stop means the cell."""
    book = books()
    book.run("%mesh up m --procs 2 --keep 1h").ok()
    end = tmp_path / "end"
    body = f"""import os, time
step = 0
open({str(tmp_path / "begun")!r}, 'w').close()
while not os.path.exists({str(end)!r}):
    step += 1
    time.sleep(0.01)
print('done')"""
    book.send(f"%%mesh\n{body}")
    assert wait_until(lambda: (tmp_path / "begun").exists())
    if restart:
        book.manager.restart_kernel()
        book.client.wait_for_ready(timeout=60)
    else:
        book.manager.shutdown_kernel()
        book = books()
    assert wait_until(lambda: not find("m").user, ENDS)
    said = book.run("%mesh attach m").ok().stream()
    assert "ranks 0-1 are still in a cell of the earlier notebook; new cells wait for it" in said
    assert wait_until(lambda: book.run("%mesh").ok().text.count("for an earlier notebook") == 2)
    end.touch()
    assert book.mesh("step > 0").ok().shown == "[ranks 0-1] True"
    assert wait_until(lambda: "done" in book.run("%mesh log").ok().text)
    # A Stop while no kernel ends is one.
    cell = book.send("%%mesh\nprint('waits')\nwhile True: time.sleep(0.01)")
    cell.until(lambda: "waits" in cell.stream())
    book.interrupt()
    assert "interrupted on ranks 0-1" in cell.wait().text
    book.run("%mesh down m").ok()


def test_detached_mesh_survives_a_kernel_restart(books: Callable[[], Notebook]) -> None:
    book = books()
    book.run("%mesh up m --procs 1 --env COLOUR=green --keep 1h").ok()
    book.mesh("x = 5").ok()
    book.manager.restart_kernel()
    book.client.wait_for_ready(timeout=30)
    book.run("%mesh attach m").ok()
    assert book.mesh("x").ok().shown.endswith("5")
    assert "restarted (variables cleared)" in book.run("%mesh restart m").ok().text
    assert ", in use, kept for 1h after the notebook ends\n" in book.run("%mesh list --all").ok().stream()
    assert "x" not in book.mesh("sorted(globals())").ok().shown.replace("'", "").split(", ")


def test_detached_mesh_ends_with_its_lease(books: Callable[[], Notebook]) -> None:
    before = processes()
    book = books()
    book.run("%mesh up m --procs 2 --env COLOUR=green --keep 1s").ok()
    kill(book, "m")
    assert wait_until(lambda: not records())
    assert wait_until(lambda: not processes().keys() - before.keys(), ENDS)


@pytest.mark.parametrize("where", ["answers_of", "_take", "_mesh_of", "_add_actors"])
def test_stop_of_an_attach_keeps_the_mesh(books: Callable[[], Notebook], where: str) -> None:
    """At any moment: while its agent does not answer, and after this program has become its controller."""
    first = books()
    first.run("%mesh up m --procs 1 --keep 1h").ok()
    first.mesh("x = 5").ok()
    if where == "_add_actors":
        first.run("import monarch\ny = monarch.ones(3, mesh=m)\ny.sum().item()").ok()
    kill(first, "m")
    second = books()
    # Each waits there, until the Stop.
    second.run(f"""import time
from monarch._session.detached import attaching
from monarch._session import attached_hosts
from monarch_kernel.commands.detaching import Detaching
place = next(each for each in (attached_hosts, attaching, Detaching) if {where!r} in vars(each))
usual = vars(place)[{where!r}]
def waits(*args, **kw):
    print('waits', flush=True)
    while True:
        time.sleep(0.01)
setattr(place, {where!r}, waits)""").ok()
    cell = second.send("%mesh attach m")
    cell.until(lambda: "waits" in cell.stream())
    second.interrupt()
    assert "KeyboardInterrupt: mesh 'm' was not attached; it stays detached and keeps its variables" in cell.wait().text
    assert "%mesh attach m attaches it, %mesh down m ends it" in cell.text
    second.run(f"setattr(place, {where!r}, usual)").ok()
    assert wait_until(lambda: not find("m").user, ENDS)
    said = second.run("%mesh attach m").ok().stream()
    # Ranks that were taken over already still know what is lost.
    assert ("distributed tensors of the earlier notebook are lost" in said) is (where == "_add_actors")
    assert second.mesh("x").ok().shown == "[rank 0] 5"
    second.run("%mesh down m").ok()


@pytest.mark.parametrize(
    "line, outcome",
    [
        ("m --on process:2 --procs 1", "its hosts were released, and pending requests were cancelled"),
        ("m --on process:2 --procs 1 --keep 1h", "no detached mesh remains; its hosts were released"),
    ],
)
def test_stop_of_a_start_says_what_became_of_hosts(books: Callable[[], Notebook], line: str, outcome: str) -> None:
    before = processes()
    book = books()
    cell = book.send(f"%mesh up {line}")
    cell.until(lambda: "joined 1 of 2" in str(cell.contents("update_display_data")))
    book.interrupt()
    assert f"mesh 'm' was not started; {outcome}" in cell.wait().text and "run the line again" in cell.text
    assert not records()
    assert "mesh 'm' is up" in book.run(f"%mesh up {line}").ok().text
    book.run("%mesh down m").ok()
    book.close(now=True)
    assert wait_until(lambda: not processes().keys() - before.keys(), ENDS)


def test_tensors_over_a_mesh_end_with_their_notebook(books: Callable[[], Notebook]) -> None:
    """Their names were in it; the memory is free, values on ranks and process groups stay."""
    count = "import gc\nsum(type(each) is torch.Tensor and each.numel() == 1234 for each in gc.get_objects())"
    first = books()
    first.run("%mesh up m --procs 2 --keep 1h").ok()
    first.run("import monarch\nx = monarch.ones(1234, mesh=m)\ny = x + 1\ny.sum().item()").ok()
    first.mesh("kept = torch.ones(1)\ndist.all_reduce(kept)").ok()
    assert first.mesh(count).ok().shown != "[ranks 0-1] 0"
    kill(first, "m")
    second = books()
    said = second.run("%mesh attach m").ok().stream()
    assert re.search(
        r"\d distributed tensors of the earlier notebook are lost and their memory is freed; .*, use monarch.save",
        said,
    )
    assert "Executor" not in said
    assert second.mesh("kept.item()").ok().shown == "[ranks 0-1] 2.0"
    assert second.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").ok().shown == "[ranks 0-1] 2.0"
    assert wait_until(lambda: second.mesh(count).ok().shown == "[ranks 0-1] 0")
    # New ones work.
    assert second.run("import monarch\n(monarch.ones(4, mesh=m) + 1).sum().item()").ok().shown == "8.0"
    second.run("%mesh down m").ok()


def test_mesh_down_ends_a_free_detached_mesh(books: Callable[[], Notebook]) -> None:
    book = books()
    book.run("%mesh up m --procs 1 --env COLOUR=green --keep 1h").ok()
    other = books()
    for line, words in [
        ("attach", "%mesh attach: the following arguments are required: NAME"),
        ("attach nix", "detached mesh 'nix' does not exist; detached meshes: m"),
        ("attach m", "in use by process"),
        ("down m", "in use by process"),
        ("down nix", "no mesh named 'nix'"),
        ("list --some", "unknown option '--some': expected one of --all"),
    ]:
        cell = other.run(f"%mesh {line}")
        assert cell.status == "error" and words in cell.text, cell.text
    assert "a detached mesh 'm' already exists" in other.run("%mesh up m --procs 1 --env COLOUR=green --keep 1h").text
    assert "invalid duration" in other.run("%mesh up n --procs 1 --env COLOUR=green --keep long").text
    assert "already" in book.run("%mesh attach m").text
    kill(book, "m")
    assert "mesh 'm' is down" in other.run("%mesh down m").ok().stream()
    assert not records()


def test_hosts_of_a_launcher_outlive_a_killed_kernel(books: Callable[[], Notebook]) -> None:
    first = books()
    said = first.run("%mesh up m --on process:2 --procs 1 --keep 1h").ok().text
    assert "mesh 'm' is up: hosts=2, procs=1" in said and "%mesh attach m attaches it again" in said
    first.mesh("x = rank * 10").ok()
    kill(first, "m")
    second = books()
    assert "attached mesh 'm': hosts=2, procs=1" in second.run("%mesh attach m").ok().text
    assert "[rank 1] 10" in second.mesh("print(x)").ok().text
    assert "is down" in second.run("%mesh down").ok().text
    assert not records()
    # One that a program has made is restarted on hosts of its launcher, too.
    keep("m", 60, on="process:2").leave()
    assert "it has no ranks yet" in second.run("%mesh attach m").text
    kept = attach("m")
    kept.hosts.spawn_procs({"procs": 1}).initialized.get()
    kept.leave()
    assert "attached mesh 'm': hosts=2, procs=1" in second.run("%mesh attach m").ok().text
    assert "restarted (variables cleared): hosts=2, procs=1" in second.run("%mesh restart m").ok().text
    assert "is down" in second.run("%mesh down").ok().text
    shutdown_context().get(30)
    second.run("%mesh up m --on process:2 --procs 1 --keep 1h").ok()
    lost = find("m").hosts[0].id
    (folder,) = {name.split("/")[1] for name in session_folders() if f"/{lost}-" in name}
    kill(second, "m")
    os.kill(int(folder.split("-")[1]), signal.SIGKILL)
    second = books()
    attached = second.run("%mesh attach m").ok().text
    assert re.search(rf"host {re.escape(gethostname())} \(\d+\) does not answer", attached)
    assert "%mesh resize m hosts=1 continues on the remaining host" in second.run("%mesh heal m").text
    second.run("%mesh resize m hosts=1").ok()
    second.run("%mesh heal m").ok()
    assert second.mesh("world_size").ok().shown == "[rank 0] 1"
    second.run("%mesh down").ok()
    refused = "--keep cannot be combined with --hosts 2"
    for options, problem in (("--on process:2 --at-least 1", "omit --at-least"), ("--hosts 2", refused)):
        assert problem in second.run(f"%mesh up m {options} --procs 1 --keep 1h").text
