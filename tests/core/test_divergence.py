"""The comparison of fingerprints of ranks."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from monarch._core.digests.divergence import (
    DIFFERS,
    GRADIENT,
    PARAMETER,
    RANDOM,
    SHARD,
    STRANGE,
    Divergence,
    Sample,
    Sentry,
)

NAMES = [(PARAMETER, "a"), (PARAMETER, "b"), (GRADIENT, "a"), (SHARD, "s"), (RANDOM, "torch's random generator")]
EQUAL = [1, 2, 3, 4, 5]


def sampled(step: int, *changes: tuple[int, int], strange: dict[int, str] | None = None) -> Sample:
    """The sample of a rank, some of whose tensors are not as on the others."""
    marks = list(EQUAL)
    for at, mark in changes:
        marks[at] = mark
    return Sample(step, NAMES, marks, strange or {})


def taken(sentry: Sentry, *samples: Sample) -> list[Divergence]:
    return [found for rank, sample in enumerate(samples) for found in sentry.take(rank, sample)]


def test_first_tensor_and_rank_are_named_once() -> None:
    sentry = Sentry("model", 3)
    assert not taken(sentry, *[sampled(10)] * 3)
    found = taken(sentry, sampled(20), sampled(20, (1, 0), (2, 0)), sampled(20))
    assert [(each.kind, each.step, each.tensor, each.ranks) for each in found] == [(DIFFERS, 20, "parameter b", [1])]
    assert str(found[0]) == (
        "model: the parameter b on rank 1 differs from ranks 0,2 after step 20 (step 10 was fine); "
        "1 parameter and 1 gradient differ"
    )
    assert not taken(sentry, sampled(30), sampled(30, (1, 0)), sampled(30))
    assert (sentry.last, sentry.compared) == (30, 3)


def test_generators_that_differ_from_the_start_are_not_compared() -> None:
    sentry = Sentry("model", 2)
    assert not taken(sentry, sampled(1, (4, 8)), sampled(1, (4, 9)))
    assert not taken(sentry, sampled(2, (4, 6)), sampled(2, (4, 7)))


def test_generators_that_were_equal_are_compared() -> None:
    sentry = Sentry("model", 2)
    assert not taken(sentry, sampled(1), sampled(1))
    (found,) = taken(sentry, sampled(2), sampled(2, (4, 7)))
    assert found.tensor == "state of torch's random generator"


def test_shards_are_not_compared() -> None:
    assert not taken(Sentry("model", 2), sampled(1), sampled(1, (3, 0)))


def test_nan_is_reported_and_not_the_difference_that_follows() -> None:
    sentry = Sentry("model", 2)
    found = taken(sentry, sampled(5), sampled(5, (0, 9), (2, 9), strange={2: "NaN", 0: "NaN"}))
    assert [str(each) for each in found] == [
        "model: the parameter a has NaN on rank 1 after step 5 (and 1 other tensor) (the first step compared)"
    ]
    assert not taken(sentry, sampled(6), sampled(6, (0, 8), (2, 8), strange={0: "NaN"}))


def test_nan_of_a_rank_is_reported_though_others_do_not_come() -> None:
    sentry = Sentry("model", 3)
    assert not sentry.take(2, sampled(5, strange={1: "Inf"}))
    assert [(each.kind, each.ranks, each.tensor) for each in sentry.overdue()] == [(STRANGE, [2], "parameter b")]
    assert not sentry.overdue()


def test_ranks_with_other_tensors_are_named() -> None:
    (found,) = taken(Sentry("model", 2), sampled(1), Sample(1, NAMES[:2], [1, 2], {}))
    assert "rank 1 and rank 0 have different parameters or gradients" in str(found)


@given(st.integers(2, 6), st.integers(1, 30), st.data())
def test_order_of_arrival_does_not_matter(ranks: int, steps: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(1, steps))
    odd = data.draw(st.integers(0, ranks - 1)) if ranks > 2 else 1
    queues = [
        [sampled(step, *(((1, 0),) if rank == odd and step >= bad else ())) for step in range(1, steps + 1)]
        for rank in range(ranks)
    ]
    shuffled = random.Random(data.draw(st.integers()))
    sentry = Sentry("model", ranks)
    found: list[Divergence] = []
    while any(queues):
        rank = shuffled.choice([rank for rank in range(ranks) if queues[rank]])
        found += sentry.take(rank, queues[rank].pop(0))
    assert [(each.step, each.ranks, each.tensor) for each in found] == [(bad, [odd], "parameter b")]


def test_samples_that_are_never_complete_are_forgotten() -> None:
    sentry = Sentry("model", 2)
    for step in range(1000):
        sentry.take(0, sampled(step))
    assert len(sentry._pending) <= 64
