"""``monarch.simulate``: a program on distributed tensors without devices: does it fit, and how long does it take?"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from math import prod
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from monarch._core.kinds import is_count
from monarch._engine.dtensor_compat import FakeTensorMode, fake_store, shard_of_dtensor, watched_inference
from monarch._engine.simulation.current import current
from monarch._engine.simulation.devices import device_of
from monarch._engine.simulation.forecast import Forecast, forecast_of
from monarch._engine.simulation.mesh import SimulatedProcs
from monarch._engine.simulation.meter import OpMeter
from monarch._engine.simulation.optimizers import name_parameters, name_state
from monarch._engine.tensors.tensor import Tensor
from monarch.exceptions import ArgumentError


class simulate:
    """A block in which a program on distributed tensors runs without devices and processes.

    Meshes that the block makes have no processes: ops run on shapes. Reading a value gives NaN or zeros. ``forecast()``
    tells peak memory by owner, bytes of collectives by axis and line, and an estimate of the time.

    Args:
        hosts: how many.
        gpus: devices of each host.
        device: "a100", "h100", "h200", "b200" or "cpu".

    Raises:
        ArgumentError: the device is not known, another simulation runs, or the program has a process group already.
    """

    def __init__(self, hosts: int = 1, gpus: int = 8, device: str = "h100") -> None:
        if not (is_count(hosts, 1) and is_count(gpus, 1)):
            raise ArgumentError(f"simulate: expected at least one host and device, got hosts={hosts!r}, gpus={gpus!r}")
        self.hosts, self.gpus, self.device = hosts, gpus, device_of(device)
        self.dropped: deque[int] = deque()
        """References of tensors that the program has dropped. Any thread appends; the thread of the program takes."""
        self.values: dict[int, Any] = {}
        """DTensors of fake shards, by reference."""
        self.groups: dict[str, tuple[str, int, bool]] = {}
        """Axis, size, and whether it spans hosts, by the name of a process group."""
        self.steps: list[int] = []
        """Numbers of events at which an optimizer has ended a step."""
        self._fakes = FakeTensorMode()
        self.meter = OpMeter(self.device, self.groups, self._fakes)
        self._block = ExitStack()
        self._forecast: Forecast | None = None

    def __enter__(self) -> simulate:
        if current.simulation is not None:
            raise ArgumentError("simulate: another simulation is running; leave its with block first")
        if dist.is_initialized():
            raise ArgumentError("simulate: the program has a process group; call destroy_process_group() first")
        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=self.hosts * self.gpus)
        self._block.callback(dist.destroy_process_group)
        before, after = register_optimizer_step_pre_hook(self._own), register_optimizer_step_post_hook(self._stepped)
        self._block.callback(before.remove)
        self._block.callback(after.remove)
        self._block.enter_context(watched_inference(self.meter.pause, self.meter.go_on))
        current.simulation = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._forecast = self.forecast()
        finally:
            current.simulation = None
            self._block.close()

    def procs(self, axes: tuple[str, ...], sizes: tuple[int, ...]) -> SimulatedProcs:
        """Return simulated processes.

        Raises:
            ArgumentError: there are not enough devices.
        """
        if prod(sizes) > self.hosts * self.gpus:
            raise ArgumentError(
                f"Mesh: {prod(sizes)} ranks exceed the {self.hosts * self.gpus} devices of "
                f"simulate(hosts={self.hosts}, gpus={self.gpus}); raise hosts= or gpus="
            )
        return SimulatedProcs(self, axes, sizes)

    def device_mesh(self, axes: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
        """Return a DeviceMesh over groups that send nothing."""
        made = dist.device_mesh.DeviceMesh("cpu", torch.arange(prod(sizes)).view(*sizes), mesh_dim_names=axes)
        for at, axis in enumerate(axes):
            group = made.get_group(at)
            ranks = dist.get_process_group_ranks(group)
            is_wide = len({rank // self.gpus for rank in ranks}) > 1
            self.groups[group.group_name] = axis, len(ranks), is_wide
        return made

    @contextmanager
    def rank(self, line: int) -> Generator[None]:
        """Run ops of the rank in a block, for a line of the program."""
        while self.dropped:
            self.values.pop(self.dropped.popleft(), None)
        self.meter.line = line
        with torch.no_grad(), self._fakes, self.meter:
            yield

    def forecast(self) -> Forecast:
        """Return the figures of what has run in the block so far."""
        if self._forecast is not None:
            return self._forecast
        for each in gc.get_objects():
            if issubclass(type(each), Tensor) and each.requires_grad and each.is_leaf:
                self._name(each, "parameters")
                self._name(each.grad, "gradients")
        return forecast_of(self)

    def _own(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        name_parameters(optimizer, self._name)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        name_state(optimizer, self._name)
        self.steps.append(len(self.meter.events))

    def _name(self, tensor: Any, owner: str) -> None:
        value = self.values.get(tensor.monarch_ref.number) if isinstance(tensor, Tensor) else None
        if value is not None:
            self.meter.own(shard_of_dtensor(value), owner)
