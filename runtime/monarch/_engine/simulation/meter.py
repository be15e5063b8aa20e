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


@dataclass
class Block:
    """Memory of a tensor.

    Attributes:
        size: in bytes.
        born: the number of the op that made it.
        died: the number of the op before which it was freed; None if it lives.
        owner: "parameters", "gradients", "optimizer", "inputs" or "activations".
    """

    size: int
    born: int
    died: int | None = None
    owner: str = ACTIVATIONS


@dataclass
class Event:
    """An op on the rank.

    Attributes:
        name: of the op.
        line: number of the line that issued it.
        begin: seconds since the start of the simulation.
        seconds: estimated.
        flops: floating point operations.
        size: bytes that it reads and writes; of a collective, those it takes in.
        axis: of the mesh, for a collective.
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


class Meter(DispatchMode):
    """Sees the ops on the parts of the rank. Used by the thread of the program.

    Args:
        device: for the estimate of time.
        groups: axis, size, and whether it spans hosts, by the name of a process group.
        fakes: the mode of the parts.
    """

    def __init__(self, device: Device, groups: dict[str, tuple[str, int, bool]], fakes: Any) -> None:
        DispatchMode.__init__(self)
        self._fakes = fakes
        self._pauses = 0
        self.device = device
        self.groups = groups
        self.line = 0
        self.blocks: list[Block] = []
        self.events: list[Event] = []
        self.memory = self.peak = 0
        self.peak_at = 0
        self.now = 0.0
        self._known: dict[int, Block] = {}

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
        block = self._known[key] = Block(storage.nbytes(), len(self.events), None, owner)
        self.blocks.append(block)
        self.memory += block.size
        if self.memory > self.peak:
            self.peak, self.peak_at = self.memory, len(self.events)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        block = self._known.pop(key)
        block.died = len(self.events)
        self.memory -= block.size

    def begin(self) -> None:
        """Forget the ops so far, and keep the memory in use."""
        self.blocks = [each for each in self.blocks if each.died is None]
        for each in self.blocks:
            each.born = 0
        self.events.clear()
        self.now, self.peak, self.peak_at = 0.0, self.memory, 0

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
        for each in made:
            self.take(each)
        if "wait_tensor" in name:
            return
        size = sum(each.numel() * each.element_size() for each in taken)
        axis, flops, seconds = None, 0, 0.0
        if "c10d" in name:
            name, group, size = self._sent(name, args, size)
            axis, seconds = self._collective(name, group, size)
        elif not getattr(func, "is_view", False):
            count: Any = flop_registry.get(getattr(func, "overloadpacket", None))
            flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
            size += sum(each.numel() * each.element_size() for each in made)
            is_half = any(each.dtype in (torch.bfloat16, torch.float16) for each in taken)
            rate = self.device.half_flops if is_half else self.device.flops
            seconds = max(flops / rate, size / self.device.bandwidth) / EFFICIENCY + LAUNCH
        else:
            return
        self.events.append(Event(name, self.line, self.now, seconds, flops, size, axis, self.memory))
        self.now += seconds

    def _sent(self, name: str, args: Any, size: int) -> tuple[str, str | None, int]:
        """Return the name of a collective, its group, and the bytes that the rank gives to it."""
        return name, next((arg for arg in args if isinstance(arg, str) and arg in self.groups), None), size

    def _collective(self, name: str, group: str | None, size: int) -> tuple[str, float]:
        axis, ranks, is_wide = self.groups.get(group or "", ("", 1, False))
        rate = (self.device.network if is_wide else self.device.link) * EFFICIENCY
        # Rings: each rank sends its share to each other one; twice for a sum that all get.
        share = (ranks - 1) / max(ranks, 1) * (2 if "all_reduce" in name else ranks if "all_gather" in name else 1)
        return axis, size * share / rate + LATENCY
