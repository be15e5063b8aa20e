"""Ends of actors: errors that are no ``Exception``, and ends that an actor asks for itself."""

from __future__ import annotations

import os
import signal
import sys
from threading import Event
from typing import Any

import pytest

import monarch.actor
from leaks import wait_until
from monarch.actor import (
    Actor,
    ActorError,
    ActorMesh,
    MeshFailure,
    SupervisionError,
    context,
    endpoint,
    this_host,
    this_proc,
)
from monarch.exceptions import CallTimeoutError, MonarchError, SerializationError, StoppedError


class Hook:
    """A fault hook that can be waited for."""

    def __init__(self) -> None:
        self.told: list[MeshFailure] = []
        self.came = Event()

    def __call__(self, failure: MeshFailure) -> None:
        self.told.append(failure)
        self.came.set()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    made = Hook()
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", made)
    return made


class Ends(Actor):
    def __init__(self, path: str = "") -> None:
        self.path = path

    @endpoint
    def fine(self) -> int:
        return 1

    @endpoint
    def leave(self, how: str) -> None:
        if how == "exit":
            sys.exit(3)
        raise {"base": BaseException("base"), "generator": GeneratorExit()}[how]

    @endpoint
    def end_for_no_reason(self, how: str) -> None:
        getattr(context().actor_instance, how)(None)

    @endpoint
    def end_itself(self, how: str) -> str:
        getattr(context().actor_instance, how)("had enough")
        return "answered"

    @endpoint
    def creators(self) -> tuple[str, str, str]:
        instance = context().actor_instance
        return repr(instance), repr(instance.creator), instance.creator.name if instance.creator else ""

    @endpoint
    def child(self) -> tuple[str, str, str]:
        return this_proc().spawn("child", Ends).creators.call_one().get()

    @endpoint
    def takes(self, value: Any) -> None:
        pass

    def __cleanup__(self, exc: Exception | None) -> None:
        if self.path:
            with open(self.path, "w") as file:
                file.write(repr(exc))


class AsyncEnds(Ends):
    @endpoint
    async def leave(self, how: str) -> None:  # type: ignore[override]
        if how == "exit":
            sys.exit(3)
        raise {"base": BaseException("base"), "generator": GeneratorExit()}[how]


class Broken:
    def __setstate__(self, state: Any) -> None:
        raise LookupError("no such state")

    def __getstate__(self) -> Any:
        return {"a": 1}


@pytest.mark.parametrize("cls", [Ends, AsyncEnds])
@pytest.mark.parametrize(("how", "kind"), [("exit", "SystemExit: 3"), ("base", "base"), ("generator", "GeneratorExit")])
def test_base_exceptions_end_the_actor_and_are_supervised(
    procs: Any, hook: Hook, cls: type[Ends], how: str, kind: str
) -> None:
    mesh = procs({"gpus": 2})
    actors, others = mesh.spawn("ends", cls), mesh.spawn("others", Ends)
    with pytest.raises(SupervisionError, match=kind) as caught:
        actors.slice(gpus=1).leave.call_one(how).get(timeout=20)
    assert not isinstance(caught.value, StoppedError) and "ended the actor" in str(caught.value)
    assert hook.came.wait(20) and hook.told[0].mesh_name == "ends" and hook.told[0].ranks == (1,)
    with pytest.raises(SupervisionError, match="already failed"):
        actors.slice(gpus=1).fine.call_one().get(timeout=20)
    assert actors.slice(gpus=0).fine.call_one().get(timeout=20) == 1
    assert others.fine.call().get(timeout=20).values() == [1, 1]


def test_cleanup_gets_the_error_of_a_failed_actor(procs: Any, hook: Hook, tmp_path: Any) -> None:
    mesh = procs({"gpus": 1})
    failed = mesh.spawn("failed", Ends, str(tmp_path / "failed"))
    stopped = mesh.spawn("stopped", Ends, str(tmp_path / "stopped"))
    assert isinstance(failed.leave.call_one("exit").exception(timeout=20), SupervisionError)
    failed.stop().get(timeout=20)
    stopped.stop().get(timeout=20)
    assert "SystemExit: 3" in (tmp_path / "failed").read_text()
    assert (tmp_path / "stopped").read_text() == "None"


def test_an_actor_stops_itself_with_its_cleanup(procs: Any, hook: Hook, tmp_path: Any) -> None:
    actor = procs({"gpus": 1}).spawn("ends", Ends, str(tmp_path / "cleaned"))
    assert actor.end_itself.call_one("stop").get(timeout=20) == "answered"
    with pytest.raises(StoppedError, match="had enough"):
        actor.fine.call_one().get(timeout=20)
    actor.stop().get(timeout=20)
    assert (tmp_path / "cleaned").read_text() == "None"
    assert not any("had enough" in str(failure) for failure in hook.told)


@pytest.mark.parametrize("how", ["abort", "kill"])
def test_an_actor_fails_itself_and_its_owner_is_told(procs: Any, hook: Hook, how: str) -> None:
    actor = procs({"gpus": 1}).spawn("ends", Ends)
    assert actor.end_itself.call_one(how).get(timeout=20) == "answered"
    # Failures of actors of earlier tests may come late.
    assert wait_until(lambda: any("had enough" in str(failure) for failure in hook.told))
    with pytest.raises(SupervisionError, match="had enough"):
        actor.fine.call_one().get(timeout=20)


def test_reason_of_an_end_may_be_none(procs: Any, hook: Hook) -> None:
    mesh = procs({"gpus": 1})
    for how, reason in (("abort", "no reason given"), ("stop", "stopped by itself")):
        actor = mesh.spawn("ends", Ends)
        actor.end_for_no_reason.call_one(how).get(timeout=20)
        with pytest.raises(SupervisionError, match=reason):
            actor.fine.call_one().get(timeout=20)


def test_the_program_cannot_stop_itself_as_an_actor() -> None:
    with pytest.raises(MonarchError, match="the program is not an actor"):
        context().actor_instance.stop("x")


def test_creators_are_named_up_to_the_program(procs: Any) -> None:
    actor = procs({"gpus": 2}).spawn("top", Ends).slice(gpus=1)
    name = f"{Ends.__module__}.Ends"
    top = f"<root>.<{name} top{{'gpus': 1/2}}>"
    assert actor.creators.call_one().get(timeout=20) == (top, "<root>", "root")
    assert actor.child.call_one().get(timeout=20) == (f"{top}.<{name} child>", top, "top")
    assert repr(context().actor_instance) == "<root>" and context().actor_instance.creator is None


def test_arguments_that_fail_to_unpickle_are_actor_errors(procs: Any) -> None:
    actors = procs({"gpus": 2}).spawn("ends", Ends)
    with pytest.raises(ActorError, match="no such state") as caught:
        actors.takes.call(Broken()).get(timeout=20)
    assert isinstance(caught.value.exception, LookupError) and not isinstance(caught.value, SerializationError)
    assert "all 2 ranks" in str(caught.value) and actors.fine.call().get(timeout=20).values() == [1, 1]


class Owner(Actor):
    def __init__(self) -> None:
        self.told: list[MeshFailure] = []
        self.came = Event()
        self.nested = monarch.actor.this_host().spawn_procs(per_host={"gpus": 1}).spawn("nested", Pid)

    @endpoint
    def inner(self) -> Any:
        return self.nested

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def kill_nested(self) -> list[str]:
        os.kill(self.nested.pid.call_one().get(timeout=20), signal.SIGKILL)
        return []

    @endpoint
    def reports(self) -> list[str]:
        return [str(failure) for failure in self.told]

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append(failure)
        return True


class Pid(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_supervise_names_the_actors_that_died_with_a_process(procs: Any) -> None:
    from leaks import wait_until

    owner = procs({"gpus": 1}).spawn("owner", Owner)
    owner.kill_nested.call_one().get(timeout=30)
    assert wait_until(lambda: owner.reports.call_one().get(timeout=20))
    (report,) = owner.reports.call_one().get(timeout=20)
    assert "its actors: nested" in report and "MeshFailure" in report and "crashed_ranks=[0]" in report


@pytest.mark.parametrize("victim", ["the owner", "a rank"])
def test_advice_for_a_mesh_of_an_actor_works(procs: Any, victim: str) -> None:
    outer = procs({"gpus": 1})
    owner = outer.spawn("owner", Owner)
    nested = owner.inner.call_one().get(timeout=60)
    nested.pid.call_one().get(timeout=60)
    of = owner if victim == "the owner" else nested
    os.kill(of.pid.call_one().get(timeout=60), signal.SIGKILL)
    with pytest.raises(SupervisionError) as caught:
        while True:
            nested.pid.call().get(timeout=60)
    assert "heal_mesh replaces" not in str(caught.value)
    if victim == "a rank":
        assert str(caught.value).endswith(
            "only the program or actor that spawned nested can replace its ranks, with heal_mesh"
        )
    else:
        assert f"because its owner, rank 0 of {outer.name}, was killed by signal 9" in str(caught.value)
        assert str(caught.value).endswith("spawn nested again to continue")


def test_actor_mesh_is_generic_at_run_time() -> None:
    assert ActorMesh[Ends].__origin__ is ActorMesh  # type: ignore[attr-defined]


def test_wait_for_an_end_that_is_too_short_names_the_ranks() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    procs.spawn("ends", Ends).fine.call().get(timeout=60)
    ended = procs.stop()
    with pytest.raises(CallTimeoutError, match=r"ranks? [01-]+ ha(s|ve) not exited"):
        ended.get(timeout=0)
    ended.get(timeout=60)
