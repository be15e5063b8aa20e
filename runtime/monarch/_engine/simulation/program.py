"""A program that runs on each rank by itself, simulated as the first rank, in a process of its own."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from monarch._engine.dtensor_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    collectives_on_shapes,
    convert_modules_by,
    fake_store,
    shard_of_dtensor,
    tree_leaves,
    without_modes,
)
from monarch._engine.issuing.lines import ProgramLine, lines
from monarch._engine.simulation.devices import device_of
from monarch._engine.simulation.forecast import Forecast, forecast_of
from monarch._engine.simulation.optimizers import name_parameters, name_state
from monarch._engine.simulation.own_devices import do_nothing, pretend_gpus
from monarch._engine.simulation.rank_meter import RankMeter
from monarch._engine.simulation.replicas import OBJECT_COLLECTIVES, DistributedDataParallel, converted
from monarch._engine.tensors.devices import OwnDevices
from monarch._python.sources import keep_source

_VALUES = ("data pointer", "data is not allocated", "FakeTensor", "fake tensor", "aten::item", "numpy()")
"""In errors of code that needs the values of tensors."""


class NotSimulated(NamedTuple):
    """Why a program cannot be simulated, or its own error.

    Attributes:
        needs_values: whether it does something that shapes are not enough for.
        kind: class of the error.
        text: the text of the error.
        line: the line of the program.
    """

    needs_values: bool
    kind: str
    text: str
    line: ProgramLine | None


class ProgramSimulation:
    """The world of a simulated program. It changes torch, so a process has one, and ends with it.

    Args:
        hosts: how many.
        gpus: devices of each host.
        device: see ``monarch.simulate``.
        has_gpus: whether the program may ask for GPUs.
    """

    def __init__(self, hosts: int, gpus: int, device: str, has_gpus: bool) -> None:
        self.hosts, self.gpus, self.device = hosts, gpus, device_of(device)
        self.steps: list[int] = []
        self.fakes: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self.meter = RankMeter(gpus, self.device, {}, self.fakes)
        self._has_gpus = has_gpus

    def run(self, source: str, name: str, load: Callable[[], dict[str, Any]]) -> Forecast | NotSimulated:
        """Run a program.

        Args:
            source: the source of the program.
            name: the name of the program in tracebacks.
            load: returns its variables, made in the world.
        """
        self._prepare()
        register_optimizer_step_pre_hook(self._own)
        register_optimizer_step_post_hook(self._stepped)
        keep_source(name, source)
        code: CodeType = compile(source, name, "exec")
        with OwnDevices(), self.fakes, self.meter:
            variables = load()
            for each in _tensors_in(variables):
                self.meter.take(each)
                self.meter.own(each, "inputs")
            self.meter.begin()
            try:
                exec(code, variables)
            except BaseException as error:
                return _reason(error, name)
            self._name_leaves()
            return forecast_of(self)

    def _prepare(self) -> None:
        collectives_on_shapes()
        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=self.hosts * self.gpus)
        # The group is there, as in a cell.
        torch_dist: Any = dist
        torch_dist.init_process_group = torch_dist.distributed_c10d.init_process_group = do_nothing
        torch_dist.destroy_process_group = do_nothing
        parallel: Any = nn.parallel
        parallel.DistributedDataParallel = parallel.distributed.DistributedDataParallel = DistributedDataParallel
        mesh: Any = DeviceMesh
        mesh.__init__ = _outside(mesh.__init__)
        mesh.__getitem__ = _outside(mesh.__getitem__)
        made = _outside(dist.device_mesh.init_device_mesh)
        torch_dist.init_device_mesh = torch_dist.device_mesh.init_device_mesh = made
        for name, function in OBJECT_COLLECTIVES.items():
            setattr(torch_dist, name, function)
            setattr(torch_dist.distributed_c10d, name, function)
        convert_modules_by(converted)
        # Errors come with their text; the rest of what torch tells of shapes is its own.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        if self._has_gpus:
            pretend_gpus(self.gpus, self.meter)

    def _own(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        name_parameters(optimizer, self._name)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        name_state(optimizer, self._name)
        self.steps.append(len(self.meter.events))

    def _name_leaves(self) -> None:
        for each in gc.get_objects():
            # Fake ones are parameters by an attribute only.
            if issubclass(type(each), torch.Tensor) and isinstance(each, nn.Parameter):
                self._name(each, "parameters")
                self._name(each.grad, "gradients")

    def _name(self, tensor: Any, owner: str) -> None:
        if isinstance(tensor, DTensor):
            tensor = shard_of_dtensor(tensor)
        if isinstance(tensor, FakeTensor):
            self.meter.own(tensor, owner)


def _outside(function: Any) -> Any:
    """Return a function that runs on real values."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return function(*args, **kwargs)

    return run


def _tensors_in(variables: dict[str, Any]) -> list[torch.Tensor]:
    found: list[Any] = []
    for value in variables.values():
        found += [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else tree_leaves(value)
    return [each for each in found if isinstance(each, FakeTensor)]


def _reason(error: BaseException, name: str) -> NotSimulated:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = ProgramLine(name, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    text = str(error)
    needs_values = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    needs_values = needs_values or any(each in text for each in _VALUES)
    return NotSimulated(needs_values, type(error).__name__, text, line)


def lines_of(forecast: Forecast) -> dict[int, ProgramLine]:
    """Return the lines of the ops of a forecast, by number in this process."""
    return {number: lines[number] for number in {each.line for each in forecast.events}}
