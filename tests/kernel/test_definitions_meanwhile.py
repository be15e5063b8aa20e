"""Definitions for new ranks, if ranks are replaced, cells end, or Stop is pressed while they are looked at."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leaks import wait_until
from monarch._meshes.inside import state_of
from monarch._node.current import current_node
from monarch.actor import heal_mesh
from monarch_kernel.cells import outcomes
from monarch_kernel.cells.outcomes import Outcomes
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.recipe import Recipe
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.source.cell import CellSource


@pytest.fixture
def mesh(host: Any) -> Iterator[Mesh]:
    """A notebook mesh of two ranks."""
    meshes = NotebookMeshes()
    yield meshes.up(Recipe("m", {"gpus": 2}), {}, lambda _, future: future.get())
    meshes.down("m")


def pid_of(mesh: Mesh, rank: int) -> int:
    """Return the pid of the process of a rank."""
    return current_node().peers.pids[state_of(mesh.procs).procs.proc(rank)]


def replace(mesh: Mesh, rank: int) -> None:
    """Kill a rank and heal the mesh, as a restart rule does."""
    os.kill(pid_of(mesh, rank), signal.SIGKILL)
    assert wait_until(lambda: mesh.dead() == [rank])
    heal_mesh(mesh.procs)


def test_rank_replaced_during_a_look_for_deaths_gets_definitions(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "pids"
    code = f"import os\nwith open({str(told)!r}, 'a') as file: file.write(f'{{os.getpid()}} ')"
    mesh.definitions.record("cell 1", CellSource(code, code, code), [0, 1], 2, whole=True)
    replace(mesh, 0)
    os.kill(pid_of(mesh, 1), signal.SIGKILL)
    assert wait_until(lambda: mesh.dead() == [1])
    dead, left = Mesh.dead, [1]

    def late(self: Mesh) -> list[int]:
        found = dead(self)
        if left:
            left.pop()
            heal_mesh(self.procs)
        return found

    monkeypatch.setattr(Mesh, "dead", late)
    mesh.define()
    assert told.read_text().split() == [str(pid_of(mesh, rank)) for rank in range(2)]


def test_dead_rank_gets_the_definitions_once_it_is_replaced(mesh: Mesh, tmp_path: Path) -> None:
    told = tmp_path / "pids"
    code = f"import os\nwith open({str(told)!r}, 'a') as file: file.write(f'{{os.getpid()}} ')"
    mesh.definitions.record("cell 1", CellSource(code, code, code), [0, 1], 2, whole=True)
    replace(mesh, 1)
    os.kill(pid_of(mesh, 1), signal.SIGKILL)
    assert wait_until(lambda: mesh.dead() == [1])
    mesh.define()
    assert not told.exists()
    heal_mesh(mesh.procs)
    mesh.define()
    assert told.read_text().split() == [str(pid_of(mesh, 1))]


def test_cells_added_while_finished_ones_are_removed_are_kept() -> None:
    ended = SimpleNamespace(count=lambda: 0, missing=list)
    late = SimpleNamespace(count=lambda: 1, missing=lambda: [3])
    mesh = cast(Any, SimpleNamespace(unfinished=[ended], unrecorded=[lambda: True]))
    # The other threads have looked these up, and have not appended yet.
    unfinished, unrecorded = mesh.unfinished, mesh.unrecorded
    Mesh.finishing(mesh)
    Mesh.record_ended(mesh)
    unfinished.append(late)
    unrecorded.append(lambda: False)
    assert Mesh.finishing(mesh) == [3]
    assert mesh.unfinished == [late]
    assert len(mesh.unrecorded) == 1


class Displays:
    """Displays of a cell; Stop is pressed while they are closed for the first time."""

    closed = 0

    def close(self) -> None:
        self.closed += 1
        if self.closed == 1:
            raise KeyboardInterrupt


def test_stop_while_displays_are_closed_loses_no_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    monkeypatch.setattr(outcomes, "_record", lambda *args: recorded.append(args))
    shell = SimpleNamespace(user_ns={}, displayhook=SimpleNamespace(prompt_count=1))
    calls = SimpleNamespace(name=lambda *_: None)
    streams = cast(Any, SimpleNamespace(hidden={}, place=lambda: None, calls=calls))
    stopping = cast(Any, SimpleNamespace(stop_cell=None))
    mesh = cast(Any, SimpleNamespace(unrecorded=[], record_ended=lambda: None))
    run = cast(Any, SimpleNamespace(done=True, futures=[], name="cell 1", ranks=[0], results=dict, missing=list))
    displays = cast(Any, Displays())
    header = cast(Any, SimpleNamespace(out=""))
    Outcomes(shell, cast(Any, None), stopping, lambda: streams).handle(mesh, header, run, displays, 1)
    (settle,) = mesh.unrecorded
    with pytest.raises(KeyboardInterrupt):
        settle()
    # The Stop may have hit the next cell, which records those before it.
    assert settle()
    assert settle()
    assert len(recorded) == 1
    # The second close is that which the Stop has cut.
    assert displays.closed == 2
