"""Tensors exported to the receivers of a message: as for GPU tensors, here with CPU memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from leaks import wait_until
from monarch._meshes.actors.ask import ask
from monarch._state.rdma import exports
from monarch._wire import pickler, pickling, rebuilding
from monarch.actor import Actor, endpoint
from monarch.exceptions import ActorError, TransferError


class CopyEndpoint(Actor):
    @endpoint
    def export(self, receivers: list[str]) -> tuple[Any, ...]:
        self.tensor = torch.arange(12.0).view(3, 4).t()
        reduced = exports.export(self.tensor.requires_grad_(), receivers)
        assert reduced is not None
        # Later writes are seen by nobody.
        with torch.no_grad():
            self.tensor.zero_()
        return reduced[1]

    @endpoint
    def take(self, arguments: tuple[Any, ...]) -> tuple[list[list[float]], bool, str]:
        made = exports.take(*arguments)
        return made.tolist(), made.requires_grad, str(made.dtype)

    @endpoint
    def proc(self) -> tuple[str, int]:
        from monarch.actor import context

        return context().actor_instance.proc_id, os.getpid()

    @endpoint
    def export_image(self, receivers: list[str]) -> tuple[Any, ...]:
        self.tensor = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
        reduced = exports.export(self.tensor, receivers)
        assert reduced is not None
        return reduced[1]

    @endpoint
    def take_image(self, arguments: tuple[Any, ...]) -> tuple[bool, bool]:
        made = exports.take(*arguments)
        same = torch.equal(made, torch.arange(120.0).view(2, 3, 4, 5))
        return same, made.is_contiguous(memory_format=torch.channels_last)


def exported(mesh: Any) -> int:
    return ask(mesh, exports.count).get(10)[0]


EXPECTED = [[0.0, 4.0, 8.0], [1.0, 5.0, 9.0], [2.0, 6.0, 10.0], [3.0, 7.0, 11.0]]


def test_export_is_freed_after_the_last_copy(procs: Callable[..., Any]) -> None:
    exporter, users = procs(1).spawn("exporter", CopyEndpoint), procs(2).spawn("users", CopyEndpoint)
    receivers = [proc for proc, _ in users.proc.call().get().values()]
    arguments = exporter.export.call_one(receivers).get()
    assert exported(exporter) == 1
    assert users.slice(gpus=0).take.call_one(arguments).get() == (EXPECTED, True, "torch.float32")
    assert exported(exporter) == 1
    assert users.slice(gpus=1).take.call_one(arguments).get()[0] == EXPECTED
    assert wait_until(lambda: exported(exporter) == 0)
    with pytest.raises(ActorError, match="was dropped") as caught:
        users.slice(gpus=1).take.call_one(arguments).get()
    assert isinstance(caught.value.exception, TransferError)


def test_export_keeps_channels_last(procs: Callable[..., Any]) -> None:
    exporter, user = procs(1).spawn("exporter", CopyEndpoint), procs(1).spawn("user", CopyEndpoint)
    arguments = exporter.export_image.call_one([user.proc.call_one().get()[0]]).get()
    assert user.take_image.call_one(arguments).get() == (True, True)


def test_dead_receiver_releases_exports(procs: Callable[..., Any]) -> None:
    exporter, users = procs(1).spawn("exporter", CopyEndpoint), procs(2).spawn("users", CopyEndpoint)
    known = list(users.proc.call().get().values())
    # The exporter learns of the death of its receivers.
    exporter.take.call_one(users.slice(gpus=1).export.call_one([exporter.proc.call_one().get()[0]]).get()).get()
    arguments = exporter.export.call_one([proc for proc, _ in known]).get()
    users.slice(gpus=0).take.call_one(arguments).get()
    assert exported(exporter) == 1
    os.kill(known[1][1], signal.SIGKILL)
    assert wait_until(lambda: exported(exporter) == 0)


def test_program_gets_its_own_copy() -> None:
    assert exports.export(torch.zeros(3), ["host/c123456"]) is None
    assert exports.export(torch.zeros(3), []) is None
    assert exports.export(torch.zeros(0), ["host/uid.0"]) is None


def test_unsent_export_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickler exports the tensors that it meets, and withdraws them if the rest cannot be pickled."""
    cancelled: list[Any] = []

    class Exporter:
        def export(self, tensor: Any, receivers: Any) -> Any:
            assert receivers == ["host/uid.0"]
            return (len, ((1, 2, 3),))

        def cancel(self, reduced: Any) -> None:
            cancelled.append(reduced)

    monkeypatch.setattr(pickler, "exporter", Exporter())
    monkeypatch.setitem(pickler._TORCH, "Tensor", pickler._Pickler._of_gpu)
    # A part of its storage, since small CPU tensors that own all of it are reduced otherwise.
    tensor = torch.ones(4)[:3]
    body, buffers = pickling.dumps([tensor, tensor], "", lambda: ["host/uid.0"])
    assert pickling.loads(body, buffers) == [3, 3] and not cancelled
    with pytest.raises(TypeError):
        pickling.dumps([tensor, (each for each in ())], "", lambda: ["host/uid.0"])
    assert len(cancelled) == 1


def test_export_goes_through_cpu_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rebuilding.make_gpu_tensor(torch.ones(3), True)
    assert found.device.type == "cpu" and found.requires_grad


class _Exporter:
    """Notes what is exported; each receiver makes a tensor of sevens."""

    def __init__(self) -> None:
        self.exported: list[torch.Tensor] = []

    def export(self, tensor: torch.Tensor, receivers: Any) -> Any:
        self.exported.append(tensor)
        return torch.full, (tuple(tensor.shape), 7.0)

    def cancel(self, reduced: Any) -> None:
        raise AssertionError


def test_tied_weights_of_a_gpu_stay_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = _Exporter()
    monkeypatch.setattr(pickler, "exporter", exporter)
    monkeypatch.setitem(pickler._TORCH, "Tensor", pickler._Pickler._of_gpu)
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    state = {"embedding": weight, "head": weight.data, "bias": torch.zeros(4), "part": weight.data[:2]}
    body, buffers = pickling.dumps(state, receivers=lambda: ["h/m.0"])
    found = pickling.loads(body, buffers)
    assert [tuple(each.shape) for each in exporter.exported] == [(3, 4), (4,), (2, 4)]
    assert found["embedding"].data_ptr() == found["head"].data_ptr() != found["bias"].data_ptr()
    assert found["embedding"].requires_grad and not found["head"].requires_grad
    assert found["head"].tolist() == [[7.0] * 4] * 3
