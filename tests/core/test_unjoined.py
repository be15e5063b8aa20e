"""Ranks that wait in a collective for finished ones are reported once; slow ranks are not."""

from __future__ import annotations

import pytest

from monarch._core.fail_fast import CallState
from monarch._core.text.unjoined import describe_unjoined
from monarch._core.unjoined import CollectiveWait, Unjoined, UnjoinedRanks

ALL = (0, 1, 2, 3)


def waits(
    rank: int, operation: str = "barrier", number: int = 3, peers: tuple[int, ...] = (), place: int = 1
) -> CollectiveWait:
    return CollectiveWait(rank, operation, "g", ALL, True, number, peers, (place,))


def rests(rank: int, count: int = 2, busy: bool = False) -> CallState:
    return CallState(rank, {"g": (ALL, count)}, idle=True, busy=busy)


def look(machine: Unjoined, now: float, waiting: list[CollectiveWait], others: list[CallState]) -> list[UnjoinedRanks]:
    for each in waiting:
        machine.waiting(each.rank, each, now)
    for each in others:
        machine.standing(each.rank, each)
    return machine.findings(now)


def test_waiting_rank_is_reported_once_after_limit() -> None:
    machine = Unjoined(2.0)
    others = [rests(1), rests(2), rests(3)]
    assert not look(machine, 0.0, [waits(0)], [])
    assert machine.members == set(ALL)
    assert not look(machine, 1.0, [waits(0)], others)
    assert look(machine, 2.0, [waits(0)], others) == [UnjoinedRanks(waits(0), (0,), (1, 2, 3), 2.0)]
    assert not machine.members and not look(machine, 3.0, [waits(0)], others)


def test_ranks_that_wait_in_one_collective_are_one_finding() -> None:
    machine = Unjoined(1.0)
    for now in (0.0, 0.5):
        assert not look(machine, now, [waits(0), waits(2)], [rests(1), rests(3)])
    (finding,) = look(machine, 1.0, [waits(0), waits(2)], [rests(1), rests(3)])
    assert finding.ranks == (0, 2) and finding.absent == (1, 3)


@pytest.mark.parametrize(
    ("waiting", "others"),
    [
        ([waits(0)], [rests(1, busy=True)]),
        ([waits(0)], [rests(1, count=3)]),
        ([waits(0, "gather")], [rests(1), rests(2)]),
        ([waits(0, "recv", peers=(3,))], [rests(1), rests(2)]),
    ],
    ids=["busy", "joined", "may be slow", "peer is not finished"],
)
def test_slow_ranks_are_not_reported(waiting: list[CollectiveWait], others: list[CallState]) -> None:
    machine = Unjoined(1.0)
    assert not any(look(machine, float(now), waiting, others) for now in range(5))


def test_rank_that_moves_is_not_reported() -> None:
    machine = Unjoined(2.0)
    others = [rests(1), rests(2), rests(3)]
    assert not any(look(machine, float(now), [waits(0, place=now)], others) for now in range(6))
    assert not any(look(machine, float(now), [waits(0, number=now + 3)], others) for now in range(6, 12))


def test_wait_is_reported_again_after_ten_times_as_long() -> None:
    machine = Unjoined(2.0)
    others = [rests(1), rests(2), rests(3)]
    found = [finding for now in range(120) for finding in look(machine, float(now), [waits(0)], others)]
    assert [finding.seconds for finding in found] == [2.0, 20.0]
    assert not machine.members


def test_wait_is_reported_anew_when_the_rank_runs_another_call() -> None:
    machine = Unjoined(2.0)
    others = [rests(1), rests(2), rests(3)]
    for _ in range(2):
        found = [finding for now in range(9) for finding in look(machine, float(now), [waits(0)], others)]
        assert [finding.seconds for finding in found] == [2.0]
        machine.forget(0)


def test_message_tells_ranks_that_the_call_does_not_run_on() -> None:
    finding = UnjoinedRanks(waits(0), (0,), (1, 2, 3), 2.0)
    text = describe_unjoined(finding, 4, "this cell", "stop the cell", [0])
    assert "ranks 1-3 have not joined: this cell does not run on them; stop the cell" in text
    text = describe_unjoined(finding, 4, "this cell", "stop the cell", [0, 3])
    assert "have not joined: rank 3 has finished this cell, which does not run on ranks 1-2; stop the cell" in text


def test_message_names_ranks_collective_and_remedy() -> None:
    text = describe_unjoined(UnjoinedRanks(waits(0), (0,), (1, 2, 3), 2.0), 4, "this cell", "stop the cell", ALL)
    assert text == (
        "rank 0 has waited 2.0 s in a collective (barrier(), #3 of the default group) that ranks 1-3 have not joined: "
        "they have finished this cell; stop the cell, or call it on all ranks of the group"
    )
    text = describe_unjoined(
        UnjoinedRanks(waits(0, "recv", peers=(2,)), (0, 1), (2,), 2.0), 4, "a.f()", "end that call", ALL
    )
    assert text.startswith("ranks 0-1 have waited 2.0 s in a point-to-point operation (recv(), #3")
    assert text.endswith("it has finished a.f(); end that call, or make the matching call on that rank")
