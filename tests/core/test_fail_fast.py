"""Which ranks are freed when a rank fails: those that wait for it in vain, and no others."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._core.fail_fast import (
    COLLECT,
    PERIOD,
    STUBBORN,
    TELL,
    CallState,
    Command,
    FailFast,
    Free,
    Interrupt,
    Look,
    Tell,
    waits_in_vain,
)

ALL = (0, 1, 2, 3)


def at(rank: int, count: int, place: int = 1, group: tuple[int, ...] = ALL, sleeps: bool = False) -> CallState:
    """Return a rank that has begun so many collectives in one group."""
    return CallState(rank, {"g": (group, count)}, (), (place,), sleeps)


def test_rank_waits_in_vain_when_it_is_ahead_of_failed_one() -> None:
    assert waits_in_vain(at(0, 3), [at(1, 2)])
    assert not waits_in_vain(at(0, 2), [at(1, 2)])
    assert not waits_in_vain(at(0, 1), [at(1, 2)])
    # In a group without the failed rank.
    assert not waits_in_vain(at(0, 3, group=(0, 2)), [CallState(1, {})])
    # In a group that the failed rank has not created.
    assert waits_in_vain(at(0, 1, group=(0, 1)), [CallState(1, {})])


def test_rank_waits_in_vain_for_failed_one_to_make_group() -> None:
    making = CallState(0, {}, (("g", (0, 1)),))
    assert waits_in_vain(making, [CallState(1, {})])
    # Another group of the same ranks, such as the default one, is not the one that is waited for.
    assert waits_in_vain(making, [CallState(1, {"h": ((0, 1), 0)}, made=("h",))])
    assert not waits_in_vain(making, [CallState(1, {"h": ((0, 1), 0)}, made=("g", "h"))])
    assert not waits_in_vain(making, [CallState(2, {})])
    # One whose members are not known.
    assert waits_in_vain(CallState(0, {}, (("", ()),)), [CallState(2, {})])


def drive(standings: dict[int, list[CallState]], failed: int, seconds: float) -> list[tuple[float, Command]]:
    """Check ranks for some seconds; the last state of each stays."""
    machine = FailFast(len(standings), 0.0)
    machine.failed(failed)
    log: list[tuple[float, Command]] = []
    looks = 0
    while machine.due <= seconds and not machine.over:
        now = machine.due
        for command in machine.tick(now):
            log.append((now, command))
            if isinstance(command, Look):
                for position in command.positions:
                    mine = standings[position]
                    log.extend((now, each) for each in machine.standing(position, mine[min(looks, len(mine) - 1)], now))
                looks += 1
    return log


def test_waiting_ranks_are_freed_at_second_check() -> None:
    log = drive({0: [at(0, 1)], 1: [at(1, 0)], 2: [at(2, 1)], 3: [at(3, 0, 7)]}, 1, 0.3)
    freed = [(when, command) for when, command in log if isinstance(command, Free)]
    assert [command for _, command in freed] == [Free((0,)), Free((2,))]
    assert all(when <= 0.2 for when, _ in freed)


def test_rank_that_moves_or_sleeps_is_left_alone() -> None:
    moving = [at(0, 1, place) for place in range(100)]
    log = drive({0: moving, 1: [at(1, 0)], 2: [at(2, 1, sleeps=True)], 3: [at(3, 0)]}, 1, 20.0)
    assert not [command for _, command in log if isinstance(command, (Free, Interrupt))]
    assert [when for when, command in log if isinstance(command, Tell)] and len(log) < 32


def test_rank_that_comes_late_is_freed_within_period() -> None:
    late = [*[at(0, 0, place) for place in range(8)], at(0, 1, 99)]  # it enters the collective before the ninth look
    log = drive({0: late, 1: [at(1, 0)]}, 1, 20.0)
    (freed,) = [when for when, command in log if isinstance(command, Free)]
    looks = [when for when, command in log if isinstance(command, Look)]
    assert freed == looks[9] and looks[9] - looks[8] <= 0.11 and looks[8] - looks[7] <= PERIOD + 1e-9


def test_freed_rank_that_stays_is_interrupted_once() -> None:
    log = drive({0: [at(0, 1)], 1: [at(1, 0)]}, 1, 10.0)
    assert [command for _, command in log if isinstance(command, (Free, Interrupt))] == [Free((0,)), Interrupt((0,))]
    times = [when for when, command in log if isinstance(command, (Free, Interrupt))]
    assert times[1] - times[0] >= STUBBORN


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(st.builds(at, st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6),
        min_size=2,
        max_size=4,
    ),
    st.data(),
)
def test_checks_are_few_and_free_only_others(standings: list[list[CallState]], data: st.DataObject) -> None:
    failed = data.draw(st.integers(0, len(standings) - 1))
    log = drive(dict(enumerate(standings)), failed, 30.0)
    looks = [when for when, command in log if isinstance(command, Look)]
    assert looks[0] >= COLLECT and len(looks) <= 30 / PERIOD + 40
    assert sum(isinstance(command, Tell) for _, command in log) == 1
    assert all(when >= TELL for when, command in log if isinstance(command, Tell))
    for _, command in log:
        if isinstance(command, (Free, Interrupt)):
            assert failed not in command.positions


def test_failed_rank_of_another_call_counts_only_while_idle() -> None:
    for busy in (True, False):
        machine = FailFast(2, 0.0, [0, 1])
        machine.failed(0)
        failed, waits = at(1, 0)._replace(idle=True, busy=busy), at(0, 1)._replace(busy=True)
        commands = [
            machine.standing(position, each, 1.0) for _ in range(2) for position, each in ((0, failed), (1, waits))
        ]
        assert commands[-1] == ([] if busy else [Free((1,))]) and machine.frees != busy


def test_added_call_is_checked_soon() -> None:
    machine = FailFast(2, 0.0)
    machine.failed(0)
    machine.add(1, 2, 100.0)
    assert machine.due <= 100.0 + COLLECT
    assert machine.tick(200.0)[0] == Look((0, 1, 2, 3))


def test_rank_idle_in_two_checks_has_ended() -> None:
    machine = FailFast(2, 0.0)
    machine.failed(0)
    machine.standing(1, at(1, 0)._replace(idle=True), 1.0)
    assert not machine.over
    machine.standing(1, at(1, 0)._replace(idle=True), 2.0)
    assert machine.over
