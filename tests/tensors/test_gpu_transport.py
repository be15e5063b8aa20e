"""The transport between GPUs, as far as it runs without one: which error, and which choice for which memory."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

from monarch._procs.os import gpus
from monarch._state.rdma.plane import _kind_of  # pyright: ignore[reportPrivateUsage]
from monarch._tensors.memory.registry import MemoryReference, Registry
from monarch._tensors.memory.views import Memory
from monarch._tensors.transports.base import Move
from monarch._tensors.transports.cuda_ipc import CudaIpc, open_handle_of
from monarch.exceptions import TransferError

DEVICE = "cuda:0"


@pytest.fixture
def memory() -> Memory:
    tensor = torch.zeros(4)
    return Memory(tensor.data_ptr(), 16, "float32", "cpu", False, tensor)


@pytest.fixture
def failed_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which an earlier kernel has failed: torch reports that at the next synchronization."""

    class Stream:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr("monarch._tensors.transports.cuda_ipc.driver", lambda: object())


@pytest.mark.usefixtures("failed_gpu")
def test_error_of_torch_is_a_failed_transfer(memory: Memory) -> None:
    remote = Registry().add(memory, "h/r0", "rank 0 of m", b"handle" * 12)
    assert remote.pid == os.getpid()
    with pytest.raises(TransferError, match=r"a GPU has failed .CUDA error: device-side assert triggered"):
        CudaIpc("h").move([Move(remote, memory._replace(device=DEVICE))], False, 5.0)


@pytest.mark.usefixtures("failed_gpu")
def test_memory_of_a_failed_gpu_has_no_handle(memory: Memory) -> None:
    assert open_handle_of(memory._replace(device=DEVICE)) == b""


def test_each_segment_of_a_gpu_has_its_own_transport() -> None:
    first = MemoryReference("h/r0", "rank 0", 1, 0, 0, 0, 0, 4, "float32", DEVICE, False, b"a" * 64 + bytes(8))
    same, other = first._replace(gpu=b"a" * 64 + b"12345678"), first._replace(gpu=b"b" * 64 + bytes(8))
    assert _kind_of(first, DEVICE) == _kind_of(same, DEVICE) != _kind_of(other, DEVICE)


@pytest.mark.parametrize("path", ["/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"])
def test_gpus_are_counted_where_a_driver_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    exists = os.path.exists
    monkeypatch.setattr(gpus.os.path, "exists", lambda each: each == path or (exists(each) and each[:5] != "/dev/"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus._count.cache_clear()  # pyright: ignore[reportPrivateUsage]
    try:
        assert gpus.visible_gpus() == ["0", "1", "2"]
    finally:
        gpus._count.cache_clear()  # pyright: ignore[reportPrivateUsage]
