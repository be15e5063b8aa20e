"""The hook of torch's default process group: who reads it, in which frame, and who reads it as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import functools, json, logging, sys
from monarch._tensors import torch_compat as compat

seen, made, reads = {"early": compat.hook_default_group(lambda group, frame: group)}, [], []
import torch, torch.distributed as dist
from torch.distributed import DeviceMesh
before = dist.is_initialized

def make():
    with compat.as_it_is():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def hook(group, frame):
    reads.append(compat.uses_default(frame))
    if group is not None or compat.is_of_torch(frame):
        return group
    made.append(frame.f_code.co_name)
    make()
    return compat.default_group()
def again(ask):
    with compat.as_it_is():
        if dist.is_initialized():
            dist.destroy_process_group()
    made.clear()
    ask()
    return list(made)

seen["hooked"] = [compat.hook_default_group(hook), compat.hook_default_group(hook), compat.default_group() is None]
asks = {
    "is_initialized": dist.is_initialized, "imported before": before, "WORLD": lambda: dist.group.WORLD,
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)), "new_group": lambda: dist.new_group([0]),
    "DeviceMesh": lambda: DeviceMesh("cpu", [0]), "get_rank": dist.get_rank,
}
seen["made"] = {name: again(ask) for name, ask in asks.items()}
seen["of torch"] = again(lambda: __import__("torch.distributed.nn.functional"))
record = logging.LogRecord("torch", logging.ERROR, "", 1, "x", (), None)
from torch._logging._internal import TorchLogsFormatter
seen["log"] = again(lambda: TorchLogsFormatter().format(record))

again(dist.get_rank)
pair = dist.new_group([0])
def uses(ask):
    reads.clear()
    ask()
    return sorted(set(reads))
seen["uses"] = [uses(lambda: dist.all_reduce(torch.ones(1))), uses(lambda: dist.get_world_size(pair))]
seen["plain"] = compat.default_group() is dist.group.WORLD

def wrap(plain):
    @functools.wraps(plain)
    def wrapped(*args, **named):
        made.append(plain.__name__)
        return plain(*args, **named)
    return wrapped
for _ in range(2):
    compat.wrap_function("destroy_process_group", wrap)
made.clear()
dist.destroy_process_group()
seen["wrapped"] = list(made)
print(json.dumps(seen))
"""
"""Run in a separate process, since the hook stays."""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_hook_needs_torch_and_is_set_once(seen: dict[str, Any]) -> None:
    assert seen["early"] is False and seen["hooked"] == [True, True, True]
    assert seen["plain"] is True


def test_every_way_to_read_the_group_makes_it_once(seen: dict[str, Any]) -> None:
    assert {name: len(readers) for name, readers in seen["made"].items()} == dict.fromkeys(seen["made"], 1)
    assert seen["made"]["is_initialized"] == seen["made"]["imported before"] == ["is_initialized"]


def test_imports_and_logs_of_torch_make_no_group(seen: dict[str, Any]) -> None:
    assert seen["of torch"] == [] and seen["log"] == []


def test_operation_on_another_group_does_not_use_the_default_one(seen: dict[str, Any]) -> None:
    assert True in seen["uses"][0] and True not in seen["uses"][1]


def test_function_is_wrapped_once(seen: dict[str, Any]) -> None:
    assert seen["wrapped"] == ["destroy_process_group"]
