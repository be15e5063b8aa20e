"""Waits in callbacks, services, unpickling and finalizers end, and break no later wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._meshes.actors.ask import ask
from monarch._node.current import current_node
from monarch._node.liveness import here
from monarch._node.replies import outcome as outcome_module
from monarch._node.services.registry import declared
from monarch._notebook.reload import forget, reload_here
from monarch._notebook.reporting.busy import thread_state
from monarch._notebook.who.complete import complete_here
from monarch._state.handoff.receiver import pack
from monarch.actor import Actor, endpoint
from monarch.exceptions import ActorError, CallTimeoutError, DeadlockError

GUARD = 20.0
"""Seconds after which something counts as hanging."""

held: dict[str, Any] = {}
"""What code that runs in unpickling finds, by name."""


@pytest.fixture(autouse=True)
def switching(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the shortest switch interval, except in variants of tests without a timeout."""
    usual = sys.getswitchinterval()
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("timeout", 0) is not None:
        sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)
    held.clear()


timeouts = pytest.mark.parametrize("timeout", [None, GUARD], ids=["no timeout", "timeout"])


class Answers(Actor):
    """Answers, and creates objects whose code runs at the receiver."""

    @endpoint
    def one(self) -> int:
        return 1

    @endpoint
    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return 1

    @endpoint
    def make(self, cls: type, *args: Any) -> Any:
        return cls(*args)

    @endpoint
    def keep(self, name: str, value: Any) -> None:
        sys.modules["__main__"].__dict__[name] = value

    @endpoint
    def add_module(self, name: str) -> None:
        sys.modules[name] = types.ModuleType(name)


class Runs:
    """Unpickles to the result of a function of ``held``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return run_held, (self.name,)


class Restores:
    """Does the same by ``__setstate__``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getstate__(self) -> str:
        return self.name

    def __setstate__(self, name: str) -> None:
        self.value = run_held(name)


class Lists:
    """Calls an actor to list its attributes."""

    def __init__(self, other: Any, timeout: float | None) -> None:
        self.other, self.timeout = other, timeout

    def __dir__(self) -> list[str]:
        return [f"attribute_{self.other.one.call_one().get(timeout=self.timeout)}"]


class Blocks:
    """Lists its attributes when a file exists."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __dir__(self) -> list[str]:
        assert wait_until(lambda: Path(self.path).exists())
        return ["there"]


class Waits:
    """Waits in its finalizer."""

    def __init__(self, work: Callable[[], Any], outcomes: list[Any]) -> None:
        self.work, self.outcomes = work, outcomes

    def __del__(self) -> None:
        self.outcomes.append((threading.current_thread().name, outcome(self.work)))


def run_held(name: str) -> Any:
    return held[name]()


def outcome(work: Callable[[], Any]) -> Any:
    """Return the result of a function, or the error that it raises."""
    try:
        return work()
    except BaseException as error:
        return error


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start a function in a thread; return a function that waits for its outcome."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(outcome(work)), daemon=True)
    thread.start()

    def end() -> Any:
        thread.join(GUARD)
        assert found, "hangs"
        return found[0]

    return end


@pytest.fixture
def actors(procs: Any) -> Iterator[Any]:
    mesh = procs(2).spawn("answers", Answers)
    yield mesh
    # Whatever a test has done, a wait ends and keeps to its time.
    assert list(mesh.one.call().get(timeout=GUARD).values()) == [1, 1]


@pytest.fixture
def first(actors: Any) -> Any:
    return actors.slice(gpus=0)


# Callbacks


def test_answers_count_that_came_while_the_program_stood_still(actors: Any) -> None:
    """As after a suspension: the timeout is over when the program runs again, and the answers have come in time."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # It holds the GIL.
        held_still = pool.submit(lambda: (time.sleep(0.2), ctypes.PyDLL(None).usleep(2_000_000)))
        assert list(actors.sleep.call(0.7).get(timeout=1.2).values()) == [1, 1]
        held_still.result()


@timeouts
def test_callback_may_wait_when_no_thread_does(first: Any, timeout: float | None) -> None:
    outcomes: list[Any] = []
    first.one.call_one().add_done_callback(
        lambda _: outcomes.append(outcome(lambda: first.one.call_one().get(timeout=timeout)))
    )
    assert wait_until(lambda: outcomes == [1])


@timeouts
def test_callback_may_wait_while_a_thread_receives(first: Any, timeout: float | None) -> None:
    outcomes: list[Any] = []
    future = first.one.call_one()
    future.add_done_callback(lambda _: outcomes.append(outcome(lambda: first.one.call_one().get(timeout=timeout))))
    assert future.get(timeout=GUARD) == 1
    assert wait_until(lambda: outcomes == [1])


def test_raising_callback_is_reported_and_others_run(first: Any, capfd: pytest.CaptureFixture[str]) -> None:
    order: list[int] = []

    def bad(_: Any) -> None:
        raise ValueError("on purpose")

    future = first.one.call_one()
    future.add_done_callback(lambda _: order.append(1))
    future.add_done_callback(bad)
    future.add_done_callback(lambda _: order.append(2))
    assert wait_until(lambda: order == [1, 2])
    said = capfd.readouterr().err
    assert "exception in done callback " in said and ".bad of" in said and "ValueError: on purpose" in said


def test_callbacks_run_in_the_order_of_the_answers(first: Any) -> None:
    order: list[int] = []
    futures = [first.one.call_one() for _ in range(200)]
    for number, future in enumerate(futures):
        future._when_done(lambda future, number=number: future.add_done_callback(lambda _: order.append(number)))
    assert wait_until(lambda: len(order) == 200)
    assert order == list(range(200))


# Services


@timeouts
def test_reloaded_module_may_wait(actors: Any, first: Any, timeout: float | None) -> None:
    first.keep.call_one("other", actors.slice(gpus=1)).get(timeout=GUARD)
    first.add_module.call_one("module_that_waits").get(timeout=GUARD)
    source = f"import __main__\nx = __main__.other.one.call_one().get(timeout={timeout})\n"
    reloaded = ask(first, reload_here, 1, "module_that_waits", "module_that_waits.py", source)
    assert reloaded.get(timeout=GUARD) == {0: True}


@timeouts
def test_completion_may_wait_in_dir(actors: Any, first: Any, timeout: float | None) -> None:
    first.keep.call_one("thing", Lists(actors.slice(gpus=1), timeout)).get(timeout=GUARD)
    found = ask(first, complete_here, "thing.", "")
    assert found.get(timeout=GUARD) == {0: ["thing.attribute_1"]}


def test_blocking_service_delays_no_other(first: Any, tmp_path: Path) -> None:
    first.keep.call_one("thing", Blocks(str(tmp_path / "there"))).get(timeout=GUARD)
    found = ask(first, complete_here, "thing.", "")
    assert ask(first, here).get(timeout=GUARD) == {0: None}
    assert ask(first, thread_state, first._key, first._node.proc, 0, "cell", True).get(GUARD) == {0: None}
    assert first.one.call_one().get(timeout=GUARD) == 1
    assert not found.done
    (tmp_path / "there").touch()
    assert found.get(timeout=GUARD) == {0: ["thing.there"]}


def test_services_of_a_module_run_in_order(first: Any) -> None:
    first.add_module.call_one("module_in_order").get(timeout=GUARD)
    answers = []
    for number in range(1, 20):
        source = f"x = {number}\n"
        answers.append(ask(first, reload_here, number, "module_in_order", "module_in_order.py", source))
        answers.append(ask(first, forget, number))
    for answer in answers:
        answer.get(timeout=GUARD)
    source = "import sys\nassert sys.modules['module_in_order'].x == 19"
    assert ask(first, reload_here, 20, "module_in_order", "m.py", source).get(timeout=GUARD)


@pytest.mark.parametrize("name", ["groups.none", "none.at_all", "os.system", "monarch._notebook.reload:forget"])
def test_undeclared_service_is_refused(first: Any, name: str) -> None:
    @declared(name)
    def service(value: str) -> None: ...

    with pytest.raises((ActorError, ValueError), match="is not a service"):
        ask(first, service, "x").get(timeout=GUARD)


def test_actor_service_is_refused_outside_an_actor(first: Any) -> None:
    with pytest.raises((ActorError, ValueError), match="runs only in an actor"):
        ask(first, pack, None, "token", "handoff.state_of", ()).get(timeout=GUARD)


# Unpickling


@timeouts
@pytest.mark.parametrize("kind", [Runs, Restores])
def test_unpickling_may_wait(first: Any, kind: type, timeout: float | None) -> None:
    second = first.one.call_one()
    held["reads"] = lambda: second.get(timeout=timeout)
    value = first.make.call_one(kind, "reads").get(timeout=GUARD)
    assert getattr(value, "value", value) == 1


@timeouts
def test_unpickling_that_reads_its_own_result_is_an_error(first: Any, timeout: float | None) -> None:
    future = first.make.call_one(Runs, "reads")
    held["reads"] = lambda: outcome(lambda: future.get(timeout=timeout))
    found = future.get(timeout=GUARD)
    assert isinstance(found, DeadlockError) and "is read while this thread unpickles it" in str(found)


def test_import_that_reads_a_result_does_not_deadlock(
    first: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, reads = threading.Event(), threading.Event()
    held["second"] = first.one.call_one()
    held["wait"] = lambda: begun.set() or reads.wait(GUARD)
    held["import"] = lambda: reads.set() or __import__("module_that_reads").value
    name = __name__
    (tmp_path / "module_that_reads.py").write_text(
        f"import sys\nheld = sys.modules[{name!r}].held\nheld['wait']()\nvalue = held['second'].get(timeout=10)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    future = first.make.call_one(Runs, "import")
    assert wait_until(lambda: future.done and held["second"].done)
    imports = in_thread(lambda: __import__("module_that_reads").value)
    assert begun.wait(GUARD)
    try:
        assert in_thread(lambda: future.get(timeout=GUARD))() == 1
        assert imports() == 1
    finally:
        sys.modules.pop("module_that_reads", None)


def test_read_keeps_its_timeout_during_an_unpickling(first: Any) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    held["waits"] = lambda: begun.set() or (goes_on.wait(GUARD) and 5)
    future = first.make.call_one(Runs, "waits")
    reads = in_thread(lambda: future.get(timeout=GUARD))
    assert begun.wait(GUARD)
    for _ in range(2):
        with pytest.raises(CallTimeoutError, match="another thread has not finished unpickling"):
            future.get(timeout=0.02)
    with pytest.raises(CallTimeoutError):
        future.exception(timeout=0.02)
    # Other results are read meanwhile.
    assert first.one.call_one().get(timeout=GUARD) == 1
    late = in_thread(lambda: future.get(timeout=GUARD))
    goes_on.set()
    assert reads() == late() == 5


def test_event_loop_runs_while_another_thread_unpickles(first: Any) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    held["waits"] = lambda: begun.set() or (goes_on.wait(GUARD) and 5)
    future = first.make.call_one(Runs, "waits")
    reads = in_thread(lambda: future.get(timeout=GUARD))
    assert begun.wait(GUARD)

    async def main() -> int:
        awaits = asyncio.ensure_future(future.as_asyncio())
        assert await first.one.call_one() == 1
        assert not awaits.done()
        goes_on.set()
        return await awaits

    assert asyncio.run(asyncio.wait_for(main(), GUARD)) == 5 == reads()


def test_interrupt_of_unpickling_is_not_the_outcome(first: Any) -> None:
    def interrupted() -> int:
        held["waits"] = lambda: 7
        raise KeyboardInterrupt

    held["waits"] = interrupted
    future = first.make.call_one(Runs, "waits")
    with pytest.raises(KeyboardInterrupt):
        future.get(timeout=GUARD)
    assert future.get(timeout=GUARD) == 7


def test_interrupt_while_an_error_is_read_is_not_the_outcome(first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it may run code of its class, and looks for the source."""
    read = outcome_module.group

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(outcome_module, "group", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(outcome_module, "group", interrupted)
    future = first.make.call(int, "missing")
    with pytest.raises(KeyboardInterrupt):
        future.get(timeout=GUARD)
    with pytest.raises(ActorError, match="missing"):
        future.get(timeout=GUARD)


# Finalizers


@timeouts
def test_wait_in_a_finalizer_in_the_receiving_thread_is_an_error(first: Any, timeout: float | None) -> None:
    outcomes: list[Any] = []
    thing = Waits(lambda: first.one.call_one().get(timeout=timeout), outcomes)
    # The thread that receives lets go of it last.
    current_node().receive_loop.call_later(0.05, partial(id, thing))  # pyright: ignore[reportArgumentType]
    del thing
    assert wait_until(lambda: len(outcomes) == 1)
    thread, error = outcomes[0]
    assert thread == "monarch-receive"
    assert isinstance(error, DeadlockError) and ".one(): nothing would arrive. Wait in another" in str(error)
