"""Errors of endpoints at the caller: the user's lines first, the failed rank, and the results of other ranks."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from typing import Any

import pytest

from monarch._node.remote_errors import pack_failure
from monarch.actor import Actor, current_rank, endpoint
from monarch.exceptions import ActorError, ArgumentError, SerializationError

HERE = os.path.abspath(__file__)


def chain(count: int) -> BaseException:
    """Return an exception that others have caused, one by one."""
    error: BaseException | None = None
    for number in range(count):
        try:
            try:
                if error is not None:
                    raise error
            except ValueError as cause:
                raise ValueError(f"number {number}") from cause
            raise ValueError(f"number {number}")
        except ValueError as caught:
            error = caught
    assert error is not None
    return error


class Odd(Exception):
    """Fails to unpickle: its ``args`` differ from its constructor's arguments."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"code {code} because {why}")
        self.code = code


class Locked(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Fails(Actor):
    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    def plain(self, x: int = 0) -> float:
        return self.deeper(x)

    def deeper(self, x: int) -> float:
        return 1 / x

    @endpoint
    def on(self, *ranks: int) -> int:
        rank = current_rank().rank
        if rank in ranks:
            raise ValueError(f"bad weights on a rank of {len(ranks)}")
        return rank * 10

    @endpoint
    def each_its_own(self) -> None:
        raise ValueError(f"mine is {current_rank().rank}")

    @endpoint
    def odd(self) -> None:
        raise Odd(3, why="of the weather")

    @endpoint
    def locked(self) -> None:
        raise Locked("has a lock")

    @endpoint
    def no_text(self) -> None:
        raise NoText

    @endpoint
    def local_class(self) -> None:
        class Local(Exception):
            pass

        raise Local("made in a function")

    @endpoint
    def chained(self) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise OSError("cannot load") from error

    @endpoint
    def long_chain(self, count: int) -> None:
        raise chain(count)

    @endpoint
    def raises(self, error: BaseException) -> None:
        raise error

    @endpoint
    def recursion(self) -> None:
        def down(n: int) -> int:
            return down(n + 1) + 1

        down(0)

    @endpoint
    def huge(self) -> None:
        raise ValueError("x" * 10_000_000)

    @endpoint
    def lock(self) -> Any:
        return {"weights": threading.Lock()}

    @endpoint
    def not_loaded(self) -> Any:
        return Unloadable()

    @endpoint
    def open_file(self, name: bytes) -> None:
        os.stat(os.fsdecode(name))

    @endpoint
    def raises_in_pickling(self, error: BaseException) -> None:
        raise RaisesInPickling(error)

    @endpoint
    def returns_unpicklable(self, error: BaseException) -> Any:
        return RaisesInPickling(error)

    @endpoint
    def takes(self, x: Any) -> None:
        pass

    @endpoint
    def fine(self) -> int:
        self.calls += 1
        return self.calls

    @endpoint
    async def never(self) -> None: ...


class SyncFails(Fails):
    @endpoint
    def never(self) -> None: ...


class RaisesInPickling(Exception):
    """Raises a given error when it is pickled."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("cannot be pickled")
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class Unloadable:
    """Pickles, but fails to unpickle."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> Any:
    raise RuntimeError("not here")


@pytest.fixture(params=[Fails, SyncFails])
def fails(request: pytest.FixtureRequest, procs: Any) -> Any:
    actors = procs({"hosts": 2, "gpus": 2}).spawn("fails", request.param)
    yield actors
    # Whatever happened, everything else goes on.
    assert actors.fine.call().get(timeout=20)[0] >= 1


def line_of(function: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, line in enumerate(lines) if text in line)


def test_tracebacks_show_only_user_frames(fails: Any) -> None:
    with pytest.raises(ActorError) as caught:
        fails.plain.call().get(timeout=20)
    error = caught.value
    text = str(error)
    line = line_of(Fails.deeper, "1 / x")
    assert "fails.plain() failed on all 4 ranks" in text.splitlines()[0]
    assert f"ZeroDivisionError: division by zero  ({HERE}:{line}, in deeper)" in text.splitlines()[1]
    assert "return self.deeper(x)" in text and "return 1 / x" in text
    assert "runtime/monarch" not in text and "mailbox.py" not in text
    assert isinstance(error.exception, ZeroDivisionError)
    assert error.rank == 0 and dict(error.point) == {"hosts": 0, "gpus": 0}
    assert sorted(error.failures) == [0, 1, 2, 3] and error.results is None


def test_error_names_one_failed_rank_of_many(fails: Any) -> None:
    with pytest.raises(ActorError) as caught:
        fails.on.call(3).get(timeout=20)
    error = caught.value
    head = str(error).splitlines()[0]
    assert "rank 3 (hosts=1, gpus=1)" in head and "ranks 0-2 answered (see err.results)" in head
    assert error.rank == 3 and dict(error.point) == {"hosts": 1, "gpus": 1}
    assert error.results is not None and list(error.results.values()) == [0, 10, 20, None]
    assert error.results["hosts", 1, "gpus", 0] == 20


def test_equal_errors_fold_and_different_ones_do_not(fails: Any) -> None:
    text = str(fails.on.call(0, 1, 3).exception(timeout=20))
    assert text.count("ValueError: bad weights") == 2  # the summary and one traceback
    assert "ranks 0-1, 3" in text.splitlines()[0] or "ranks 0-1,3" in text.splitlines()[0]
    text = str(fails.each_its_own.call().exception(timeout=20))
    assert all(f"mine is {rank}" in text for rank in range(4))
    assert text.count("Traceback") == 1


def test_in_a_slice_ranks_are_those_of_the_slice(fails: Any) -> None:
    error = fails.slice(hosts=1).on.call(1).exception(timeout=20)
    assert error.rank == 1 and dict(error.point) == {"gpus": 1}
    # The text numbers ranks as the mesh does, as output and tables do.
    assert "failed on rank 3; rank 2 answered" in str(error)
    assert list(error.results.values()) == [0, None] and "rank 2 at [0]" in repr(error.results)


def test_unpicklable_exceptions_arrive_as_text(fails: Any) -> None:
    one = fails.slice(hosts=0, gpus=0)
    error = one.odd.call_one().exception(timeout=20)
    assert isinstance(error, ActorError) and "Odd: code 3 because of the weather" in str(error)
    assert f"{HERE}:{line_of(Fails.odd.method, 'raise Odd')}, in odd" in str(error)
    error = one.locked.call_one().exception(timeout=20)
    assert "Locked: has a lock" in str(error) and error.exception is None
    assert "NoText" in str(one.no_text.call_one().exception(timeout=20))
    assert "made in a function" in str(one.local_class.call_one().exception(timeout=20))


def test_causes_are_reported(fails: Any) -> None:
    text = str(fails.slice(hosts=0, gpus=0).chained.call_one().exception(timeout=20))
    assert "OSError: cannot load" in text and "KeyError: 'missing'" in text and "direct cause" in text


def test_long_chain_is_sent_without_its_middle(fails: Any) -> None:
    text = str(fails.slice(hosts=0, gpus=0).long_chain.call_one(5000).exception(timeout=60))
    assert "ValueError: number 0\n" in text and text.endswith("ValueError: number 4999")
    assert "[4900 of the 5000 exceptions of this chain omitted]" in text
    assert text.count("ValueError: number") < 120


def test_exceptions_of_a_long_chain_keep_their_causes() -> None:
    raised = chain(500)
    pack_failure(raised)
    count, error = 1, raised
    while error.__cause__ is not None:
        assert error.__context__ is error.__cause__ and error.__suppress_context__
        count, error = count + 1, error.__cause__
    assert count == 500


@pytest.mark.parametrize("given", [KeyboardInterrupt(), StopIteration(1), MemoryError()])
def test_no_error_ends_a_rank_or_the_caller(fails: Any, given: BaseException) -> None:
    error = fails.raises.call(given).exception(timeout=20)
    assert isinstance(error, ActorError) and type(given).__name__ in str(error)
    assert list(fails.fine.call().get(timeout=20).values()) == [1] * 4


def test_recursion_and_huge_error_text_arrive(fails: Any) -> None:
    error = fails.recursion.call().exception(timeout=30)
    assert "RecursionError" in str(error) and len(str(error)) < 200_000
    error = fails.huge.call().exception(timeout=30)
    assert "ValueError: xxx" in str(error) and len(str(error)) < 1_000_000


def test_unpicklable_arguments_raise(fails: Any) -> None:
    with pytest.raises(
        SerializationError, match=r"fails\.takes\(\) was not sent: args\[0\]\['a'\]\[1\].*lock"
    ) as caught:
        fails.takes.call({"a": [1, threading.Lock()]})
    assert isinstance(caught.value, TypeError)
    with pytest.raises(SerializationError, match="kwargs"):
        fails.takes.broadcast(x=threading.Lock())


def test_arguments_that_fail_to_unpickle_raise(fails: Any) -> None:
    error = fails.takes.call(Unloadable()).exception(timeout=20)
    assert isinstance(error, ActorError) and "not here" in str(error) and "were unpickled" in str(error)
    assert type(error.exception).__name__ in str(error)


def test_unpicklable_results_raise(fails: Any) -> None:
    error = fails.lock.call().exception(timeout=20)
    assert "the result of fails[hosts=0, gpus=0].lock() cannot be sent: " in str(error) and "weights" in str(error)


def test_results_that_fail_to_unpickle_raise(fails: Any) -> None:
    values = fails.not_loaded.call().get(timeout=20)
    assert "not readable" in repr(values)
    with pytest.raises(SerializationError, match="not here"):
        values[0]
    with pytest.raises(SerializationError, match="not here"):
        fails.slice(hosts=0, gpus=0).not_loaded.call_one().get(timeout=20)


def test_error_text_with_undecodable_bytes_is_escaped(fails: Any) -> None:
    error = fails.open_file.call(b"/no/such/caf\xe9").exception(timeout=20)
    assert isinstance(error, ActorError) and "FileNotFoundError" in str(error) and "caf\\udce9" in str(error)


ENDS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseException("base")]


@pytest.mark.parametrize("cls", [Fails, SyncFails])
def test_base_exception_in_pickling_is_answered(cls: type[Fails], procs: Any) -> None:
    mesh = procs(1)
    # The second actor of a process has a thread of its own, which must not end either.
    for actor in [mesh.spawn("first", cls), mesh.spawn("second", cls)]:
        for given in ENDS:
            error = actor.raises_in_pickling.call_one(given).exception(timeout=20)
            assert isinstance(error, ActorError) and "cannot be pickled" in str(error)
            error = actor.returns_unpicklable.call_one(given).exception(timeout=20)
            assert type(given).__name__ in str(error)
        assert actor.fine.call_one().get(timeout=20) == 1


def test_missing_endpoints_raise(fails: Any) -> None:
    with pytest.raises(ArgumentError, match=r"has no endpoint 'plane'; it has .*plain"):
        fails.plane.call()
