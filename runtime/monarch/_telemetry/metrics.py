"""User metrics: ``monarch.log_metric("loss", loss)`` in a cell, an actor or the notebook."""

from __future__ import annotations

import operator
import sys
from typing import Any

from monarch._core.kinds import class_of, is_a
from monarch._node.current import current_node, has_node
from monarch._telemetry.logged import LateValue, Logged
from monarch.exceptions import ArgumentError, MonarchError

_LONGEST = 200
"""Characters of a name."""


def log_metric(name: str, value: Any, step: int | None = None) -> None:
    """Log a value of a metric, which views of the mesh show as a chart, with a line for each rank.

    Values are sent in batches, all of them; a call of this takes a few microseconds. A tensor on a GPU is copied
    asynchronously, and nothing waits for it but the end of the call that logs it.

    Args:
        name: the name of the metric, such as ``loss``.
        value: a number, or a tensor with one element.
        step: the step of the value; None for the one after the last.

    Raises:
        ArgumentError: an argument is of a wrong type.
        MonarchError: no mesh is running.
    """
    if not is_a(name, str) or not 0 < len(name) <= _LONGEST:
        raise ArgumentError(
            f'log_metric: expected the name of a metric first, as in log_metric("loss", 0.5), got {name!r}'
        )
    number = value if type(value) is float else _number(name, value)
    if step is not None and type(step) is not int:
        step = _step(name, step)
    _logged(name).add(name, number, step)


def _logged(name: str) -> Logged:
    logged = current_node().part(Logged) if has_node() else None
    if logged is None or not logged.heard():
        raise MonarchError(
            f"log_metric({name!r}): no mesh is running, so nothing shows its metrics; start one with %mesh up in a "
            f"notebook, or with spawn_procs()"
        )
    return logged


def _step(name: str, step: Any) -> int:
    try:
        if not is_a(step, bool):
            return operator.index(step)
    except TypeError:
        pass
    raise ArgumentError(f"log_metric({name!r}): expected an int as step, got {step!r}")


def _number(name: str, value: Any) -> float | LateValue:
    torch: Any = sys.modules.get("torch")
    if torch is not None and is_a(value, torch.Tensor):
        return _of_tensor(name, value)
    if not is_a(value, str, bytes) and hasattr(class_of(value), "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    shape = getattr(value, "shape", None)
    kind = class_of(value).__name__ if shape is None else f"{class_of(value).__name__} of shape {tuple(shape)}"
    raise ArgumentError(f"log_metric({name!r}): expected a number or a tensor with one element, got {kind}")


def _of_tensor(name: str, value: Any) -> float | LateValue:
    if value.numel() != 1:
        raise ArgumentError(
            f"log_metric({name!r}): expected a number or a tensor with one element, got a tensor of shape "
            f"{tuple(value.shape)}; log its mean: value.mean()"
        )
    if value.is_complex():
        raise ArgumentError(f"log_metric({name!r}): expected a real number, got a complex tensor; log value.abs()")
    value = value.detach()
    return _FromGpu(value) if value.is_cuda else float(value)


class _FromGpu:
    """A copy of a tensor on a GPU that is under way: the program may overwrite the tensor meanwhile."""

    __slots__ = ("_copied", "_host")

    def __init__(self, value: Any) -> None:
        torch: Any = sys.modules["torch"]
        self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._host.copy_(value.reshape(()), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(value.device))

    def is_there(self) -> bool:
        """Return whether the copy is complete."""
        return self._copied.query()

    def read(self) -> float:
        """Return the value; only of a complete copy."""
        return float(self._host)
