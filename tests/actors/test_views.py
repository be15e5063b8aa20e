"""Views of meshes: slices of slices address the same actors as in numpy."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch.actor import Actor, context, current_rank, endpoint
from monarch.exceptions import AxisError, PointError, ShapeError


class Member(Actor):
    @endpoint
    def ranks(self) -> tuple[int, int]:
        return context().actor_instance.rank.rank, current_rank().rank


@pytest.fixture(scope="module")
def cube() -> Any:
    from monarch.actor import this_host

    procs = this_host().spawn_procs(per_host={"a": 2, "b": 2, "c": 2})
    member = procs.spawn("member", Member)
    # Up before the first test looks what there is.
    member.ranks.call().get(timeout=20)
    yield member
    procs.stop().get(timeout=30)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """A sequence of views of a 2x2x2 mesh."""
    made: list[tuple[str, Any]] = []
    sizes = {"a": 2, "b": 2, "c": 2}
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["slice", "slice", "rename", "split", "flatten"]))
        if not sizes:
            break
        axis = draw(st.sampled_from(sorted(sizes)))
        size = sizes[axis]
        if kind == "slice":
            if draw(st.booleans()):
                made.append(("slice", {axis: draw(st.integers(-size, size - 1))}))
                del sizes[axis]
            else:
                start = draw(st.integers(0, size - 1))
                stop = draw(st.integers(start + 1, size))
                step = draw(st.integers(1, 3))
                made.append(("slice", {axis: slice(start, stop, step)}))
                sizes[axis] = len(range(start, stop, step))
        elif kind == "rename":
            made.append(("rename", {axis: f"r{number}"}))
            sizes = {f"r{number}" if name == axis else name: count for name, count in sizes.items()}
        elif kind == "split" and size > 1:
            made.append(("split", {axis: (f"s{number}", f"t{number}"), f"s{number}": size}))
            split: dict[str, int] = {}
            for name, count in sizes.items():
                split.update({f"s{number}": size, f"t{number}": 1} if name == axis else {name: count})
            sizes = split
        elif kind == "flatten":
            made.append(("flatten", f"f{number}"))
            total = 1
            for count in sizes.values():
                total *= count
            sizes = {f"f{number}": total}
    return made


def by_numpy(array: Any, names: list[str], step: tuple[str, Any]) -> tuple[Any, list[str]]:
    kind, how = step
    if kind == "slice":
        ((axis, index),) = how.items()
        at = names.index(axis)
        array = array[(slice(None),) * at + (index,)]
        return array, names if isinstance(index, slice) else [name for name in names if name != axis]
    if kind == "rename":
        ((old, new),) = how.items()
        return array, [new if name == old else name for name in names]
    if kind == "split":
        axis, (outer, inner) = next((name, value) for name, value in how.items() if isinstance(value, tuple))
        at = names.index(axis)
        array = array.reshape((*array.shape[:at], how[outer], -1, *array.shape[at + 1 :]))
        return array, [*names[:at], outer, inner, *names[at + 1 :]]
    return array.reshape(-1), [how]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps())
def test_views_of_views_are_those_of_numpy(cube: Any, made: list[tuple[str, Any]]) -> None:
    mesh, array, names = cube, numpy.arange(8).reshape(2, 2, 2), ["a", "b", "c"]
    for step in made:
        kind, how = step
        try:
            mesh = mesh.flatten(how) if kind == "flatten" else getattr(mesh, kind)(**how)
        except ShapeError:
            # Only ranks that are evenly spaced can be flattened.
            flat = array.reshape(-1)
            assert kind == "flatten" and len(set(numpy.diff(flat))) > 1
            return
        array, names = by_numpy(array, names, step)
    assert list(mesh.sizes.items()) == list(zip(names, array.shape, strict=True))
    said = mesh.ranks.call().get(timeout=20)
    assert [identity for identity, _ in said.values()] == array.reshape(-1).tolist()
    assert [place for _, place in said.values()] == list(range(array.size))
    assert [identity for _, (identity, _) in said] == [said[rank][0] for rank in range(array.size)]


def test_shape_errors_name_the_axes(cube: Any) -> None:
    for make in (lambda: cube.slice(gpus=0), lambda: cube.rename(gpus="x"), lambda: cube.size("gpus")):
        with pytest.raises(AxisError, match=r"a=2.*b=2.*c=2") as caught:
            make()
        assert isinstance(caught.value, TypeError) and isinstance(caught.value, KeyError)
    with pytest.raises(PointError, match="2"):
        cube.slice(a=2)
    with pytest.raises(ShapeError):
        cube.slice(a=slice(1, 1))
    with pytest.raises(ValueError):
        cube.slice(a=[0, 1])
    with pytest.raises(ShapeError):
        cube.split(a=("x", "y"), x=3)
    with pytest.raises(ShapeError):
        cube.slice(b=slice(0, 1)).flatten("all").slice(all=slice(0, 2)).split(all=("a", "a"), a=1)


def test_slicing_sends_no_message(cube: Any) -> None:
    peers = {peer.proc: peer.sent for peer in cube._node.peers.known.values()}
    for _ in range(100):
        cube.slice(a=0).rename(b="x").slice(x=1).flatten("y")
    assert {peer.proc: peer.sent for peer in cube._node.peers.known.values()} == peers


def test_equal_views_are_equal(cube: Any) -> None:
    assert cube.slice(a=0) == cube.slice(a=0) and hash(cube.slice(a=0)) == hash(cube.slice(a=0))
    assert cube.slice(a=0) != cube.slice(a=1)
    assert cube.slice(a=slice(0, 2)) == cube
    assert [point.rank for point in cube.coordinates] == list(range(8))
    assert cube.size() == len(cube) == 8 and cube.size(["a", "b"]) == 4 and cube.ndim == 3


def test_procs_are_sliced_before_actors_are_spawned(cube: Any, procs: Any) -> None:
    mesh = procs({"a": 2, "b": 2})
    part = mesh.slice(a=1).rename(b="x").spawn("part", Member)
    assert part.sizes == {"x": 2}
    # Its identity is its place in what was spawned.
    assert list(part.ranks.call().get(timeout=20).values()) == [(0, 0), (1, 1)]
    assert part.slice(x=1).ranks.call_one().get(timeout=20) == (1, 0)
