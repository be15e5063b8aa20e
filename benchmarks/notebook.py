"""Notebooks of this project and of its peers: how each makes ranks run a cell, in a real kernel."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import FLOOR, OURS, Options, Race, environment
from kernel_client import GUARD, Cell, Kernel


@dataclass(frozen=True)
class Way:
    """How a system makes ranks run a cell."""

    magic: str = ""
    """First line of a cell on ranks."""
    setup: tuple[str, ...] = ()
    """Cells that start so many ranks; each rank then knows its ``rank``."""
    group: str = "dist.barrier()"
    """A cell on ranks, after which ``dist`` has a process group."""
    tidy: str = ""
    """A cell to run now and then; without it, each cell is slower than the last."""
    module: str = "ipykernel_launcher"
    """Its kernel."""


_ENGINES = """
import ipyparallel
cluster = ipyparallel.Cluster(n={count}, log_level=40)
view = cluster.start_and_connect_sync(activate=True)[:]
view.scatter("rank", range({count}), flatten=True, block=True)
"""
_GROUP_OF_ENGINES = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{file}", rank=rank, world_size={count})
"""
# Its workers start before all of them listen, and messages to one that does not are lost.
_WORKERS_LISTEN = """
link = get_ipython().magics_manager.registry["DistributedMagic"]._comm_manager
while True:
    try:
        link.send_to_all("get_status", {{}}, timeout=0.25)
        break
    except TimeoutError:
        continue
"""
WAYS = {
    OURS: Way("%%mesh", ("%mesh up --procs {count}",), module="monarch_kernel"),
    FLOOR: Way(),
    "ipyparallel": Way("%%px", (_ENGINES,), _GROUP_OF_ENGINES),
    "nbdistributed": Way(
        "%%distributed",
        ("%load_ext nbdistributed", "%dist_init -n {count}", "%dist_mode --disable", _WORKERS_LISTEN),
        tidy="%timeline_clear",
    ),
}


class Notebook(Kernel):
    """A kernel in which a system makes ranks run cells. It can be a lane of a race."""

    def __init__(self, options: Options, system: str, folder: Path) -> None:
        self.system = system
        self._way = WAYS[system]
        self._folder = folder
        python = options.peers.get(system, sys.executable)
        env = environment(python)
        # No kernel may import the files beside this one in place of installed ones.
        del env["PYTHONPATH"]
        env.update(IPYTHONDIR=str(folder / "ipython"), JUPYTER_RUNTIME_DIR=str(folder))
        super().__init__([python, "-m", self._way.module], env, folder)

    def start_ranks(self, count: int) -> None:
        """Start ranks; each has run a cell in the end."""
        for code in self._way.setup:
            self.ok(code.format(count=count))
        if self._way.magic:
            self.on_ranks("print('this is', rank)", whole=lambda text: said(text, "this is") >= set(range(count)))

    def form_group(self, count: int) -> None:
        """Make the ranks create a torch process group."""
        self.on_ranks(self._way.group.format(count=count, file=self._folder / f"group-{self.mark}"))

    def code(self, body: str) -> str:
        """Return a cell that runs on all ranks."""
        return f"{self._way.magic}\n{body}"

    def on_ranks(self, body: str, bound: float = GUARD, whole: Callable[[str], bool] | None = None) -> Cell:
        """Run a cell on all ranks."""
        return self.run(self.code(body), bound, whole)

    def ask(self, what: str, /, **options: object) -> list[float]:
        """Run one operation of a race, and return the figures."""
        return getattr(self, f"ask_{what}")(**options)

    def ask_start_ranks(self, count: int) -> list[float]:
        """Start ranks; return the seconds since the kernel was started."""
        self.start_ranks(count)
        return [self.age]

    def ask_cells(self, body: str, plain: str, shown: Sequence[str], count: int) -> list[float]:
        """Return the seconds until a cell has ended with all its output; so many times, fewer if it is slow.

        Args:
            body: the cell on ranks.
            plain: the cell of a notebook without ranks.
            shown: texts that its output must contain.
            count: maximum number of runs.
        """
        if self._way.tidy:
            self.ok(self._way.tidy)
        code = self.code(body) if self._way.magic else plain
        times: list[float] = []
        while len(times) < count and sum(times) < 0.3:
            times.append(self.run(code, whole=lambda text: all(each in text for each in shown)).seconds)
        return times


def said(text: str, what: str) -> set[int]:
    """Return the numbers that follow some words in a text."""
    return {int(number) for number in re.findall(rf"{re.escape(what)}\s+(\d+)", text)}


class NotebookRace(Race):
    """Notebooks that take turns."""

    def __init__(self, options: Options, notes: list[str], folder: Path) -> None:
        super().__init__(options, notes)
        self._folder = folder

    def enter(self, systems: Sequence[str]) -> None:
        """Start the kernels of systems, without ranks."""
        for system in systems:
            self.lanes[system] = Notebook(self._options, system, self._folder)


@contextmanager
def notebooks(options: Options, systems: Sequence[str], notes: list[str]) -> Iterator[NotebookRace]:
    """Open notebooks, and close them at the end with all that they have started."""
    with tempfile.TemporaryDirectory(prefix="monarch-bench-") as folder:
        entered = NotebookRace(options, notes, Path(folder))
        try:
            entered.enter(systems)
            yield entered
        finally:
            entered.end()


def with_notebooks(options: Options, *without: str) -> list[str]:
    """Return the systems whose ranks run cells, and the floor."""
    return [system for system in options.systems(*without) if system in WAYS]
