"""Parts of torch that read memory, in Python for a simulation: DistributedDataParallel, collectives of objects."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_FIRST_MB = 1.0
"""Size of the first bucket, in MiB."""


class DistributedDataParallel(nn.Module):
    """Combines gradients in buckets, in the order in which backward makes them.

    Args:
        module: with the parameters.
        process_group: None for all ranks.
        bucket_cap_mb: size of a bucket in MiB.
        gradient_as_bucket_view: whether gradients live in the buckets.
        given: other arguments of torch's class, without a meaning here.
    """

    def __init__(
        self,
        module: nn.Module,
        *given: Any,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group
        self._cap = (bucket_cap_mb or 25.0) * (1 << 20)
        self._are_views = gradient_as_bucket_view
        self._prepare()

    def _prepare(self) -> None:
        self.require_backward_grad_sync = True
        self._bucket_of: dict[int, int] = {}
        self._waiting: dict[int, set[int]] = {}
        self._buckets: list[list[Any]] = []
        size, cap = 0.0, _FIRST_MB * (1 << 20)
        trained: list[Any] = [each for each in self.module.parameters() if each.requires_grad]
        for each in reversed(trained):
            if not self._buckets or size >= cap:
                cap = self._cap if self._buckets else cap
                self._buckets.append([])
                size = 0.0
            self._buckets[-1].append(each)
            size += each.numel() * each.element_size()
            self._bucket_of[id(each)] = len(self._buckets) - 1
            each.register_post_accumulate_grad_hook(self._ready)
        self._memory = [self._flat(bucket) for bucket in self._buckets]

    def _flat(self, bucket: list[Any]) -> torch.Tensor:
        size = 0 if self._are_views else sum(each.numel() for each in bucket)
        return torch.empty(size, dtype=bucket[0].dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Of torch's class, from a cell that has run.
        nn.Module.__init__(self)
        self.module = state["_modules"]["module"]
        self.process_group = None
        self._cap = float(state.get("bucket_bytes_cap", 25 << 20))
        self._are_views = bool(state.get("gradient_as_bucket_view", False))
        self._prepare()

    def _ready(self, parameter: Any) -> None:
        if not self.require_backward_grad_sync:
            return
        at = self._bucket_of[id(parameter)]
        waiting = self._waiting.setdefault(at, {id(each) for each in self._buckets[at]})
        waiting.discard(id(parameter))
        if not waiting:
            del self._waiting[at]
            grads = [each.grad.view(-1) for each in self._buckets[at]]
            flat = torch.cat(grads) if self._are_views else self._memory[at]
            collectives: Any = dist
            collectives.all_reduce(flat, group=self.process_group)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate gradients in a block, without collectives."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)


def converted(module: Any, fn: Any, recurse: bool = True) -> Any:
    """Convert the tensors of a module, as ``Module.to`` and ``half`` do."""
    for each in module.children() if recurse else ():
        converted(each, fn)
    with torch.no_grad():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                made: Any = fn(tensor) if tensor is not None else None
                if made is not tensor and isinstance(tensor, nn.Parameter):
                    held[name] = nn.Parameter(made, requires_grad=tensor.requires_grad)
                elif made is not tensor:
                    held[name] = made
    return module


def _all_gather_object(object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    pass


def _scatter_object_list(output: list[Any], given: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    output[0] = given[0] if given else None


OBJECT_COLLECTIVES: dict[str, Any] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
}
"""Collectives of Python objects, by name: all ranks give what the first one gives."""
