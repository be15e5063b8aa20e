"""The identity of an actor, and its place in the addressed view."""

from __future__ import annotations

from typing import Any

import pytest

from monarch.actor import (
    Actor,
    Point,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_host,
    this_proc,
)


class Where(Actor):
    def __init__(self) -> None:
        self.at_creation = dict(current_rank()), current_size()

    @endpoint
    def here(self) -> dict[str, Any]:
        actor = context().actor_instance
        return {
            "message": dict(current_rank()),
            "number": current_rank().rank,
            "size": current_size(),
            "identity": dict(actor.rank),
            "identity number": actor.rank.rank,
            "creation": self.at_creation,
            "name": actor.name,
            "class": actor.class_name,
            "id": actor.actor_id,
            "proc": actor.proc_id,
            "repr": repr(actor),
            "current": current_actor_name(),
        }

    @endpoint
    async def later(self) -> tuple[dict[str, int], dict[str, int]]:
        import asyncio

        before = dict(current_rank())
        await asyncio.sleep(0)
        inner = await asyncio.create_task(self._task())
        assert inner == before
        return before, dict(current_rank())

    async def _task(self) -> dict[str, int]:
        return dict(current_rank())

    @endpoint
    def meshes(self) -> tuple[Any, Any, Any, Any]:
        instance = context().actor_instance
        return (
            dict(instance.proc_mesh.extent),
            dict(instance.proc.extent),
            dict(this_proc().extent),
            this_proc() == instance.proc,
        )


@pytest.fixture
def where(procs: Any) -> Any:
    return procs({"hosts": 2, "gpus": 3}).spawn("where", Where)


def test_context_of_the_whole_mesh(where: Any) -> None:
    for point, said in where.here.call().get(timeout=20):
        assert said["message"] == said["identity"] == dict(point)
        assert said["number"] == said["identity number"] == point.rank
        assert said["size"] == {"hosts": 2, "gpus": 3}
        assert said["creation"] == (dict(point), {"hosts": 2, "gpus": 3})
        assert said["name"] == "where" and said["class"].endswith(".Where")
        assert said["id"] == said["current"] and said["id"].endswith(said["proc"])
        assert "Where where" in said["repr"]


def test_a_slice_changes_the_place_and_not_the_identity(where: Any) -> None:
    part = where.slice(hosts=1, gpus=slice(1, 3))
    values = part.here.call().get(timeout=20)
    assert [value["message"] for value in values.values()] == [{"gpus": 0}, {"gpus": 1}]
    assert [value["identity"] for value in values.values()] == [{"hosts": 1, "gpus": 1}, {"hosts": 1, "gpus": 2}]
    assert all(value["size"] == {"gpus": 2} for value in values.values())


def test_context_of_one_member_has_no_axes(where: Any) -> None:
    said = where.slice(hosts=1, gpus=2).here.call_one().get(timeout=20)
    assert said["message"] == {} and said["number"] == 0 and said["size"] == {}
    assert said["identity number"] == 5
    chosen = where.here.choose().get(timeout=20)
    assert chosen["message"] == {} and chosen["size"] == {}


def test_actor_sees_renamed_flattened_and_split_views(where: Any) -> None:
    renamed = where.rename(hosts="rows", gpus="columns").here.call().get(timeout=20)
    assert renamed["rows", 1, "columns", 2]["message"] == {"rows": 1, "columns": 2}
    flat = where.flatten("all").here.call().get(timeout=20)
    assert [value["message"] for value in flat.values()] == [{"all": rank} for rank in range(6)]
    split = where.split(gpus=("a", "b"), a=3).here.call().get(timeout=20)
    assert split[5]["message"] == {"hosts": 1, "a": 2, "b": 0}


def test_context_holds_across_an_await(where: Any) -> None:
    both = where.slice(hosts=0).later.call().get(timeout=20)
    assert [before == after == {"gpus": rank} for rank, (before, after) in enumerate(both.values())] == [True] * 3


def test_context_has_the_meshes_of_the_actor(where: Any) -> None:
    spawned, proc, here, same = where.slice(hosts=0, gpus=0).meshes.call_one().get(timeout=20)
    assert spawned == {"hosts": 2, "gpus": 3} and proc == here == {} and same


def test_context_of_the_program(host: Any) -> None:
    assert current_rank() == Point(0, current_rank().extent) and current_size() == {}
    actor = context().actor_instance
    assert actor.name == "root" and actor.proc_id == context().actor_instance.proc_id
    assert len(this_proc()) == len(this_host()) == 1 and this_host().sizes == {}
    assert actor.proc == this_proc()


def test_context_of_an_actor_in_the_program(host: Any) -> None:
    import os

    class Here(Actor):
        @endpoint
        def pid(self) -> int:
            return os.getpid()

        @endpoint
        def name(self) -> str:
            return context().actor_instance.name

    mesh = this_proc().spawn("here", Here)
    assert mesh.pid.call_one().get(timeout=20) == os.getpid()
    assert mesh.name.call_one().get(timeout=20) == "here"
    assert context().actor_instance.name == "root"
    mesh.stop().get(timeout=20)
