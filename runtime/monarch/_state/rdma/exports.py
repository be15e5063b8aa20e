"""Tensors of GPUs in messages: a copy is lent to the receivers, and freed when the last of them has its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch._core.roster import split_proc
from monarch._node.current import current_node
from monarch._node.services.asking import tell_proc
from monarch._node.services.registry import service
from monarch._state.rdma.plane import plane
from monarch._tensors.memory.registry import Remote
from monarch._tensors.memory.views import memory_of
from monarch._tensors.transports.base import Move
from monarch._wire.pickling import Reduced, goes_to_gpu

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_lent: dict[int, set[str]] = {}
"""By key, who has not copied it yet."""
_watching: Any = None


@service("exports.lend", "local")
def lend(tensor: torch.Tensor, receivers: Sequence[str]) -> Reduced | None:
    """Lends a tensor to some processes; None if one of them is a program, which may have no GPU.

    It is lent as it is now: what happens to it later is seen by nobody.
    """
    if not receivers or not all(split_proc(proc)[0] for proc in receivers) or not tensor.numel():
        return None
    import torch

    node = current_node()
    _watch()
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    remote = plane().share(memory_of(flat.view(torch.uint8), "a tensor"), forever=True)
    with _lock:
        _lent[remote.key] = set(receivers)
    for proc in receivers:
        peer = node.peers.known.get(proc)
        if peer is not None and peer.dead is not None:
            # Its death was told of before.
            returned(remote.key, proc)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return take, (tuple(remote), dtype, tuple(tensor.shape), tensor.requires_grad)


@service("exports.cancel", "local")
def cancel(reduced: Reduced) -> None:
    """It was not sent."""
    key = Remote(*reduced[1][0]).key
    with _lock:
        _lent.pop(key, None)
    plane().drop(key)


def take(packed: tuple[Any, ...], dtype: str, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """Makes the copy of a receiver, in memory of its GPU if it has one; TransferError if the lender has died."""
    import torch

    remote = Remote(*packed)
    device = "cuda" if goes_to_gpu() else "cpu"
    made = torch.empty(remote.size, dtype=torch.uint8, device=device)
    try:
        plane().move([Move(remote, memory_of(made, "a tensor"))], False, 60.0)
    finally:
        _give_back(remote)
    tensor = made.view(getattr(torch, dtype)).view(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _give_back(remote: Remote) -> None:
    node = current_node()
    if remote.proc == node.proc:
        returned(remote.key, node.proc)
        return
    tell_proc(node, remote.proc, returned, remote.key, node.proc)


@service("exports.returned", "threaded")
def returned(key: int, proc: str) -> None:
    """Service: a receiver has its copy."""
    with _lock:
        waiting = _lent.get(key)
        if waiting is None:
            return
        waiting.discard(proc)
        if waiting:
            return
        del _lent[key]
    plane().drop(key)


@service("exports.lent", "quick")
def lent() -> int:
    """Service: how many tensors of this process are lent."""
    return len(_lent)


def _watch() -> None:
    """Those that die need nothing any more."""
    global _watching
    node = current_node()
    if _watching is not node:
        _watching = node
        node.events.proc_died.subscribe(_died)


def _died(proc: str) -> None:
    for key in list(_lent):
        returned(key, proc)
