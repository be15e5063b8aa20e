"""GPU tensors in messages: the sender exports a copy, and frees it when each receiver has its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch._core.roster import split_proc
from monarch._node.current import current_node
from monarch._node.services.asking import tell_proc
from monarch._node.services.registry import service
from monarch._state.rdma.plane import plane
from monarch._tensors.memory.registry import MemoryReference
from monarch._tensors.memory.views import memory_of
from monarch._tensors.transports.base import Move
from monarch._wire.pickler import Reduced
from monarch._wire.rebuilding import goes_to_gpu

if TYPE_CHECKING:
    import torch

    from monarch._node.node import Node


class _Exports:
    """The exported tensors of a node.

    Args:
        node: the node of this process.
    """

    def __init__(self, node: Node) -> None:
        self.lock = threading.Lock()
        self.receivers: dict[int, set[str]] = {}
        """By key, the processes that have not copied it yet. Lock: ``lock``; a single read needs none."""
        # A dead process copies nothing any more.
        node.events.proc_died.subscribe(self._died)

    def _died(self, proc: str) -> None:
        for key in list(self.receivers):
            returned(key, proc)


def _exports() -> _Exports:
    return current_node().part(_Exports)


@service("exports.export", "local")
def export(tensor: torch.Tensor, receivers: Sequence[str]) -> Reduced | None:
    """Export a tensor to some processes; None if one of them is a program, which may have no GPU.

    The receivers get its present values; later changes do not reach them.
    """
    if not receivers or not all(split_proc(proc)[0] for proc in receivers) or not tensor.numel():
        return None
    import torch

    node, exports = current_node(), _exports()
    # A clone of a tensor without gaps keeps its strides, such as those of channels_last.
    cloned = tensor.detach().resolve_conj().resolve_neg().clone()
    flat = cloned.as_strided((cloned.numel(),), (1,))
    remote = plane().share(memory_of(flat.view(torch.uint8), "a tensor"), forever=True)
    with exports.lock:
        exports.receivers[remote.key] = set(receivers)
    for proc in receivers:
        peer = node.peers.known.get(proc)
        if peer is not None and peer.dead is not None:
            # The event of its death came earlier.
            returned(remote.key, proc)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return take, (tuple(remote), dtype, tuple(tensor.shape), cloned.stride(), tensor.requires_grad)


@service("exports.cancel", "local")
def cancel(reduced: Reduced) -> None:
    """Free an export whose message was not sent."""
    key = MemoryReference(*reduced[1][0]).key
    exports = _exports()
    with exports.lock:
        exports.receivers.pop(key, None)
    plane().drop(key)


def take(
    packed: tuple[Any, ...], dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    """Return the receiver's copy, on its GPU if it has one; TransferError if the sender has died."""
    import torch

    remote = MemoryReference(*packed)
    device = "cuda" if goes_to_gpu() else "cpu"
    made = torch.empty(remote.size, dtype=torch.uint8, device=device)
    try:
        plane().move([Move(remote, memory_of(made, "a tensor"))], False, 60.0)
    finally:
        _report_copy(remote)
    tensor = made.view(getattr(torch, dtype)).as_strided(shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def _report_copy(remote: MemoryReference) -> None:
    node = current_node()
    if remote.proc == node.proc:
        returned(remote.key, node.proc)
        return
    tell_proc(node, remote.proc, returned, remote.key, node.proc)


@service("exports.returned", "threaded")
def returned(key: int, proc: str) -> None:
    """Service: note that a receiver has its copy."""
    exports = _exports()
    with exports.lock:
        waiting = exports.receivers.get(key)
        if waiting is None:
            return
        waiting.discard(proc)
        if waiting:
            return
        del exports.receivers[key]
    plane().drop(key)


@service("exports.count", "quick")
def count() -> int:
    """Service: return the number of exported tensors of this process."""
    return len(_exports().receivers)
