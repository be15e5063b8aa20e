"""The text and HTML of meshes, also with a thousand ranks."""

from __future__ import annotations

from typing import Any

import pytest

from monarch._core.roster import Procs, Roster
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.state import ActorsState
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._node.current import current_node
from monarch.actor import Actor, ValueMesh, endpoint, this_host


class Shown(Actor):
    @endpoint
    def big(self) -> dict[str, int]:
        return {"loss": 1}


@pytest.fixture
def thousand(host: Any) -> tuple[ProcMesh, ActorMesh]:
    """Meshes of procs that do not exist, because printing sends no messages."""
    hosts = tuple(f"host{number:03}" for number in range(125))
    procs = Procs("abc123", "trainers", ("hosts", "gpus"), 1, current_node().proc, Roster(0, hosts, 8, (125, 8)))
    return (
        ProcMesh.refer(procs, procs.region()),
        ActorMesh(ActorsState("shown-1", "shown", Shown, procs, procs.region(), False), procs.region(), current_node()),
    )


def test_mesh_of_a_thousand_ranks_prints(thousand: tuple[ProcMesh, ActorMesh]) -> None:
    peers = len(current_node().peers.known)
    for mesh in thousand:
        assert "hosts=125, gpus=8" in repr(mesh) and "\n" not in repr(mesh)
        table = mesh.to_table()
        assert table.count("\n") < 60
        assert "968 more" in table and "host000" in table and "host124" in table and "999" in table
        html = mesh._repr_html_()
        assert "<table" in html and len(html) < 60_000 and "host124" in html
        part = mesh.slice(gpus=3).flatten("n").slice(n=slice(0, 125, 5))
        assert len(part) == 25 and part.to_table().count("\n") < 40
        assert "host120" in part.to_table()
    assert len(current_node().peers.known) == peers


def test_values_of_a_thousand_ranks() -> None:
    values = ValueMesh({"hosts": 125, "gpus": 8}, [{"loss": rank // 500} for rank in range(1000)])
    text = repr(values)
    assert text.count("\n") < 10 and "ranks 0-499" in text and "ranks 500-999" in text
    assert "<table" in values._repr_html_()
    many = repr(ValueMesh({"gpus": 1000}, range(1000)))
    assert many.count("\n") < 40 and "more" in many


def test_live_meshes_print(procs: Any) -> None:
    mesh = procs(2, name="my <procs>")
    actors = mesh.spawn("my <actors>", Shown)
    actors.initialized.get(timeout=20)
    assert repr(mesh) == "<ProcMesh 'my <procs>' (gpus=2)>"
    assert repr(actors) == "<Shown mesh 'my <actors>' (gpus=2)>"
    assert "<procs>" not in mesh._repr_html_() and "<actors>" not in actors._repr_html_()
    assert mesh.to_table().count("alive") == 2
    assert "HostMesh" in repr(this_host()) and "<table" in this_host()._repr_html_()
    assert "loss" in repr(actors.big.call().get(timeout=20))
    mesh.stop().get(timeout=20)
    assert "stopped" in repr(mesh) and mesh.to_table().count("stopped") == 2 and "stopped" in actors.to_table()
