"""Deaths of ranks and of the controller, with actors of this project and of torchmonarch."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import monarch.actor
from monarch.actor import Actor, current_rank, endpoint, this_host
from systems import base
from systems.survivors import survivors
from systems.training import MODELS, RANKS

_WAIT = 60
_BEFORE = 4.0
"""Seconds of training before the first kill of a rank."""


class Mortal(Actor):
    """A rank that can be killed."""

    @endpoint
    def pid(self) -> int:
        import torch

        torch.ones(2).sum()
        return os.getpid()

    @endpoint
    def hang(self) -> None:
        time.sleep(_WAIT)


class Pending(base.Task):
    def run(self, count: int) -> list[float]:
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        procs = this_host().spawn_procs({"gpus": 4})
        ranks = procs.spawn("ranks", Mortal)
        pids = list(ranks.pid.call().get().values())
        pending = ranks.hang.call()
        # Until each is in it.
        time.sleep(0.3)
        seconds = _until_error(pids[2], pending)
        # Do not wait for hanging processes.
        for pid in pids:
            _kill(pid)
        return seconds


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _until_error(pid: int, pending: Any) -> float:
    def kill() -> None:
        _kill(pid)
        try:
            pending.get(timeout=_WAIT)
        except TimeoutError:
            raise
        except Exception:
            return
        raise ValueError("the call of a killed rank was answered")

    return base.timed(kill)


class Healed(base.Task):
    """Ours replaces the rank; otherwise only a new mesh helps."""

    def __init__(self) -> None:
        self._spawn()

    def _spawn(self) -> None:
        self._procs = this_host().spawn_procs({"gpus": 8})
        self._ranks = self._procs.spawn("ranks", Mortal)
        self._pids = list(self._ranks.pid.call().get().values())

    def run(self, count: int) -> list[float]:
        return [base.timed(self._once) for _ in range(count)]

    def _once(self) -> None:
        _kill(self._pids[5])
        try:
            self._ranks.pid.call().get(timeout=_WAIT)
        except TimeoutError:
            raise
        except Exception:
            # As intended: the death is known now.
            pass
        else:
            raise ValueError("the call of a killed rank was answered")
        try:
            from monarch.actor import heal_mesh
        except ImportError:
            old = self._pids
            self._spawn()
            for pid in old:
                _kill(pid)
            return
        heal_mesh(self._ranks)
        self._pids = list(self._ranks.pid.call().get().values())

    def close(self) -> None:
        try:
            self._procs.stop().get(timeout=_WAIT)
        except Exception:
            pass


class Replica(Actor):
    """A training rank that can be replaced."""

    def __init__(self, model: str) -> None:
        import torch

        torch.set_num_threads(1)
        width, layers, batch = MODELS[model]
        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self._net: Any = torch.nn.Sequential(*parts[:-1])
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(1 + current_rank().rank)
        self._inputs, self._targets = torch.randn(batch, width), torch.randn(batch, width)

    def __getstate__(self) -> dict[str, Any]:
        return {"net": self._net.state_dict(), "optimizer": self._optimizer.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])

    @endpoint
    def prepare(self) -> int:
        from torch.nn.parallel import DistributedDataParallel

        from monarch.distributed import group

        self._model = DistributedDataParallel(self._net, process_group=group())
        return os.getpid()

    @endpoint
    def step(self, dies: int) -> tuple[float, float]:
        """Return the loss, and when a rank that dies in this step began to."""
        import torch

        self._optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self._model(self._inputs), self._targets)
        if dies == current_rank().rank:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        self._optimizer.step()
        return loss.item(), time.monotonic()


class Training(base.Task):
    def __init__(self) -> None:
        self._procs = this_host().spawn_procs({"gpus": RANKS})
        self._ranks = self._procs.spawn("ranks", Replica, "small")
        self._ranks.prepare.call().get()
        # In the middle of a training, not in its first second.
        until = time.monotonic() + _BEFORE
        while time.monotonic() < until:
            self._ranks.step.call(-1).get()

    def run(self, count: int) -> list[float]:
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        from monarch.actor import heal_mesh

        for _ in range(5):
            self._ranks.step.call(-1).get()
        # It dies some hundred microseconds after this.
        begun = time.perf_counter()
        if self._ranks.step.call(1).exception(timeout=_WAIT) is None:
            raise ValueError("the step of a killed rank was good")
        heal_mesh(self._ranks, copy_from="peer")
        self._ranks.prepare.call().get()
        losses = [loss for loss, _ in self._ranks.step.call(-1).get().values()]
        seconds = time.perf_counter() - begun
        if not all(0 < loss < 2 for loss in losses):
            raise ValueError(f"not the step that was to be: {losses}")
        return seconds

    def close(self) -> None:
        self._procs.stop().get(timeout=_WAIT)


_PROGRAM = """
import time
from monarch.actor import Actor, endpoint, this_host
class A(Actor):
    @endpoint
    def echo(self, value): return value
if __name__ == "__main__":
    ranks = this_host().spawn_procs({"gpus": 4}).spawn("a", A)
    ranks.echo.call(1).get()
    print("ready", flush=True)
    time.sleep(600)
"""


class Survivors(base.Task):
    def run(self, count: int) -> list[float]:
        return [float(survivors(sys.executable, _PROGRAM)) for _ in range(count)]


def failures(kind: str) -> base.Task:
    """Return the task of a kind."""
    # With torchmonarch it would end this process, although the error is caught.
    monarch.actor.unhandled_fault_hook = lambda failure: None
    return {"pending": Pending, "healed": Healed, "training": Training, "survivors": Survivors}[kind]()
