"""Adverbs: the receivers of a message, and its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Accumulator, Actor, Channel, ValueMesh, current_rank, endpoint, send
from monarch.exceptions import ActorError, ArgumentError, MonarchError


class Worker(Actor):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def note(self, what: Any) -> int:
        self.seen.append(what)
        return len(self.seen)

    @endpoint
    def all_seen(self) -> list[Any]:
        return self.seen

    @endpoint
    def where(self) -> int:
        return current_rank().rank

    @endpoint
    def fail_on(self, rank: int) -> int:
        if current_rank().rank == rank:
            raise ValueError(f"rank {rank} does not like this")
        return current_rank().rank


@pytest.fixture
def workers(procs: Any) -> Any:
    return procs(4).spawn("workers", Worker)


def test_call_gives_the_values_of_all_in_rank_order(workers: Any) -> None:
    values = workers.where.call().get(timeout=20)
    assert isinstance(values, ValueMesh)
    assert list(values.values()) == [0, 1, 2, 3]
    assert [(point["gpus"], value) for point, value in values] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_call_one_needs_exactly_one_actor(workers: Any) -> None:
    assert workers.slice(gpus=2).where.call_one().get(timeout=20) == 0
    with pytest.raises(ValueError, match="exactly 1 actor, got workers with gpus=4"):
        workers.where.call_one()


def test_choose_picks_each_actor_sometimes(workers: Any) -> None:
    futures = [workers.note.choose(index) for index in range(200)]
    for future in futures:
        future.get(timeout=20)
    counts = [len(seen) for seen in workers.all_seen.call().get(timeout=20).values()]
    assert sum(counts) == 200 and min(counts) > 10


def test_stream_gives_each_answer_as_it_arrives(workers: Any) -> None:
    answers = workers.where.stream()
    assert isinstance(answers, Iterator)
    assert sorted(future.get(timeout=20) for future in answers) == [0, 1, 2, 3]


def test_answers_of_a_stream_fail_separately(workers: Any) -> None:
    errors = [future.exception(timeout=20) for future in workers.fail_on.stream(2)]
    assert sum(error is None for error in errors) == 3
    (error,) = [error for error in errors if error is not None]
    assert isinstance(error, ActorError) and "does not like this" in str(error)


def test_broadcast_returns_at_once_and_reaches_all(workers: Any) -> None:
    assert workers.note.broadcast("a") is None
    assert list(workers.note.call("b").get(timeout=20).values()) == [2] * 4


def test_send_answers_on_a_given_port(workers: Any) -> None:
    port, receiver = Channel.open()
    send(workers.where, (), {}, port)
    assert sorted(receiver.recv().get(timeout=20) for _ in range(4)) == [0, 1, 2, 3]
    send(workers.note, ("x",), None, port, "choose")
    assert receiver.recv().get(timeout=20) == 1
    send(workers.note, ("y",))
    assert sum(workers.note.call("z").get(timeout=20).values()) == 4 * 2 + 1
    with pytest.raises(ValueError, match="'all' or 'choose'"):
        send(workers.where, (), {}, port, "some")
    receiver.close()


def test_errors_go_to_the_port_of_a_send(workers: Any) -> None:
    port, receiver = Channel.open_ranked()
    send(workers.fail_on, (1,), None, port)
    outcomes = Counter(type(receiver.recv().exception(timeout=20)).__name__ for _ in range(4))
    assert outcomes == {"NoneType": 3, "ValueError": 1}
    receiver.close()


def test_ports_of_sends_are_closed_when_all_have_answered(workers: Any) -> None:
    node = workers._node
    workers.where.call().get(timeout=20)
    before = len(node.ports.sinks)
    port, receiver = Channel.open()
    for _ in range(20):
        send(workers.where, (), {}, port)
    for _ in range(80):
        receiver.recv().get(timeout=20)
    receiver.close()
    assert wait_until(lambda: len(node.ports.sinks) <= before, 5)


def test_accumulator_folds_answers(workers: Any) -> None:
    total = Accumulator(workers.where, 100, lambda so_far, rank: so_far + rank)
    assert total.accumulate().get(timeout=20) == 106
    assert total.accumulate().get(timeout=20) == 106
    failing = Accumulator(workers.fail_on, 0, lambda so_far, rank: so_far + rank)
    with pytest.raises(ActorError, match="does not like this"):
        failing.accumulate(3).get(timeout=20)
    broken = Accumulator(workers.where, 0, lambda so_far, rank: so_far / rank)
    with pytest.raises(ZeroDivisionError):
        broken.accumulate().get(timeout=20)


def test_misuse_of_an_endpoint_raises_with_advice(workers: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"workers\.where is an endpoint of a mesh: .*workers\.where\.call\(\.\.\.\)"
    ):
        workers.where()
    with pytest.raises(MonarchError, match="no device mesh is active"):
        workers.where.rref()
    with pytest.raises(AttributeError, match="has no endpoint 'were'; it has all_seen, fail_on, note, where"):
        workers.were
    assert not hasattr(workers, "were")
    assert repr(workers.where) == "<endpoint where of workers>"


def test_unread_call_still_runs(workers: Any) -> None:
    workers.note.call("unread")
    assert list(workers.all_seen.call().get(timeout=20).values()) == [["unread"]] * 4
