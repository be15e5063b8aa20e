"""New ranks of a healed mesh get the state of a replica."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from meshes import kill, values
from monarch._state.handoff.receiver import still_given
from monarch.actor import Actor, current_rank, endpoint, heal_mesh
from monarch.exceptions import ActorError, ArgumentError, SupervisionError

pytestmark = pytest.mark.slow


class Plain(Actor):
    """An actor without hooks for its state."""

    def __init__(self) -> None:
        self.value = 0

    @endpoint
    def add(self) -> int:
        self.value += 1
        return self.value


class Replica(Actor):
    def __init__(self) -> None:
        import torch

        self.model = {"w": torch.zeros(1000, 3), "step": torch.tensor(0)}

    @endpoint
    def step(self) -> int:
        for each in self.model.values():
            each += 1
        return int(self.model["step"])

    def weights(self) -> Any:
        return self.model

    @endpoint
    def who(self) -> tuple[int, int]:
        return current_rank().rank, os.getpid()

    @endpoint
    def total(self) -> float:
        return self.model["w"].sum().item()


def test_replicas_get_tensors_of_a_living_rank(procs: Callable[..., Any]) -> None:
    mesh = procs(4)
    replicas = mesh.slice(gpus=slice(1, 4)).spawn("replicas", Replica)
    for _ in range(3):
        replicas.step.call().get(20)
    kill(replicas, 0, 2)
    heal_mesh(replicas, copy="weights")
    assert values(replicas.total.call()) == [9000.0] * 3 and values(replicas.step.call()) == [4] * 3
    with pytest.raises(ArgumentError, match=r"copy: expected the name of a method of .*, got 'missing'"):
        heal_mesh(replicas, copy="missing")
    with pytest.raises(ArgumentError, match="copy: expected the name of a method"):
        heal_mesh(mesh, copy="weights")
    kill(replicas, 0, 1, 2)
    with pytest.raises(SupervisionError, match="none of its actors survived"):
        heal_mesh(replicas, copy="weights")
    assert values(replicas.step.call()) == [1] * 3


class Hooked(Actor):
    """A replica with its own hooks for the state of another one."""

    def __init__(self, size: int = 100_000) -> None:
        import torch

        self.weights = torch.zeros(size)
        self.views = [self.weights[:10], self.weights[10:20]]
        self.log: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"weights": self.weights, "views": self.views, "log": self.log}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @endpoint
    def step(self) -> float:
        self.weights += 1
        self.log.append(f"step {len(self.log)}")
        return self.weights.sum().item()

    @endpoint
    def who(self) -> tuple[int, int]:
        return current_rank().rank, os.getpid()

    @endpoint
    def what(self) -> tuple[float, int, float]:
        # What shared memory there shares it here.
        self.views[0].fill_(7)
        return self.weights.sum().item(), len(self.log), self.weights[0].item()


class AsyncHooked(Actor):
    def __init__(self) -> None:
        self.value = 0

    async def __getstate__(self) -> int:
        return self.value

    async def __setstate__(self, state: int) -> None:
        self.value = state

    @endpoint
    async def set(self, value: int) -> int:
        self.value = value or self.value
        return self.value


class Refuses(Hooked):
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ValueError("not this one")


def open_states(mesh: Any) -> list[int]:
    from monarch._meshes.actors.ask import ask

    return list(ask(mesh, still_given).get(20).values())


def test_replicas_by_their_own_hooks(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    hooked, others, plain = mesh.spawn("hooked", Hooked), mesh.spawn("others", AsyncHooked), mesh.spawn("p", Plain)
    values(others.set.call(5))
    for _ in range(2):
        values(hooked.step.call())
    kill(hooked, 0, 2)
    heal_mesh(mesh, copy_from="peer")
    assert values(hooked.what.call()) == [(200_050.0, 2, 7.0)] * 3
    assert values(others.set.call(0)) == [5] * 3 and values(plain.add.call()) == [1, 1, 1]
    assert open_states(hooked) == [0, 0, 0]
    # From one in particular.
    hooked.slice(gpus=1).step.call_one().get(20)
    kill(hooked, 0)
    heal_mesh(hooked, copy_from=1)
    assert [log for _, log, _ in values(hooked.what.call())] == [3, 3, 2]


class ByDicts(Actor):
    """A replica with the methods of a torch module."""

    def __init__(self) -> None:
        self.steps = 0

    @endpoint
    def step(self) -> int:
        self.steps += 1
        return self.steps

    @endpoint
    def who(self) -> tuple[int, int]:
        return current_rank().rank, os.getpid()

    @endpoint
    async def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def test_replicas_by_the_methods_of_a_module(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    replicas = mesh.spawn("replicas", ByDicts)
    assert values(replicas.step.call()) == [1, 1]
    kill(replicas, 1)
    heal_mesh(replicas, copy_from="peer")
    assert values(replicas.step.call()) == [2, 2]


def test_invalid_state_copies_are_refused(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    plain = mesh.spawn("plain", Plain)
    for wrong in (2, -1, True, "other"):
        with pytest.raises(ArgumentError, match=r'copy_from: expected "peer" or a rank from 0 to 1'):
            heal_mesh(plain, copy_from=wrong)
    with pytest.raises(ArgumentError, match="the state of a replica: state_dict and load_state_dict, or __"):
        heal_mesh(plain, copy_from="peer")
    refuses = mesh.spawn("refuses", Refuses)
    kill(refuses, 1)
    with pytest.raises(ActorError, match="not this one"):
        heal_mesh(refuses, copy_from="peer")
    assert open_states(refuses) == [0, 0]
    kill(refuses, 1)
    with pytest.raises(SupervisionError, match="rank 1 did not survive"):
        heal_mesh(refuses, copy_from=1)
    assert [rank for rank, _ in values(refuses.who.call())] == [0, 1]
