"""The device of a distributed tensor: to the program always the CPU, whatever the ranks compute on (decision 0097).

So a program without a GPU controls ranks with GPUs, and one with GPUs starts none of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from monarch._engine.dtensor_compat import tree_map
from monarch.exceptions import MeshOpError

_CPU = torch.device("cpu")
_tensor: Any = torch.Tensor
_STAY = {_tensor.cuda, _tensor.pin_memory}


class OwnDevices(TorchFunctionMode):
    """Takes GPUs of the program as the CPU, in functions of torch.

    Args:
        applies: whether it does now.
    """

    def __init__(self, applies: Callable[[], bool] = lambda: True) -> None:
        # torch does not type it.
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._applies = applies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not self._applies():
            return func(*args, **kwargs)
        if func in _STAY:
            return args[0]
        args, kwargs = tree_map(_on_cpu, (tuple(args), kwargs))
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    return _CPU if is_of_kind(value, "cuda") else value


def is_of_kind(value: Any, kind: str) -> bool:
    """Return whether a value names a device of a type."""
    if isinstance(value, torch.device):
        return value.type == kind
    return isinstance(value, str) and value.partition(":")[0] == kind


class OnRanks:
    """The methods of a distributed tensor that name a device."""

    monarch_layout: Any

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor with another dtype or memory format. Its device stays that of the ranks."""
        kind = self.monarch_layout.mesh.kind

        def moved(value: Any) -> Any:
            return _CPU if is_of_kind(value, kind) else value

        return _tensor.to(self, *map(moved, args), **{key: moved(value) for key, value in kwargs.items()})

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor itself if the ranks compute on GPUs.

        Raises:
            MeshOpError: they do not.
        """
        if self.monarch_layout.mesh.kind == "cuda":
            return self
        raise MeshOpError("cuda(): a distributed tensor stays on the devices of its ranks, which are CPUs")


def refuse_autocast(kind: str) -> None:
    """Raise if the program casts for the GPUs of the ranks, as torch does for those of the program only."""
    if kind != "cpu" and torch.is_autocast_enabled(kind):
        raise MeshOpError(
            f"torch.autocast({kind!r}) has no effect on distributed tensors, which the program sees as CPU tensors; "
            f"use torch.autocast('cpu', dtype={torch.get_autocast_dtype(kind)}), which the ranks apply on their GPUs"
        )
