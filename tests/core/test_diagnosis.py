"""What the waits of ranks mean."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch._core.diagnosis.facts import COMPUTES, Doing, Entered, Kind, RankFacts, Target, Unended
from monarch._core.diagnosis.findings import Cause, Level, diagnose
from monarch._core.position import Frame
from monarch._core.text.why import describe_diagnosis, describe_finding

ALL = (0, 1, 2, 3)
ALL_LIST = [*ALL]
LINE = Frame("cell [1]", 3, "<module>", "dist.all_reduce(x)")


def inside(operation: str = "all_reduce", number: int = 1, group: str = "0", **more: object) -> Doing:
    tensors = more.pop("tensors", "float32[2]")
    entered = Entered(operation, group, ALL, group == "0", number, tensors=str(tensors), is_alike=True)
    return Doing(Kind.COLLECTIVE, "", (LINE,), 5.0, 0.0, "cells", "", entered._replace(**more))


def doing(kind: Kind, cores: float = 0.0, seconds: float = 5.0) -> Doing:
    return Doing(kind, "", (LINE,), seconds, cores, "cells")


def ranks(*doings: Doing | None, counts: int = 0) -> list[RankFacts]:
    return [
        RankFacts(rank, (each,) if each is not None else (), (("0", counts),), "m") for rank, each in enumerate(doings)
    ]


def only(facts: list[RankFacts]) -> tuple[Level, Cause, list[int], list[int]]:
    (found,) = diagnose(facts).findings
    waiting = sorted(rank for each in found.waiting for rank in each.ranks)
    return found.level, found.cause, waiting, sorted(rank for each in found.missing for rank in each.ranks)


def test_rank_elsewhere_is_missing() -> None:
    found = only(ranks(inside(), inside(), doing(Kind.SLEEP), inside()))
    assert found == (Level.WAITING, Cause.ELSEWHERE, [0, 1, 3], [2])


def test_stop_advises_nothing_about_the_pauses_that_it_has_ended() -> None:
    (found,) = diagnose(ranks(inside(), doing(Kind.PAUSED))).findings
    assert "%mesh resume" in describe_finding(found)
    text = describe_finding(found, label="when stopped")
    assert text.startswith("when stopped: rank 0 waits for rank 1, which is paused") and "resume" not in text


def test_finished_rank_is_certain() -> None:
    assert only(ranks(inside(), inside(), None, inside())) == (Level.STUCK, Cause.IDLE, [0, 1, 3], [2])


def test_finished_rank_with_as_many_may_have_given_other_tensors() -> None:
    facts = ranks(inside(), None, counts=9)
    assert only(facts) == (Level.STUCK, Cause.UNLIKE, [0], [1])
    text = describe_diagnosis(diagnose(facts))
    assert "rank 1 has finished after the same number of operations in the group, so the tensors may differ" in text, (
        text
    )


def test_computing_rank_is_slow() -> None:
    for kind in COMPUTES:
        facts = ranks(inside(), inside(), doing(kind, 1.0), inside())
        assert only(facts) == (Level.SLOW, Cause.BUSY, [0, 1, 3], [2])
    assert describe_diagnosis(diagnose(facts)).startswith("nothing appears to be stuck")


def test_child_process_that_computes_is_slow() -> None:
    assert only(ranks(inside(), doing(Kind.CHILD, 0.9), inside(), inside()))[0] is Level.SLOW
    assert only(ranks(inside(), doing(Kind.CHILD, 0.0), inside(), inside()))[0] is Level.WAITING


def unended(*operations: str) -> tuple[Unended, ...]:
    return tuple(Unended(at, at + 3, each, "float32[2]", True) for at, each in enumerate(operations, 1))


def test_asynchronous_collectives_in_another_order_are_stuck() -> None:
    one, other = unended("all_reduce", "all_gather"), unended("all_gather", "all_reduce")
    facts = ranks(*[inside(number=4, unended=one)] * 3, inside(number=5, unended=other))
    assert only(facts) == (Level.STUCK, Cause.DIFFERENT, ALL_LIST, [])
    text = describe_diagnosis(diagnose(facts))
    assert "rank 3 in all_gather of float32[2] (#4 of the default group)" in text
    assert "ranks 0-2 in all_reduce of float32[2] (#4 of the default group)" in text


def test_asynchronous_collectives_that_match_are_under_way() -> None:
    one, more = unended("all_reduce"), unended("all_reduce", "all_reduce")
    facts = ranks(inside(unended=one), inside(unended=one), inside(unended=more), doing(Kind.SLEEP))
    assert only(facts) == (Level.WAITING, Cause.ELSEWHERE, [0, 1, 2], [3])


def test_lock_of_a_rank_that_waits_for_its_waiters_is_a_cycle() -> None:
    waits = doing(Kind.LOCK)._replace(targets=(Target("m", 0, ""),))
    facts = ranks(inside("barrier", tensors=""), waits, waits, waits)
    assert only(facts) == (Level.STUCK, Cause.CYCLE, ALL_LIST, [])
    assert "release the lock" in describe_diagnosis(diagnose(facts))


def test_different_collectives_are_stuck() -> None:
    found = only(ranks(inside(), inside("barrier"), inside(), inside()))
    assert found == (Level.STUCK, Cause.DIFFERENT, [0, 1, 2, 3], [])
    assert only(ranks(inside(), inside(tensors="float32[3]"), inside(), inside()))[1] is Cause.TENSORS
    assert only(ranks(inside(), inside(reduction="max"), inside(), inside()))[1] is Cause.REDUCTION
    assert only(ranks(inside("broadcast", root=0), inside("broadcast", root=1), *[inside("broadcast", root=0)] * 2))[
        1
    ] is (Cause.ROOT)


def test_same_collective_is_under_way() -> None:
    assert only(ranks(*[inside()] * 4)) == (Level.SLOW, Cause.TOGETHER, [0, 1, 2, 3], [])


def test_groups_in_another_order_are_stuck() -> None:
    assert only(ranks(inside(group="1"), inside(group="2"), inside(group="1"), inside(group="1")))[1] is Cause.GROUPS


def test_root_may_leave_early() -> None:
    """Rank 0 has gathered from rank 1 already, which is in the next collective; both wait for rank 2."""
    facts = [
        RankFacts(0, (inside("gather", 3, root=0),), (("0", 3),), "m"),
        RankFacts(1, (inside("barrier", 4),), (("0", 4),), "m"),
        RankFacts(2, (doing(Kind.SLEEP),), (("0", 2),), "m"),
        RankFacts(3, (inside("barrier", 4),), (("0", 4),), "m"),
    ]
    assert only(facts) == (Level.WAITING, Cause.ELSEWHERE, [0, 1, 3], [2])


def test_root_may_be_in_the_next_collective_of_the_same_name() -> None:
    """Rank 0 has sent what rank 1 still receives by way of rank 2, which imports a module first."""
    facts = [
        RankFacts(0, (inside("broadcast", 4, root=0, tensors="float32[9]"),), (("0", 4),), "m"),
        RankFacts(1, (inside("broadcast", 3, root=0),), (("0", 3),), "m"),
        RankFacts(2, (doing(Kind.SLEEP),), (("0", 2),), "m"),
    ]
    assert only(facts) == (Level.WAITING, Cause.ELSEWHERE, [0, 1], [2])


def test_waits_for_asynchronous_broadcasts_are_no_mismatch() -> None:
    """Rank 1 has received two of the three that all have begun; the waits name no root."""
    names = ("float32[3]", "float32[5]", "float32[7]")
    begun = tuple(Unended(at, at, "broadcast", each, True) for at, each in enumerate(names, 1))
    facts = [
        RankFacts(0, (inside("broadcast", 1, tensors=names[0], unended=begun),), (("0", 3),), "m"),
        RankFacts(1, (inside("broadcast", 3, tensors=names[2], unended=begun[2:]),), (("0", 3),), "m"),
        RankFacts(2, (doing(Kind.SLEEP),), (("0", 0),), "m"),
    ]
    assert only(facts) == (Level.WAITING, Cause.ELSEWHERE, [0, 1], [2])


def test_rank_that_began_it_and_went_on_is_not_missing() -> None:
    """It has begun the collective without waiting for it, so only rank 3 is missing."""
    facts = ranks(inside("", 2, tensors=""), inside("", 2, tensors=""), doing(Kind.SLEEP), doing(Kind.SLEEP), counts=2)
    facts[3] = facts[3]._replace(counts=(("0", 1),))
    assert only(facts) == (Level.WAITING, Cause.ELSEWHERE, [0, 1], [3])


def message(operation: str, peer: int, tag: int = 0) -> Doing:
    return inside(operation, peers=(peer,), is_message=True, tag=tag, is_alike=False)


def test_messages_that_nobody_sends() -> None:
    assert only(ranks(message("recv", 1), message("recv", 0)))[1:3] == (Cause.MESSAGES, [0, 1])
    assert only(ranks(message("send", 1, 7), message("recv", 0, 8)))[1:3] == (Cause.MESSAGES, [0, 1])
    assert only(ranks(message("recv", 1), doing(Kind.QUEUE))) == (Level.WAITING, Cause.ELSEWHERE, [0], [1])
    # A transfer is under way.
    assert not [each for each in diagnose(ranks(message("send", 1), message("recv", 0))).findings if each.missing]


def test_actors_that_wait_for_each_other() -> None:
    def asks(rank: int) -> Doing:
        return Doing(Kind.FUTURE, "", (LINE,), 5.0, 0.0, "a", "a.ask()", None, (Target("m", rank, "a"),))

    assert only(ranks(asks(1), asks(2), asks(0))) == (Level.STUCK, Cause.CYCLE, [0, 1, 2], [])
    assert only(ranks(asks(1), asks(2), doing(Kind.SLEEP))) == (Level.WAITING, Cause.ELSEWHERE, [0, 1], [2])


def test_waits_are_followed_to_their_end() -> None:
    """Ranks 0 and 1 wait for rank 2 in a collective, and rank 2 for an actor on rank 3, which is in a lock."""
    asks = Doing(Kind.FUTURE, "", (LINE,), 5.0, 0.0, "a", "a.ask()", None, (Target("m", 3, "b"),))
    first = inside()
    assert first.entered is not None
    first = first._replace(entered=first.entered._replace(members=(0, 1, 2)))
    found = only(ranks(first, first, asks, doing(Kind.LOCK)))
    assert found == (Level.WAITING, Cause.ELSEWHERE, [0, 1, 2], [3])


anything = st.one_of(
    st.none(),
    st.builds(doing, st.sampled_from(Kind), st.sampled_from([-1.0, 0.0, 1.0])),
    st.builds(
        inside, st.sampled_from(["all_reduce", "barrier", "broadcast", ""]), st.integers(0, 3), st.sampled_from("01")
    ),
    st.builds(message, st.sampled_from(["send", "recv"]), st.integers(0, 4)),
    st.builds(
        lambda rank: Doing(Kind.FUTURE, "", (LINE,), 5.0, 0.0, "a", "a.f()", None, (Target("m", rank, "a"),)),
        st.integers(0, 5),
    ),
)


@given(st.lists(anything, min_size=1, max_size=6))
def test_each_rank_is_told_of(doings: list[Doing | None]) -> None:
    """No rank is left out, whoever waits for whom."""
    diagnosis = diagnose(ranks(*doings))
    told = {rank for each in diagnosis.findings for rank in each.ranks}
    told |= {rank for each in diagnosis.others for rank in each.ranks}
    assert told == set(range(len(doings)))
    assert describe_diagnosis(diagnosis)


@given(st.lists(st.sampled_from([None, *(doing(kind, 1.0) for kind in COMPUTES)]), min_size=1, max_size=6))
def test_ranks_that_compute_raise_no_alarm(doings: list[Doing | None]) -> None:
    """Ranks that compute or are idle, and those that wait for one that computes, are not stuck."""
    assert not diagnose(ranks(*doings)).findings
    busy = [each for each in doings if each is not None]
    found = diagnose(ranks(*busy, *[inside()] * (4 - len(busy)))).findings if 0 < len(busy) < 4 else ()
    assert all(each.level is Level.SLOW for each in found)


@given(st.lists(anything, min_size=2, max_size=6), st.randoms())
def test_order_of_answers_is_irrelevant(doings: list[Doing | None], random: object) -> None:
    facts = ranks(*doings)
    mixed = list(facts)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert diagnose(mixed) == diagnose(facts)


def test_dead_rank_is_told_as_a_sentence() -> None:
    dead = doing(Kind.DEAD)._replace(what="was killed by signal 9 (SIGKILL)", frames=())
    text = describe_diagnosis(diagnose(ranks(inside(), dead, inside(), inside())))
    assert text.splitlines()[0] == "stuck: ranks 0,2-3 wait for rank 1, which was killed by signal 9 (SIGKILL)"


def test_broken_collective_is_stuck_without_blaming_idle_ranks() -> None:
    facts = ranks(None, None, doing(Kind.BROKEN))
    assert only(facts) == (Level.STUCK, Cause.BLOCKED, [2], [])
    told = describe_diagnosis(diagnose(facts))
    assert "stuck: rank 2 is in a collective of a call that ended with the failure of another rank" in told
    assert "%mesh kill" in told and "finished without" not in told


def test_groups_of_the_same_ranks_are_told_apart() -> None:
    first, second = inside(group="7", label="1"), inside(group="9", label="2")
    text = describe_diagnosis(diagnose(ranks(first, second, first, inside(group="8", label="dp"))))
    assert "group 1 of ranks 0-3" in text and "group 2 of ranks 0-3" in text and "the group 'dp' of ranks 0-3" in text


def test_collective_waits_for_the_same_actor_of_a_rank() -> None:
    """Another actor of the missing rank, which waits for one of these, is not what they wait for."""
    other = Doing(Kind.FUTURE, "ring.go()", (LINE,), 5.0, 0.0, "ring", "ring.go", None, (Target("m", 0, "ring"),))
    facts = ranks(inside(), None, inside(), inside())
    facts[0] = facts[0]._replace(doings=(inside(), other))
    facts[1] = RankFacts(1, (doing(Kind.CHILD), other), (("0", 0),), "m")
    found = diagnose(facts).findings[0]
    assert (found.level, found.cause) == (Level.WAITING, Cause.ELSEWHERE)
    assert [each.ranks for each in found.missing] == [(1,)] and found.missing[0].kind is Kind.CHILD


def on_gpu(*counts: int, last: Doing | None = None) -> list[RankFacts]:
    """All ranks but the last one wait for their GPUs, where their last collective has the number of ``counts``."""
    found: list[RankFacts] = []
    for rank, count in enumerate(counts):
        issued = Entered("", "0", ALL, True, count)
        waits = doing(Kind.GPU, cores=1.0)._replace(issued=(issued,))
        of_rank = waits if rank < len(counts) - 1 else last
        found.append(RankFacts(rank, (of_rank,) if of_rank is not None else (), (("0", count),), "m"))
    return found


def test_gpu_in_a_collective_waits_for_the_rank_not_in_it() -> None:
    facts = on_gpu(5, 5, 5, 4)
    assert only(facts) == (Level.STUCK, Cause.IDLE, [0, 1, 2], [3])
    text = describe_diagnosis(diagnose(facts))
    assert text.startswith("stuck: ranks 0-2 wait for rank 3, which finished without calling this collective\n")
    assert "ranks 0-2 waiting for its GPU, which is in a collective (#5 of the default group) for 5s" in text, text
    assert only(on_gpu(5, 5, 5, 4, last=doing(Kind.SLEEP)))[:2] == (Level.WAITING, Cause.ELSEWHERE)


def test_gpu_that_computes_waits_for_no_rank() -> None:
    assert not diagnose(on_gpu(5, 5, 5, 5)).findings
    assert not diagnose(on_gpu(5, 5, 5, 6, last=doing(Kind.PYTHON))).findings


def test_ranks_wait_for_each_other_since_the_last_one_came() -> None:
    (found,) = diagnose(ranks(inside("barrier", 7), inside("gather_object", 8, root=0)._replace(seconds=0.5))).findings
    assert found.level is Level.STUCK and found.seconds == 0.5
    (found,) = diagnose(ranks(inside(), doing(Kind.SLEEP, seconds=1.0))).findings
    assert found.seconds == 5.0
