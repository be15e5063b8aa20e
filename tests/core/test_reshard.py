"""Copy plans between meshes: each target gets its parts, and each byte comes to a host once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._core import reshard
from monarch._core.reshard import BETWEEN_HOSTS, FROM_SOURCES, SOURCE, WITHIN_HOSTS, BoxHolder, FetchPlan, Planner
from monarch._core.shapes.boxes import Box, box_of
from monarch.exceptions import ShapeError


def shards(shape: list[int], counts: list[int]) -> list[Box]:
    """Return a tensor split evenly along each dim, as far as possible; empty parts are omitted."""
    boxes: list[Box] = [()]
    for size, count in zip(shape, counts, strict=True):
        edges = [size * index // count for index in range(count + 1)]
        boxes = [(*box, (start, stop)) for box in boxes for start, stop in pairwise(edges)]
    return [box for box in boxes if all(stop > start for start, stop in box)]


@st.composite
def layouts(draw: Any, shape: list[int], prefix: str) -> list[BoxHolder]:
    """Processes on some hosts that hold shards of a tensor, possibly with copies of the same shard."""
    counts = [draw(st.integers(1, 4)) for _ in shape]
    replicas = draw(st.integers(1, 3))
    hosts = draw(st.integers(1, 3))
    boxes = [box for box in shards(shape, counts) for _ in range(replicas)]
    near = draw(st.booleans())
    names = [f"{'' if near else prefix}{index % hosts}" for index in range(len(boxes))]
    return [BoxHolder(name, {"w": box}) for name, box in zip(names, boxes, strict=True)]


def carry_out(plan: FetchPlan, shape: list[int], sources: list[BoxHolder], targets: list[BoxHolder]) -> dict[str, Any]:
    """Execute a plan with real arrays; return what has come to each host, and how often."""
    tensor = numpy.arange(1, numpy.prod(shape, dtype=int) + 1).reshape(shape)
    have = [tensor[tuple(slice(*each) for each in source.boxes["w"])] for source in sources]
    get = [numpy.zeros([stop - start for start, stop in target.boxes["w"]], dtype=int) for target in targets]
    arrived: dict[str, Any] = {target.host: numpy.zeros(shape, dtype=int) for target in targets}
    for number, phase in enumerate(plan.phases):
        # Within a phase, no copy may depend on another of that phase.
        before = [each.copy() for each in get]
        for index, fetches in phase.items():
            for fetch in fetches:
                holder = (sources if fetch.kind == SOURCE else targets)[fetch.holder]
                from_box, to_box = holder.boxes["w"], targets[index].boxes["w"]
                data = (have if fetch.kind == SOURCE else before)[fetch.holder][_within(fetch.box, from_box)]
                get[index][_within(fetch.box, to_box)] = data
                if holder.host != targets[index].host:
                    assert number != WITHIN_HOSTS
                    arrived[targets[index].host][tuple(slice(*each) for each in fetch.box)] += 1
                assert fetch.kind == SOURCE if number == FROM_SOURCES else fetch.kind != SOURCE
    for target, array in zip(targets, get, strict=True):
        assert (array == tensor[tuple(slice(*each) for each in target.boxes["w"])]).all()
    return arrived


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, box, strict=True))


@pytest.fixture
def fine_grained(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors are split too."""
    monkeypatch.setattr(reshard, "_LEAST", 1)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from([1, 2, 8]), st.booleans())
def test_targets_get_all_and_hosts_get_bytes_once(
    data: st.DataObject, shape: list[int], width: int, fine: bool
) -> None:
    before = reshard._LEAST
    reshard._LEAST = 1 if fine else before
    try:
        sources, targets = data.draw(layouts(shape, "s")), data.draw(layouts(shape, "t"))
        plan = Planner(sources, targets, {"w": width}).plan()
        for host, count in carry_out(plan, shape, sources, targets).items():
            assert count.max() <= 1
            own = [source for source in sources if source.host == host]
            for source in own:
                # Bytes that the host has do not come there again.
                assert not count[tuple(slice(*each) for each in source.boxes["w"])].any()
    finally:
        reshard._LEAST = before


def test_one_to_many_copy_is_shared(fine_grained: None) -> None:
    shape = [64, 4]
    targets = [BoxHolder(f"host{index // 2}", {"w": box_of(shape)}) for index in range(8)]
    plan = Planner([BoxHolder("source", {"w": box_of(shape)})], targets, {"w": 4}).plan()
    arrived = carry_out(plan, shape, [BoxHolder("source", {"w": box_of(shape)})], targets)
    assert len(arrived) == 4 and all((count == 1).all() for count in arrived.values())
    # The source sends everything once, and all hosts forward their shares.
    sent = sum(_size(fetch.box) for fetches in plan.phases[FROM_SOURCES].values() for fetch in fetches)
    assert sent == 64 * 4
    senders = {fetch.holder // 2 for fetches in plan.phases[BETWEEN_HOSTS].values() for fetch in fetches}
    assert senders == {0, 1, 2, 3}


def _size(box: Box) -> int:
    return int(numpy.prod([stop - start for start, stop in box]))


def test_sources_share_work() -> None:
    shape = [4]
    sources = [BoxHolder("s", {str(name): box_of(shape) for name in range(10)}) for _ in range(2)]
    target = BoxHolder("t", {str(name): box_of(shape) for name in range(10)})
    plan = Planner(sources, [target], {str(name): 4 for name in range(10)}).plan()
    used = [fetch.holder for fetch in plan.phases[FROM_SOURCES][0]]
    assert used.count(0) == used.count(1) == 5


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"v": ((0, 4),)}, "no source has tensor 'v'; sources have w"),
        ({"w": ((0, 8),)}, r"no source has w\[4:8\], which target 0 needs"),
        ({"w": ((0, 4), (0, 1))}, "different number of dims"),
    ],
)
def test_missing_source_is_named(wanted: dict[str, Box], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Planner([BoxHolder("s", {"w": ((0, 4),)})], [BoxHolder("t", wanted)], dict.fromkeys(wanted, 4)).plan()
