"""The handling of deaths, tested without processes: in any order of events, each is dealt with once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from monarch._core.supervision import Begin, Collect, Command, Fail, Judge, Restart, Supervision

RANKS = st.integers(0, 3)


class Deaths(RuleBasedStateMachine):
    """Processes die, are replaced, judged and restarted, also late and twice; the test turns the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.rule = Restart(2, 10.0, 0.5)
        self.mesh = Supervision(self.rule)
        self.now = 0.0
        self.incarnation = 0
        self.truth: dict[int, str] = {}
        """The current process of each rank."""
        self.alive: set[str] = set()
        self.deaths: set[tuple[int, str]] = set()
        """Unexpected deaths that were news."""
        self.ends: Counter[tuple[int, str]] = Counter()
        """How often each came to an end: handled, failed, or replaced."""
        self.judging: dict[int, str] = {}
        self.begun: list[tuple[int, ...]] = []
        self.restarts: list[float] = []
        self.collecting = False
        self.excused: set[tuple[int, str]] = set()
        for rank in range(4):
            self.join(rank)

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Collect):
                assert not self.collecting
                self.collecting = True
            elif isinstance(command, Begin):
                self.restarts.append(self.now)
                recent = [at for at in self.restarts if at > self.now - self.rule.within]
                assert len(recent) <= self.rule.most and command.attempt == len(recent)
                assert command.after == self.rule.backoff * 2 ** (len(recent) - 1)
                self.begun.append(command.ranks)
            elif isinstance(command, Judge):
                for rank in command.ranks:
                    assert self.truth[rank] not in self.alive
                    assert rank not in self.judging
                    self.judging[rank] = self.truth[rank]
            else:
                assert isinstance(command, Fail) and command.ranks
                for rank in command.ranks:
                    # Never for one that has been replaced meanwhile.
                    assert self.truth[rank] not in self.alive and rank not in self.judging
                    self.ends[rank, self.truth[rank]] += 1

    @rule(rank=RANKS)
    def join(self, rank: int) -> None:
        self.incarnation += 1
        if rank in self.truth:
            self.excused.add((rank, self.truth[rank]))
            self.alive.discard(self.truth[rank])
        self.judging.pop(rank, None)
        self.truth[rank] = f"p{self.incarnation}"
        self.alive.add(self.truth[rank])
        self.take(self.mesh.joined(rank, self.truth[rank]))

    @rule(rank=RANKS, expected=st.booleans())
    def die(self, rank: int, expected: bool) -> None:
        name = self.truth[rank]
        if name in self.alive and not expected:
            self.deaths.add((rank, name))
        news = name in self.alive
        self.alive.discard(name)
        commands = self.mesh.died(rank, name, expected)
        assert news or not commands
        self.take(commands)

    @rule(rank=RANKS, number=st.integers(1, 40))
    def late_news(self, rank: int, number: int) -> None:
        """Of a process that no longer exists."""
        if f"p{number}" != self.truth[rank]:
            assert self.mesh.died(rank, f"p{number}", False) == []
            assert self.mesh.judged(rank, f"p{number}", False) == []

    @precondition(lambda self: self.collecting)
    @rule()
    def collect(self) -> None:
        self.collecting = False
        self.take(self.mesh.collect(self.now))

    @precondition(lambda self: self.judging)
    @rule(data=st.data(), handled=st.booleans())
    def judge(self, data: st.DataObject, handled: bool) -> None:
        rank = data.draw(st.sampled_from(sorted(self.judging)))
        name = self.judging.pop(rank)
        if handled:
            self.ends[rank, name] += 1
        self.take(self.mesh.judged(rank, name, handled))
        # A second verdict is ignored.
        assert self.mesh.judged(rank, name, False) == []

    @precondition(lambda self: self.begun)
    @rule()
    def restart_fails(self) -> None:
        self.take(self.mesh.not_restarted(self.begun.pop()))

    @rule(seconds=st.floats(0.1, 8))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def knows_who_lives(self) -> None:
        assert {rank: name for rank, name in self.truth.items() if name in self.alive} == self.mesh.living
        assert not self.mesh.living.keys() & self.mesh.dead.keys()

    @invariant()
    def nothing_is_told_twice(self) -> None:
        assert all(count <= 1 for count in self.ends.values())

    def teardown(self) -> None:
        # Open decisions are completed; then each death has had one.
        if self.collecting:
            self.collect()
        while self.begun:
            self.take(self.mesh.not_restarted(self.begun.pop()))
        while self.judging:
            rank, name = self.judging.popitem()
            self.take(self.mesh.judged(rank, name, False))
        assert not self.mesh.settling
        left = {death for death in self.deaths if death not in self.excused and not self.ends[death]}
        assert not left, left


Deaths.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestDeaths = Deaths.TestCase


def test_simultaneous_deaths_are_one_restart() -> None:
    mesh = Supervision(Restart(1, 60.0, 0.0))
    for rank in range(3):
        assert mesh.joined(rank, f"a{rank}") == []
    assert [mesh.died(rank, f"a{rank}", False) for rank in (2, 0)] == [[Collect()], []]
    assert mesh.collect(0.0) == [Begin((0, 2), 0.0, 1)]
    assert mesh.settling
    for rank in (0, 2):
        mesh.joined(rank, f"b{rank}")
    assert not mesh.settling
    mesh.died(1, "a1", False)
    # Once within a minute, so this one goes to the supervisors; after that it may be restarted.
    assert mesh.collect(59.0) == [Judge((1,))]
    assert mesh.judged(1, "a1", False) == [Fail((1,))]
    mesh.joined(1, "b1")
    mesh.died(1, "b1", False)
    assert mesh.collect(61.0) == [Begin((1,), 0.0, 1)]


def test_back_off_doubles() -> None:
    mesh, after = Supervision(Restart(8, 1e6, 0.5)), list[float]()
    for number in range(8):
        mesh.joined(0, f"a{number}")
        mesh.died(0, f"a{number}", False)
        (command,) = mesh.collect(float(number))
        assert isinstance(command, Begin)
        after.append(command.after)
    assert after == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize("wrong", [{"most": 0}, {"within": 0}, {"backoff": -1}, {"backoff": float("inf")}])
def test_invalid_restart_rule_is_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected most >= 1"):
        Restart(**wrong)  # pyright: ignore[reportArgumentType]
