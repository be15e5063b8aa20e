"""Tensors of this rank for its other actors: arguments of endpoints, in order with the ops of the mesh."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from monarch._engine.issuing.failures import OpFailure, error_of
from monarch._engine.rank.operations.table import OPERATIONS
from monarch._node.current import current_node
from monarch.exceptions import ArgumentError, TensorError

_KEPT_S = 600.0
"""Seconds after which an argument is forgotten that no actor of this rank has taken, and to wait for one."""
_TURN_S = 1.0


class _Lent:
    """Values for actors of this process, by number. The executor puts, threads of actors take."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[int, tuple[torch.Tensor, float]] = {}
        """With the time. Lock: ``_changed``."""
        self._halted = False
        """Whether the executor waits for the program. Lock: ``_changed``."""
        self.failed: dict[int, OpFailure] = {}
        """The failures of the executor, which alone writes it."""

    def put(self, number: int, value: torch.Tensor) -> None:
        """Keep a value, and drop those that no call has taken."""
        now = time.monotonic()
        with self._changed:
            for each in [each for each, (_, since) in self._values.items() if now - since > _KEPT_S]:
                del self._values[each]
            self._values[number] = value, now
            self._changed.notify_all()

    def halt(self, halted: bool) -> None:
        """Note whether the executor has halted."""
        with self._changed:
            self._halted = halted
            self._changed.notify_all()

    def take(self, number: int) -> torch.Tensor:
        """Return a value, and forget it; waits for the executor."""
        deadline = time.monotonic() + _KEPT_S
        with self._changed:
            while number not in self._values:
                failure = self.failed.get(number)
                if failure is not None:
                    raise error_of(failure, "its mesh")
                if self._halted:
                    raise TensorError(
                        "an argument has no value, because an op has failed on some ranks; call "
                        "monarch.inspect(tensor) to see what failed, then call this again"
                    )
                if time.monotonic() > deadline:
                    raise TensorError(f"the ops of this rank did not produce an argument within {_KEPT_S:.0f} s")
                self._changed.wait(_TURN_S)
            return self._values.pop(number)[0]


lent = _Lent()
"""Of this process."""


def received(number: int, uid: str, name: str) -> torch.Tensor:
    """Return the tensor that this rank has, for an endpoint."""
    config = current_node().config
    if config is None or config.procs.uid != uid:
        raise ArgumentError(
            f"cannot pass a rank-local tensor of {name} to an actor on another mesh; move it first with "
            f"tensor.to_mesh(mesh)"
        )
    return lent.take(number)


def _lend(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> list[Any]:
    # A copy: later ops may change the tensor before the actor runs.
    lent.put(values[0], args[0].clone())
    return [None]


OPERATIONS["lend"] = _lend
