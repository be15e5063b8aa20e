"""Where ranks stop after an op has failed on one of them, without ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from monarch._core.shapes.extent import Extent
from monarch._core.shapes.region import Region
from monarch._engine.issuing.failures import OpFailure
from monarch._engine.rank.operations.moving import _Exports  # pyright: ignore[reportPrivateUsage]
from monarch._engine.rank.recovery import progress as progress_
from monarch._engine.rank.recovery.progress import Limit, OpProgress, places, ranks_behind

WHOLE = Region.full(Extent(("dp", "mp"), (2, 2)))
ROW = WHOLE.slice(dp=0)
OTHER_ROW = WHOLE.slice(dp=1)


@pytest.fixture
def of_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this process be a rank."""

    class Node:
        rank = 0

    def become(rank: int) -> None:
        monkeypatch.setattr(Node, "rank", rank)

    monkeypatch.setattr(progress_, "current_node", Node)
    return become


def running(epoch: int, waiting: dict[Region, int] | None = None) -> OpProgress:
    found = OpProgress()
    found.halted = False
    found.begin(epoch, Counter(waiting or {}))
    return found


def test_rank_that_is_behind_runs_the_failed_op_and_no_later_one(of_rank: Any) -> None:
    of_rank(1)
    here = running(3)
    here.count(WHOLE)
    assert not here.limit(Limit(3, 0, WHOLE, {WHOLE: 3})) and not here.is_over()
    here.count(WHOLE)
    assert not here.there()
    here.count(WHOLE)
    # The next op is the one that has failed elsewhere: it may wait in it.
    assert here.there() and not here.is_over()
    here.count(WHOLE)
    assert here.is_over()


def test_ops_are_numbered_from_those_on_which_ranks_agree(of_rank: Any) -> None:
    of_rank(1)
    # Of three ops that waited on rank 0, this one has run two.
    here = running(3, {WHOLE: 1})
    assert here.limit(Limit(3, 0, WHOLE, {WHOLE: -1})) and not here.is_over()
    here.count(WHOLE)
    assert here.is_over()


def test_ops_of_slices_that_both_have_are_completed_too(of_rank: Any) -> None:
    of_rank(1)
    here = running(0)
    assert not here.limit(Limit(0, 0, WHOLE, {WHOLE: 0, ROW: 1}))
    here.count(ROW)
    assert here.there()


def test_rank_outside_of_the_slice_goes_on(of_rank: Any) -> None:
    of_rank(1)
    here = running(0, {WHOLE: 2})
    assert not here.limit(Limit(0, 3, OTHER_ROW, {WHOLE: -1, OTHER_ROW: -1}))
    here.count(WHOLE)
    assert here.there() and not here.is_over()
    here.count(WHOLE)
    assert not here.is_over()


def test_rank_that_has_halted_is_there(of_rank: Any) -> None:
    of_rank(1)
    here = running(2)
    here.halted = True
    assert here.limit(Limit(2, 0, WHOLE, {WHOLE: 5}))


def test_rank_that_has_not_begun_an_epoch_is_not_there(of_rank: Any) -> None:
    of_rank(1)
    here = running(2)
    here.halted = True
    assert not here.limit(Limit(4, 0, WHOLE, {WHOLE: 0}))
    here.halted = False
    here.begin(4, Counter())
    assert here.there()


def test_rank_that_does_not_run_in_an_epoch_is_there(of_rank: Any) -> None:
    of_rank(1)
    here = running(2)
    here.halted = True
    assert not here.limit(Limit(4, 0, WHOLE, {WHOLE: 7}))
    here.abandon(4)
    assert here.there()


def test_limits_of_former_epochs_are_forgotten(of_rank: Any) -> None:
    of_rank(1)
    here = running(2)
    here.limit(Limit(2, 0, WHOLE, {WHOLE: 0}))
    here.begin(3, Counter())
    here.count(WHOLE)
    assert not here.is_over() and not here.there()


def test_ranks_that_have_stopped_are_those_of_the_last_epoch() -> None:
    here = OpProgress()
    assert here.note_there(1, 2) == {2}
    assert here.note_there(1, 3) == {2, 3}
    assert here.note_there(2, 0) == {0}


def test_ops_completed_by_others_are_known_by_number() -> None:
    whole, part = Region.full(Extent(("dp",), (3,))), Region.full(Extent(("dp",), (3,))).slice(dp=slice(0, 2))
    ops: list[Any] = [(1, (), (), (at,), 0) for at in range(4)]
    kept = [(whole, ops[0]), (part, ops[1]), (whole, 17), (whole, ops[2]), (whole, ops[3])]
    behind = ranks_behind(kept, places(kept), {whole: {0: 3, 1: 1, 2: 2}, part: {0: 1, 1: 1}})
    # Of three that wait here, another rank has completed one, and another one two.
    assert behind == {id(ops[0]): {0}, id(ops[2]): {0, 2}}


def test_ops_that_have_failed_meanwhile_do_not_shift_the_others() -> None:
    whole = Region.full(Extent(("dp",), (2,)))
    ops: list[Any] = [(1, (), (), (at,), 0) for at in range(3)]
    kept = [(whole, each) for each in ops]
    found = places(kept)
    # The second one depends on a failure. Rank 1 has completed the first one.
    behind = ranks_behind([kept[0], kept[2]], found, {whole: {0: 3, 1: 2}})
    assert behind == {id(ops[0]): {0}}


def test_those_who_wait_for_a_value_learn_that_it_has_failed() -> None:
    sent: list[Any] = []

    class Port:
        def send(self, value: Any) -> None:
            sent.append(value)

    exports = _Exports()
    exports.want(7, Port())
    assert not sent
    failure = OpFailure("embedding", 0, (1,), "IndexError", "out of range", "")
    exports.failed[7] = failure
    exports.fail(7, failure)
    assert sent == [failure]
