"""Counts what the ops of one rank take: memory by owner, FLOPs, bytes, and seconds by a roofline."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from monarch._engine.dtensor_compat import DispatchMode, fake_mode_of, tree_leaves
from monarch._engine.simulation.devices import EFFICIENCY, LATENCY, LAUNCH, Device

ACTIVATIONS = "activations"
COLLECTIVES = "collectives"


@dataclass
class MemoryBlock:
    """Memory of a tensor.

    Attributes:
        size: in bytes.
        born: when it was allocated: the number of allocations and frees before.
        died: when it was freed, likewise; None if it lives.
        owner: "parameters", "gradients", "optimizer", "inputs", "activations", or "collectives" for their
            buffers on CPUs.
        holders: how many storages share it.
    """

    size: int
    born: int
    died: int | None = None
    owner: str = ACTIVATIONS
    holders: int = 1


@dataclass
class OpEvent:
    """An op on the rank.

    Attributes:
        name: the name of the op.
        line: number of the line that issued it.
        begin: seconds since the start of the simulation.
        seconds: estimated.
        flops: floating point operations.
        size: bytes that it reads and writes; of a collective, those it takes in.
        axis: the axis of the mesh, for a collective.
        memory: bytes in use after it.
    """

    name: str
    line: int
    begin: float
    seconds: float
    flops: int
    size: int
    axis: str | None
    memory: int


class OpMeter(DispatchMode):
    """Sees the ops on the shards of the rank. Used by the thread of the program.

    Args:
        device: for the estimate of time.
        groups: axis, size, and whether it spans hosts, by the name of a process group.
        fakes: the mode of the shards.
    """

    def __init__(self, device: Device, groups: dict[str, tuple[str, int, bool]], fakes: Any) -> None:
        DispatchMode.__init__(self)
        self._fakes = fakes
        self._pauses = 0
        self.device = device
        self.groups = groups
        self.line = 0
        self.blocks: list[MemoryBlock] = []
        self.events: list[OpEvent] = []
        self.memory = self.peak = 0
        self.peak_at = 0
        """When the peak was: see Block.born."""
        self.now = 0.0
        self._changes = 0
        self._known: dict[int, MemoryBlock] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._count(func, args, kwargs or {}, result)
        return result

    def pause(self) -> None:
        """Count nothing until ``go_on``: torch infers shapes of whole tensors."""
        self._pauses += 1

    def go_on(self) -> None:
        """Count again."""
        self._pauses -= 1

    def take(self, tensor: torch.Tensor, owner: str = ACTIVATIONS) -> None:
        """Count the memory of a tensor, once."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        self._known[key] = self._allocate(storage.nbytes(), owner)
        weakref.finalize(storage, self._free, key)

    def _allocate(self, size: int, owner: str) -> MemoryBlock:
        block = MemoryBlock(size, self._changes, None, owner)
        self.blocks.append(block)
        self.memory += size
        if self.memory > self.peak:
            self.peak, self.peak_at = self.memory, self._changes
        self._changes += 1
        return block

    def share(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Count no memory for a tensor that is in that of another one, though both have a storage."""
        storage = tensor.untyped_storage()
        block = self._known.get(id(source.untyped_storage()))
        if block is None or id(storage) in self._known:
            return
        block.holders += 1
        self._known[id(storage)] = block
        weakref.finalize(storage, self._free, id(storage))

    def _free(self, key: int) -> None:
        self._release(self._known.pop(key))

    def _release(self, block: MemoryBlock) -> None:
        block.holders -= 1
        if not block.holders:
            block.died = self._changes
            self.memory -= block.size
            self._changes += 1

    def begin(self) -> None:
        """Forget the ops so far, and keep the memory in use."""
        self.blocks = [each for each in self.blocks if each.died is None]
        for each in self.blocks:
            each.born = 0
        self.events.clear()
        self.now, self.peak, self.peak_at, self._changes = 0.0, self.memory, 0, 1

    def own(self, tensor: torch.Tensor, owner: str) -> None:
        """Say to whom the memory of a tensor belongs."""
        block = self._known.get(id(tensor.untyped_storage()))
        if block is not None:
            block.owner = owner

    def at_peak(self) -> dict[str, int]:
        """Return the bytes in use at the peak, by owner."""
        found: dict[str, int] = {}
        for block in self.blocks:
            if block.born <= self.peak_at and (block.died is None or block.died > self.peak_at):
                found[block.owner] = found.get(block.owner, 0) + block.size
        return found

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = str(func)
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if self._pauses or any(fake_mode_of(each) is not self._fakes for each in (*taken, *made)):
            return
        if any(each.is_meta for each in made):
            return
        if "wait_tensor" in name:
            # torch gives the result of its shapes another storage; that of a rank is the same.
            self.share(made[0], taken[0])
            return
        for each in made:
            self.take(each)
        size = sum(each.numel() * each.element_size() for each in taken)
        axis, flops, seconds = None, 0, 0.0
        if "c10d" in name:
            name, group, size = self._sent(name, args, size)
            axis, ranks, seconds = self._collective(name, group, size)
            if self.device.name == "cpu":
                self._release(self._allocate(gloo_buffers(name, size, ranks), COLLECTIVES))
        elif not getattr(func, "is_view", False):
            count: Any = flop_registry.get(getattr(func, "overloadpacket", None))
            flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
            size += sum(each.numel() * each.element_size() for each in made)
            is_half = any(each.dtype in (torch.bfloat16, torch.float16) for each in taken)
            rate = self.device.half_flops if is_half else self.device.flops
            seconds = max(flops / rate, size / self.device.bandwidth) / EFFICIENCY + LAUNCH
        else:
            return
        self.events.append(OpEvent(name, self.line, self.now, seconds, flops, size, axis, self.memory))
        self.now += seconds

    def _sent(self, name: str, args: Any, size: int) -> tuple[str, str | None, int]:
        """Return the name of a collective, its group, and the bytes that the rank gives to it."""
        return name, next((arg for arg in args if isinstance(arg, str) and arg in self.groups), None), size

    def _collective(self, name: str, group: str | None, size: int) -> tuple[str, int, float]:
        axis, ranks, is_wide = self.groups.get(group or "", ("", 1, False))
        rate = (self.device.network if is_wide else self.device.link) * EFFICIENCY
        # Rings: each rank sends its share to each other one; twice for a sum that all get.
        share = (ranks - 1) / max(ranks, 1) * (2 if "all_reduce" in name else ranks if "all_gather" in name else 1)
        return axis, ranks, size * share / rate + LATENCY


def gloo_buffers(name: str, size: int, ranks: int) -> int:
    """Return the bytes that torch's gloo backend allocates while a collective runs, next to its result.

    Args:
        name: the name of the collective.
        size: bytes that the rank gives to it.
        ranks: the ranks of the group.
    """
    # A ring has two segments, each a part of the share of a rank and at most 1 MiB.
    ring = 2 * min(-(-size // (2 * ranks)), 1 << 20)
    if "all_gather" in name:
        # A flat copy of the result.
        return size * ranks
    if "reduce_scatter" in name:
        # It combines a copy of all that it takes.
        return size + ring
    return ring if "all_reduce" in name else 0
