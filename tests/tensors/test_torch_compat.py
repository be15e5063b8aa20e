"""The private parts of torch that the package uses exist and behave as assumed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leaks import wait_until
from monarch._tensors.collectives import nccl
from monarch._wire import tensor_compat

IN_GROUP = """
import datetime, functools, json, warnings
from monarch._tensors import torch_compat

calls, seen = [], {}
def wrap(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        calls.append(1)
        return make(*args, **kwargs)
    return made

seen["wrapped"] = [torch_compat.wrap_group_maker(wrap)]
import torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from monarch._tensors.collectives.store import serve_store
seen["wrapped"] += [torch_compat.wrap_group_maker(wrap), torch_compat.wrap_group_maker(wrap)]

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = dist.group.WORLD
seen["calls"] = [len(calls)]
seen["groups"] = torch_compat.groups() == [world] == [group for group, _ in torch_compat.group_names()]
before = torch_compat.begun(world)
dist.all_reduce(torch.ones(1))
work = dist.all_reduce(torch.ones(1), async_op=True)
seen["type"] = torch_compat.type_of_work(work)
work.wait()
seen["begun"] = torch_compat.begun(world) - before
seen["backend"] = type(torch_compat.backend_of(world, "cpu")).__name__
half = dist.new_group([0], backend="cpu:gloo")
seen["no backend"] = torch_compat.backend_of(half, "cuda")
seen["calls"].append(len(calls))

ours = torch_compat.make_group([0], 0, "gloo", dist.HashStore(), "ours", datetime.timedelta(seconds=60))
tensor = torch.ones(2)
dist.all_reduce(tensor, group=ours)
seen["made"] = [dist.get_process_group_ranks(ours), (ours, "ours") in torch_compat.group_names(), tensor.tolist()]
seen["box"] = torch_compat.local_box((4, 3), DeviceMesh("cpu", [0]), [Shard(0)])
store, port = serve_store("127.0.0.1", 1)
seen["port"] = store.port == port
dist.destroy_process_group()
print(json.dumps(seen))
"""
"""Run in a separate process: gloo keeps descriptors, and the function that creates groups stays replaced."""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-c", IN_GROUP], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_groups_are_found_with_their_names(seen: dict[str, Any]) -> None:
    assert seen["groups"] is True


def test_begun_counts_collectives(seen: dict[str, Any]) -> None:
    assert seen["begun"] == 2


def test_type_of_work_is_that_of_all_reduce(seen: dict[str, Any]) -> None:
    assert seen["type"] == 1


def test_backend_of_is_that_of_device(seen: dict[str, Any]) -> None:
    assert seen["backend"] == "ProcessGroupGloo"
    assert seen["no backend"] is None


def test_make_group_makes_one_that_torch_knows(seen: dict[str, Any]) -> None:
    assert seen["made"] == [[0], True, [1.0, 1.0]]


def test_wrap_group_maker_wraps_every_way_to_make_group(seen: dict[str, Any]) -> None:
    assert seen["wrapped"] == [False, True, True]
    assert seen["calls"] == [1, 2]


def test_local_box_is_part_of_this_rank(seen: dict[str, Any]) -> None:
    assert seen["box"] == [[4, 3], [0, 0]]


def test_store_takes_listening_socket(seen: dict[str, Any]) -> None:
    assert seen["port"] is True


def test_has_hooks_finds_hooks_of_backward_pass() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert not tensor_compat.has_hooks(tensor)
    tensor.register_hook(lambda gradient: gradient)
    assert tensor_compat.has_hooks(tensor)


def test_storage_key_identifies_empty_storages_too() -> None:
    whole, first, second = torch.ones(4), torch.empty(0), torch.empty(0)
    keys = [tensor_compat.storage_key(each.untyped_storage()) for each in (whole, whole[:2], first, second)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_untyped_returns_the_storage(recwarn: pytest.WarningsRecorder) -> None:
    tensor = torch.ones(4)
    typed = tensor.storage()
    recwarn.clear()
    assert tensor_compat.untyped(typed).data_ptr() == tensor.data_ptr()
    assert not recwarn.list


class ProcessGroupNCCL:
    """A stand-in for torch's, which is found by its name."""

    def __init__(self, after: threading.Event, done: threading.Event, fails: bool = False) -> None:
        self.after = after
        self.done = done
        self.fails = fails

    def abort(self) -> None:
        self.done.set()
        assert self.after.wait(20)
        if self.fails:
            raise RuntimeError("unhandled system error")


def test_nccl_backends_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An abort may wait for that of any other one, since it waits for the GPU."""
    one, other = threading.Event(), threading.Event()
    backends = [ProcessGroupNCCL(one, other), ProcessGroupNCCL(other, one, fails=True)]
    monkeypatch.setattr(nccl, "nccl_backends", lambda _: backends)
    assert nccl.abort_nccl() == 2
    assert nccl.await_aborts(20)
    assert wait_until(lambda: "an NCCL process group failed: RuntimeError: unhandled" in capsys.readouterr().err)
    slow = ProcessGroupNCCL(threading.Event(), threading.Event())
    backends[:] = [slow]
    # A death may follow a Stop.
    assert [nccl.abort_nccl(), nccl.abort_nccl()] == [1, 1]
    assert not nccl.await_aborts(0.01)
    slow.after.set()
    assert nccl.await_aborts(20)


def test_nccl_backends_are_found_behind_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrapped = (ProcessGroupNCCL(threading.Event(), threading.Event()) for _ in range(2))
    backends = {"plain": plain, "again": plain, "wrapped": SimpleNamespace(wrapped_pg=wrapped), "gloo": None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nccl, "backend_of", lambda group, device: backends[group])
    assert nccl.nccl_backends(backends) == [plain, wrapped]
