"""torchrun programs on meshes: their environment, and running them unchanged."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, endpoint
from monarch.distributed import group
from monarch.exceptions import ActorError, ArgumentError
from monarch.spmd import SPMDActor, setup_torch_elastic_env, setup_torch_elastic_env_async

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist

from helper import SCALE


def main():
    dist.init_process_group()
    total = torch.tensor([float(dist.get_rank() * SCALE)])
    dist.all_reduce(total)
    with open(f"{sys.argv[1]}.{dist.get_rank()}", "w") as out:
        print(total.item(), dist.get_world_size(), os.environ["LOCAL_RANK"], sys.argv[2:], __file__, file=out)
    if "--fail" in sys.argv and dist.get_rank() == 1:
        raise ValueError("a bad batch")
    if "--wait" in sys.argv:
        dist.barrier()
    if "--exit" in sys.argv:
        sys.exit(int(sys.argv[-1]))
    os.environ["LEFT"] = "1"


if __name__ == "__main__":
    main()
"""

NCCL = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")


class Looker(Actor):
    @endpoint
    def variables(self) -> dict[str, str]:
        import os

        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LEFT", "MASTER_ADDR", *NCCL)
        return {name: os.environ[name] for name in names if name in os.environ}

    @endpoint
    def total(self) -> tuple[float, int]:
        import torch
        import torch.distributed as dist

        dist.init_process_group()
        try:
            found = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(found)
            return found.item(), dist.get_world_size()
        finally:
            dist.destroy_process_group()

    @endpoint
    def of_the_mesh(self) -> int:
        return group().size()

    @endpoint
    def main_module(self) -> tuple[str, list[str]]:
        import sys

        return sys.modules["__main__"].__name__, sys.argv[1:]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("SCALE = 10\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def values(future: Any) -> list[Any]:
    return list(future.get(60).values())


def run(actors: Any, *arguments: str) -> Any:
    host, port = actors.slice(gpus=0).get_host_port.call_one().get()
    return actors.main.call(host, port, list(arguments))


def test_script_runs_unchanged(procs: Callable[..., Any], script: Path) -> None:
    mesh = procs(2)
    actors, looker = mesh.spawn("spmd", SPMDActor), mesh.spawn("looker", Looker)
    before = values(looker.main_module.call())
    variables = values(looker.variables.call())
    assert [each["RANK"] for each in variables] == ["0", "1"] and variables[0]["WORLD_SIZE"] == "2"
    for attempt in range(2):
        out = script.parent / f"out{attempt}"
        assert values(run(actors, str(script), str(out), "--steps", "3")) == [True, True]
        for rank in range(2):
            said = (out.with_name(f"{out.name}.{rank}")).read_text().strip()
            assert said == f"10.0 2 {rank} ['--steps', '3'] {script}"
    # Its changes are undone.
    assert values(looker.variables.call()) == variables
    assert values(looker.main_module.call()) == before
    # The mesh has groups of its own, before and after.
    assert values(looker.of_the_mesh.call()) == [2, 2]
    assert values(run(actors, str(script), str(out))) == [True, True]
    assert values(looker.of_the_mesh.call()) == [2, 2]


def test_failing_script_is_an_error(procs: Callable[..., Any], script: Path) -> None:
    actors = procs(2).spawn("spmd", SPMDActor)
    # The other rank waits in a collective, and is freed.
    with pytest.raises(ActorError, match="a bad batch") as caught:
        run(actors, str(script), "/dev/null", "--fail", "--wait").get(30)
    assert 1 in caught.value.failures and "train.py" in caught.value.failures[1]
    with pytest.raises(ActorError, match="exited with code 3"):
        run(actors, str(script), str(script.parent / "out"), "--exit", "3").get(30)
    assert values(run(actors, str(script), str(script.parent / "out"), "--exit", "0")) == [True, True]
    with pytest.raises(ArgumentError, match="expected a script and its arguments"):
        run(actors).get(30)
    with pytest.raises(ActorError, match="No such file"):
        run(actors, str(script.parent / "missing.py")).get(30)


def test_module_runs_like_a_script(procs: Callable[..., Any], script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    actors = procs(2).spawn("spmd", SPMDActor)
    out = script.parent / "out"
    assert values(run(actors, "-m", "train", str(out), "--steps")) == [True, True]
    assert (script.parent / "out.1").read_text().startswith("10.0 2 1 ['--steps']")


def test_endpoints_see_torchrun_environment(procs: Callable[..., Any]) -> None:
    mesh = procs(3)
    looker = mesh.spawn("looker", Looker)
    setup_torch_elastic_env(mesh)
    assert values(looker.total.call()) == [(3.0, 3)] * 3
    variables = values(looker.variables.call())
    assert [each["RANK"] + each["LOCAL_RANK"] + each["WORLD_SIZE"] for each in variables] == ["003", "113", "223"]
    # Otherwise torch's watchdog ends a rank whose NCCL groups are aborted.
    assert {each[name] for each in variables for name in NCCL} == {"0"}
    # Of a slice, whose first rank is 0.
    part = mesh.slice(gpus=slice(1, 3))
    setup_torch_elastic_env(part)
    assert values(looker.slice(gpus=slice(1, 3)).total.call()) == [(1.0, 2)] * 2
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    setup_torch_elastic_env(mesh, "127.0.0.1", port)
    assert values(looker.total.call()) == [(3.0, 3)] * 3
    with pytest.raises(ValueError, match="expected both"):
        setup_torch_elastic_env(mesh, "127.0.0.1")


def test_run_can_be_awaited(procs: Callable[..., Any]) -> None:
    import asyncio

    mesh = procs(2)
    looker = mesh.spawn("looker", Looker)
    asyncio.run(setup_torch_elastic_env_async(mesh))
    assert values(looker.total.call()) == [(1.0, 2)] * 2


def test_actor_sets_up_torchrun_environment(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    actors, looker = mesh.spawn("spmd", SPMDActor), mesh.spawn("looker", Looker)
    host, port = actors.slice(gpus=0).get_host_port.call_one(None).get()
    actors.setup_env.call(host, port).get(30)
    assert values(looker.total.call()) == [(1.0, 2)] * 2
