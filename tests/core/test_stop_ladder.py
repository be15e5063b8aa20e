"""The ladder of Stop, tested without processes: however ranks answer, it ends in time and names each outcome."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._core.stop_ladder import (
    BOUND,
    GRACE,
    LOOK_AT,
    LOOK_UNTIL,
    PATIENCE,
    PATIENCE_AFAR,
    Activity,
    Announce,
    Command,
    Ending,
    Free,
    Insist,
    Interrupt,
    Look,
    Replace,
    StopLadder,
    starves,
)


@dataclass
class Rank:
    """How a simulated rank takes each rung: seconds until it answers, None for never."""

    ends: dict[type, float | None] = field(default_factory=dict[type, "float | None"])
    """Until its code ends after a rung."""
    is_freed: float | None = None
    """Until it reports an abort."""
    agent: float | None = 0.0
    """Until the host agent reports on it."""
    says: tuple[float, Activity] | None = None
    """Until it reports its state."""


def simulate(ranks: dict[int, Rank], restartable: bool = True, again: set[int] | None = None) -> Any:
    """Run the ladder against ranks, with its own clock; return the commands with their times, and the end."""
    ladder = StopLadder(ranks, restartable, again or set())
    events: list[tuple[float, int, Any]] = []
    stopped: dict[int, float] = {}
    log: list[tuple[float, Command]] = []
    now, serial = 100.0, 0

    def later(seconds: float | None, event: Any) -> None:
        nonlocal serial
        if seconds is not None:
            serial += 1
            heapq.heappush(events, (now + seconds, serial, event))

    def carry_out(commands: list[Command]) -> None:
        for command in commands:
            log.append((now - 100.0, command))
            for rank in command.ranks:
                later(ranks[rank].ends.get(type(command)), ("stopped", rank))
                if isinstance(command, Free) and ranks[rank].agent is not None:
                    later(ranks[rank].agent, ("glimpsed", rank))
                if isinstance(command, Free):
                    later(ranks[rank].is_freed, ("freed", rank))
                says = ranks[rank].says
                if isinstance(command, Look) and says is not None:
                    later(says[0], ("seen", rank, says[1]))
            if isinstance(command, Replace):
                assert not set(command.ranks) & stopped.keys(), "a rank that has ended is destroyed"

    carry_out(ladder.begin(now))
    while not ladder.over:
        assert ladder.due > now or events
        if events and events[0][0] <= ladder.due:
            now, _, event = heapq.heappop(events)
            if event[0] == "glimpsed":
                ladder.glimpsed(event[1], None)
                continue
            if event[0] == "freed":
                ladder.freed(event[1])
                continue
            if event[0] == "stopped":
                stopped[event[1]] = now
                carry_out(ladder.stopped(event[1], now))
            else:
                carry_out(ladder.seen(event[1], event[2], now))
        else:
            now = ladder.due
            carry_out(ladder.tick(now))
    return ladder, log, now - 100.0, stopped


SECONDS = st.none() | st.floats(0.0, 2.5)
RUNGS = st.fixed_dictionaries({rung: SECONDS for rung in (Interrupt, Free, Insist)})
RANKS = st.builds(
    Rank,
    RUNGS,
    SECONDS,
    st.sampled_from([0.0, 0.6, None]),
    st.none() | st.tuples(st.floats(0.0, 1.0), st.sampled_from(Activity)),
)


@settings(max_examples=300, deadline=None)
@given(
    ranks=st.dictionaries(st.integers(0, 20), RANKS, max_size=8),
    restartable=st.booleans(),
    again=st.sets(st.integers(0, 20), max_size=3),
)
def test_ladder_ends_in_time_and_names_each_rank(ranks: dict[int, Rank], restartable: bool, again: set[int]) -> None:
    ladder, log, seconds, stopped = simulate(ranks, restartable, again)
    late = any(rank.agent is None for rank in ranks.values())
    assert seconds <= BOUND + (PATIENCE if late else 0) + 1e-6
    # Each rung for each rank at most once, and only for running ranks.
    rungs = Counter((type(command), rank) for _, command in log for rank in command.ranks)
    assert all(count == 1 for count in rungs.values())
    ended = {rank: at - 100.0 for rank, at in stopped.items()}
    assert all(ended.get(rank, float("inf")) >= when for when, command in log for rank in command.ranks)
    # The verdict has the true outcome of each rank.
    assert ladder.endings.keys() == ranks.keys()
    for rank, ending in ladder.endings.items():
        assert (ending in (Ending.INTERRUPTED, Ending.FREED)) == (rank in stopped)
        if ending is Ending.FREED:
            assert ranks[rank].is_freed is not None
        if ending is Ending.RESTARTED:
            assert rank in again or (restartable and ladder.activity(rank) is Activity.PYTHON)
            # Announced first.
            said = [
                at for at, (_, command) in enumerate(log) if isinstance(command, Announce) and rank in command.ranks
            ]
            done = [at for at, (_, each) in enumerate(log) if isinstance(each, Replace) and rank in each.ranks]
            assert len(said) == len(done) == 1 and said < done
    # Ranks that swallow interrupts, or were named by the last stop, are restarted if they may be.
    for rank, ending in ladder.endings.items():
        if ending is Ending.LEFT:
            assert rank not in again
            assert not (restartable and ladder.activity(rank) is Activity.PYTHON)


def _of(log: list[tuple[float, Command]], kind: type) -> Command:
    return next(command for _, command in log if isinstance(command, kind))


@pytest.mark.parametrize("count", [1, 64, 256])
def test_ladder_time_is_independent_of_rank_count(count: int) -> None:
    ladder, log, seconds, _ = simulate({rank: Rank() for rank in range(count)})
    assert seconds == pytest.approx(LOOK_UNTIL)
    assert [type(command) for _, command in log] == [Interrupt, Free, Insist, Look]
    assert set(ladder.endings.values()) == {Ending.LEFT}
    assert all(ladder.activity(rank) is Activity.SILENT for rank in range(count))


def test_late_ladder_leaves_ranks_time_to_answer() -> None:
    ladder = StopLadder([0])
    ladder.begin(0.0)
    ladder.glimpsed(0, None)
    asked: list[tuple[float, Command]] = []
    now = 0.0
    while not ladder.over:
        # The machine was busy with something else.
        now = ladder.due + 0.4
        asked += [(now, command) for command in ladder.tick(now)]
    assert [type(command) for _, command in asked] == [Free, Insist, Look]
    times = [*(when for when, _ in asked), now]
    assert [later - earlier > 0.4 for earlier, later in pairwise(times)] == [True] * 3
    assert now <= BOUND + 4 * 0.4 and ladder.endings == {0: Ending.LEFT}


def test_ranks_without_a_cpu_have_longer_to_answer() -> None:
    ladder = StopLadder([0, 1, 2])
    ladder.begin(0.0)
    now = 0.0
    while not any(isinstance(command, Look) for command in ladder.tick(now)):
        now = ladder.due
    for rank in range(3):
        ladder.glimpsed(rank, None)
    ladder.seen(1, Activity.PYTHON, now)
    ladder.starved(0)
    ladder.starved(1)
    assert ladder.due == now + PATIENCE
    assert not ladder.tick(now + 1.0)
    # Rank 2, which has a CPU, has had its time.
    assert ladder.seen(0, Activity.PYTHON, now + 1.0) == [Announce((0, 1))]
    assert ladder.activity(2) is Activity.SILENT


def test_silent_rank_of_a_silent_agent_is_unknown() -> None:
    ladder, _, seconds, _ = simulate({0: Rank(), 1: Rank(agent=None)})
    assert LOOK_AT + PATIENCE <= seconds <= BOUND + PATIENCE
    assert (ladder.activity(0), ladder.activity(1)) == (Activity.SILENT, Activity.UNKNOWN)


def test_silent_agent_of_another_host_keeps_the_notebook_for_2_s() -> None:
    ladder = StopLadder([0, 1, 2], afar=[1, 2])
    ladder.begin(0.0)
    now = 0.0
    while not any(isinstance(command, Look) for command in ladder.tick(now)):
        now = ladder.due
    # Of the one on this machine it is known whether it has a CPU.
    assert ladder.due == now + PATIENCE
    ladder.glimpsed(0, None)
    assert ladder.due == now + PATIENCE_AFAR < 2.0 - GRACE
    # An agent that answers has told of its rank, which has time if it has no CPU.
    ladder.glimpsed(1, None)
    ladder.starved(1)
    assert ladder.due == now + PATIENCE
    ladder.seen(1, Activity.COMPUTING, now)
    now = ladder.due
    assert now < 2.0 - GRACE and not ladder.tick(now) and ladder.over
    assert (ladder.activity(0), ladder.activity(2)) == (Activity.SILENT, Activity.UNKNOWN)


def test_activity_is_the_last_one_seen() -> None:
    ladder = StopLadder([0, 1])
    ladder.begin(0.0)
    for rank in (0, 1):
        ladder.glimpsed(rank, Activity.SUSPENDED)
    assert ladder.activity(0) is Activity.SUSPENDED
    ladder.seen(0, Activity.PYTHON, 0.1)
    ladder.glimpsed(1, None)
    assert (ladder.activity(0), ladder.activity(1)) == (Activity.PYTHON, Activity.SILENT)


def test_ladder_of_mixed_ranks_takes_time_of_slowest() -> None:
    quick, stuck = Rank({Interrupt: 0.1}), Rank({Free: 0.05}, 0.1)
    swallows, computes = Rank(says=(0.01, Activity.PYTHON)), Rank(says=(0.01, Activity.COMPUTING))
    kinds = [quick, stuck, swallows, computes]
    ladder, log, seconds, _ = simulate({rank: kinds[rank % 4] for rank in range(256)})
    assert LOOK_UNTIL < seconds <= BOUND < 2.0
    expected = [Ending.INTERRUPTED, Ending.FREED, Ending.RESTARTED, Ending.LEFT]
    assert all(ending is expected[rank % 4] for rank, ending in ladder.endings.items())
    assert log[-1][1] == Replace(tuple(range(2, 256, 4)))


def test_ladder_ends_at_once_when_all_have_ended() -> None:
    _, log, seconds, _ = simulate({rank: Rank({Interrupt: 0.2}) for rank in range(8)})
    assert seconds == pytest.approx(0.2) and len(log) == 1
    assert StopLadder([]).begin(0.0) == []


def test_rank_that_stops_in_grace_is_not_restarted() -> None:
    ladder, log, _, _ = simulate({0: Rank({Announce: 0.1}, says=(0.01, Activity.PYTHON))})
    assert ladder.endings == {0: Ending.INTERRUPTED}
    assert not any(isinstance(command, Replace) for _, command in log)


def test_actors_are_restarted_by_second_stop() -> None:
    ranks = {0: Rank(says=(0.01, Activity.PYTHON))}
    ladder, _, _, _ = simulate(ranks, restartable=False)
    assert ladder.endings == {0: Ending.LEFT} and ladder.activity(0) is Activity.PYTHON
    ladder, _, _, _ = simulate(ranks, restartable=False, again={0})
    assert ladder.endings == {0: Ending.RESTARTED}


def test_second_stop_restarts_ranks_named_by_first() -> None:
    ranks = {0: Rank(says=(0.01, Activity.COMPUTING)), 1: Rank(says=(0.01, Activity.COMPUTING))}
    ladder, _, _, _ = simulate(ranks, again={1})
    assert ladder.endings == {0: Ending.LEFT, 1: Ending.RESTARTED}


def test_rank_reporting_swallowed_interrupt_late_is_restarted() -> None:
    swallows = {rank: Rank(says=(after, Activity.PYTHON)) for rank, after in enumerate([0.01, 0.4])}
    ladder, log, _, _ = simulate(swallows)
    assert ladder.endings == dict.fromkeys([0, 1], Ending.RESTARTED)
    assert [command.ranks for _, command in log if isinstance(command, Announce)] == [(0,), (1,)]
    assert [command.ranks for _, command in log if isinstance(command, Replace)] == [(0, 1)]


def test_ranks_that_share_cpus_are_not_starved() -> None:
    """Eight that compute on two cores for half a second; and one among hundreds."""
    assert not starves(0.45, 0.45 / 4, 0.45 * 3 / 4)
    assert starves(0.45, 0.001, 0.44)
    assert not starves(0.45, 0.001, 0.01), "a rank that sleeps"
