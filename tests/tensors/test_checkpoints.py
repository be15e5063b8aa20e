"""Checkpoints: versions on disk that exist completely or not at all, and that meshes of other sizes restore."""

from __future__ import annotations

import errno
import os
import resource
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from leaks import wait_until
from monarch._meshes.actors.ask import ask
from monarch._state.checkpoint.api import checkpoint, restore
from monarch._state.checkpoint.worker import still_open
from monarch._tensors.checkpoints.versions import NewVersion, find_version, versions_in
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import device_mesh
from monarch.exceptions import (
    ActorError,
    ArgumentError,
    CallTimeoutError,
    DeviceMeshError,
    StoppedError,
    SupervisionError,
)
from tensors.training import STEPS, assert_golden, make_net, make_optimizer, train

GUARD = 60
"""Seconds after which something counts as hanging."""


class Keeper(Actor):
    """Has tensors: one sharded by rows over all ranks, one replicated, and values."""

    def __init__(self, size: int = 0, value: float = 1.0, sharded: bool = False) -> None:
        self.state: dict[str, Any] = {"w": torch.full((max(size, 4), 3), value), "step": int(value), "note": {"a": [1]}}
        if sharded:
            from torch.distributed.tensor import Shard, distribute_tensor

            plain = torch.arange(24.0).view(8, 3) * value
            self.state["parts"] = {"rows": distribute_tensor(plain, device_mesh(), [Shard(0)])}
        self.taken: Any = None

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state

    @endpoint
    async def state_to_await(self) -> dict[str, Any]:
        return self.state

    @endpoint
    def add(self, amount: float) -> None:
        self.state["w"] += amount
        self.state["step"] += 1

    @endpoint
    def put(self, **values: Any) -> None:
        self.state.update(values)

    @endpoint
    def drop(self, name: str) -> None:
        del self.state[name]

    @endpoint
    def seen(self) -> tuple[float, int, Any, Any]:
        parts = self.state.get("parts")
        return (
            self.state["w"].mean().item(),
            self.state["step"],
            self.state["note"],
            parts["rows"].full_tensor().tolist() if parts else None,
        )

    @endpoint
    def limit_files(self, size: int, deadly: bool = False) -> None:
        """No file can grow beyond this, as on a full disk; or an attempt ends the process."""
        # Its end leaves no core dump.
        for limit, most in ((resource.RLIMIT_FSIZE, size), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)

    @endpoint
    def put_what_cannot_be_saved(self) -> None:
        import threading

        self.state["deep"] = {"lock": threading.Lock()}

    def fail(self) -> dict[str, Any]:
        raise ValueError("no state yet")

    def none(self) -> None:
        return None


class Synchronous(Actor):
    """The same state, in an actor that handles one call at a time."""

    def __init__(self, value: float = 1.0) -> None:
        self.w = torch.full((200, 1000), value)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    @endpoint
    def add(self, amount: float) -> None:
        self.w += amount

    @endpoint
    def mean(self) -> float:
        return self.w.mean().item()

    @endpoint
    def wait_for(self, path: str) -> None:
        assert wait_until(lambda: os.path.exists(path), GUARD)


def values(future: Any) -> list[Any]:
    return list(future.get(timeout=GUARD).values())


def in_folder(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.name != ".lock")


def nothing_kept(mesh: Any) -> bool:
    return set(ask(mesh, still_open).get(GUARD).values()) == {0}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_versions_are_written_and_pruned(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2).spawn("keepers", Keeper)
    path = tmp_path / "new" / "run"
    for number in range(1, 4):
        assert checkpoint(mesh, path).get(GUARD) == str(path / f"v00000{number}")
        mesh.add.call(1.0).get(GUARD)
    assert in_folder(path) == ["latest", "v000002", "v000003"]
    assert (path / "latest").read_text() == "v000003\n"
    assert restore(mesh, path).get(GUARD) == str(path / "v000003")
    assert values(mesh.seen.call()) == [(3.0, 3, {"a": [1]}, None)] * 2
    assert restore(mesh, str(path), version=2).get(GUARD) == str(path / "v000002")
    assert values(mesh.seen.call()) == [(2.0, 2, {"a": [1]}, None)] * 2
    # Torch itself can read the files.
    torchs: Any = import_module("torch.distributed.checkpoint")
    plain = {"w": torch.zeros(4, 3), "step": 0}
    torchs.load(plain, checkpoint_id=path / "v000003")
    assert plain["step"] == 3 and plain["w"].mean() == 3.0
    assert checkpoint(mesh.slice(gpus=1), path, keep=1).get(GUARD) == str(path / "v000004")
    assert in_folder(path) == ["latest", "v000004"]
    assert wait_until(lambda: nothing_kept(mesh))


def test_only_leftovers_of_attempts_are_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("v000001.tmp", "v12", "latest.mine"):
        (tmp_path / name).mkdir()
    NewVersion(str(tmp_path), "ab").abandon()
    cut = NewVersion(str(tmp_path), "cd")
    assert in_folder(tmp_path) == ["latest.mine", "notes.txt", "v000001.cd.writing", "v000001.tmp", "v12"]
    (Path(cut.folder) / ".metadata").touch()
    assert versions_in(str(tmp_path)) == []
    assert cut.commit(2) == str(tmp_path / "v000001")
    cut.abandon()
    assert find_version(str(tmp_path)) == str(tmp_path / "v000001")
    # As a crash leaves it between two steps.
    (tmp_path / "latest").unlink()
    (tmp_path / "v000001.ef.removing").mkdir()
    (tmp_path / "latest.ef").touch()
    (tmp_path / "v000002").mkdir()
    assert find_version(str(tmp_path)) == str(tmp_path / "v000001")
    given_up = NewVersion(str(tmp_path), "01")
    assert given_up.name == "v000003"
    given_up.abandon()
    with pytest.raises(DeviceMeshError, match=r"version v000003 of .* was abandoned"):
        given_up.commit(2)
    assert in_folder(tmp_path) == ["latest.mine", "notes.txt", "v000001", "v000001.tmp", "v000002", "v12"]


def test_lock_of_a_full_disk_has_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    version = NewVersion(str(tmp_path), "ab")
    with pytest.raises(DeviceMeshError, match="another process is writing a checkpoint"):
        NewVersion(str(tmp_path), "cd")
    version.abandon()


def test_checkpoint_copies_in_call_order(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2).spawn("keepers", Synchronous)
    go = tmp_path / "go"
    mesh.add.broadcast(1.0)
    saved = checkpoint(mesh, tmp_path / "run")
    second = checkpoint(mesh, tmp_path / "run")
    mesh.add.broadcast(5.0)
    # The actors are busy while their copies are written.
    busy = mesh.wait_for.call(str(go))
    assert saved.get(GUARD).endswith("v000001") and second.get(GUARD).endswith("v000002")
    assert not busy.done
    back = restore(mesh, tmp_path / "run", version="v000001")
    mesh.add.broadcast(0.5)
    go.touch()
    assert values(mesh.mean.call()) == [2.5, 2.5]
    assert back.get(GUARD).endswith("v000001")


def test_async_actor_can_save(procs: Any, tmp_path: Path) -> None:
    mesh = procs(1).spawn("keepers", Keeper)
    checkpoint(mesh, tmp_path, state="state_to_await").get(GUARD)
    mesh.add.call(4.0).get(GUARD)
    restore(mesh, tmp_path, state="state_to_await").get(GUARD)
    assert values(mesh.seen.call()) == [(1.0, 1, {"a": [1]}, None)]


@pytest.mark.slow
def test_dtensors_restore_in_another_layout(procs: Any, tmp_path: Path) -> None:
    three = procs(3).spawn("keepers", Keeper, sharded=True)
    checkpoint(three, tmp_path).get(GUARD)
    whole = (torch.arange(24.0).view(8, 3)).tolist()
    for size in (1, 2):
        other = procs(size).spawn("others", Keeper, 0, 7.0, True)
        restore(other, tmp_path).get(GUARD)
        assert values(other.seen.call()) == [(1.0, 1, {"a": [1]}, whole)] * size
    # Only some ranks have a shard of the tensor.
    with pytest.raises(ActorError, match=r"are inconsistent: .*parts\.rows"):
        checkpoint(three.slice(gpus=slice(0, 2)), tmp_path).get(GUARD)
    assert in_folder(tmp_path) == ["latest", "v000001"]


class Trainer(Actor):
    """A model and its optimizer, sharded over all ranks."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model: Any = make_net()
        fully_shard(self.model, mesh=device_mesh())
        self.optimizer = make_optimizer(self.model)

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    @endpoint
    def train(self, first: int, end: int, size: int) -> list[float]:
        return train(self.model, self.optimizer, range(first, end), current_rank().rank, size)


@pytest.mark.slow
def test_training_resumes_with_another_rank_count(procs: Any, tmp_path: Path) -> None:
    before = STEPS // 2
    four = procs(4).spawn("trainers", Trainer)
    begun = four.train.call(0, before, 4)
    saved = checkpoint(four, tmp_path)
    # It continues, with collectives of its own, while the copies are written.
    rest = four.train.call(before, STEPS, 4)
    saved.get(GUARD)
    assert_golden([one + two for one, two in zip(values(begun), values(rest), strict=True)])
    two = procs(2).spawn("trainers", Trainer)
    restore(two, tmp_path).get(GUARD)
    mean = torch.tensor(values(two.train.call(before, STEPS, 2)), dtype=torch.double).mean(0).tolist()
    assert_golden([each + mean for each in values(begun)])


class Stateful(Actor):
    """Its state has objects with states of their own."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["model"] is self.model

    @endpoint
    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    @endpoint
    def seen(self) -> tuple[list[float], list[float], dict[Any, Any]]:
        state = self.optimizer.state_dict()["state"]
        return (
            self.model.bias.tolist(),
            state[0]["momentum_buffer"].view(-1).tolist(),
            {key: len(state) for key in state},
        )


def test_objects_with_state_dict_are_saved(procs: Any, tmp_path: Path) -> None:
    mesh = procs(1).spawn("stateful", Stateful)
    mesh.step.call().get(GUARD)
    before = values(mesh.seen.call())
    checkpoint(mesh, tmp_path).get(GUARD)
    mesh.step.call().get(GUARD)
    assert values(mesh.seen.call()) != before
    restore(mesh, tmp_path).get(GUARD)
    assert values(mesh.seen.call()) == before


def test_unsavable_value_is_named(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2).spawn("keepers", Keeper)
    checkpoint(mesh, tmp_path).get(GUARD)
    mesh.slice(gpus=1).put_what_cannot_be_saved.call().get(GUARD)
    with pytest.raises(
        ActorError, match=r"(?s)keepers.checkpoint\(\) failed on rank 1.*'deep.lock', of type lock"
    ) as seen:
        checkpoint(mesh, tmp_path).get(GUARD)
    assert list(seen.value.failures) == [1]
    with pytest.raises(ActorError, match="no state yet"):
        checkpoint(mesh, tmp_path, state="fail").get(GUARD)
    with pytest.raises(ActorError, match="state: expected a dict of names to tensors and values, got NoneType"):
        checkpoint(mesh, tmp_path, state="none").get(GUARD)
    assert in_folder(tmp_path) == ["latest", "v000001"] and wait_until(lambda: nothing_kept(mesh))


def test_missing_keys_are_named(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2).spawn("keepers", Keeper)
    with pytest.raises(ArgumentError, match="nowhere is not a folder"):
        restore(mesh, tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match="has no complete version"):
        restore(mesh, tmp_path)
    checkpoint(mesh, tmp_path).get(GUARD)
    with pytest.raises(ArgumentError, match="no complete version 'v000007'; it has v000001"):
        restore(mesh, tmp_path, version=7)
    mesh.put.call(more=torch.ones(2), step=5).get(GUARD)
    with pytest.raises(ArgumentError, match=r"has no 'more', which the state has; it has 'w', 'step', 'note\.a'"):
        restore(mesh, tmp_path).get(GUARD)
    assert values(mesh.seen.call())[0][1] == 5, "nothing was read"
    other = procs(1).spawn("others", Keeper, 9)
    with pytest.raises(ArgumentError, match=r"'w' has size \(4, 3\) in the checkpoint .* but \(9, 3\) in the state"):
        restore(other, tmp_path).get(GUARD)
    other.put.call(w=None).get(GUARD)
    with pytest.raises(ArgumentError, match=r"'w' is a tensor in the checkpoint .* but NoneType in the state"):
        restore(other, tmp_path).get(GUARD)
    wrongs: list[dict[str, Any]] = [{"state": "states"}, {"keep": 0}, {"timeout": 0}]
    for wrong in wrongs:
        with pytest.raises(ArgumentError):
            checkpoint(mesh, tmp_path, **wrong)
    with pytest.raises(ArgumentError, match="expected a mesh of actors, got dict"):
        checkpoint({}, tmp_path)  # type: ignore[arg-type]


def test_full_disk_keeps_the_previous_version(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2).spawn("keepers", Keeper, 200_000)
    checkpoint(mesh, tmp_path).get(GUARD)
    mesh.limit_files.call(1 << 20).get(GUARD)
    with pytest.raises(ActorError, match=r"File too large while writing to .*v000002.*writing"):
        checkpoint(mesh, tmp_path).get(GUARD)
    assert wait_until(lambda: in_folder(tmp_path) == ["latest", "v000001"])
    mesh.put.call(w=torch.zeros(200_000, 3)).get(GUARD)
    restore(mesh, tmp_path).get(GUARD)
    assert values(mesh.seen.call())[0][0] == 1.0
    assert wait_until(lambda: nothing_kept(mesh))


def test_death_during_write_keeps_previous_version(procs: Any, tmp_path: Path) -> None:
    mesh = procs(3).spawn("keepers", Keeper, 200_000)
    checkpoint(mesh, tmp_path).get(GUARD)
    # Without this, only one of the ranks would write.
    mesh.put.call(own={"a": torch.ones(200_000, 3), "b": torch.ones(200_000, 3)}).get(GUARD)
    mesh.slice(gpus=1).limit_files.call(1 << 20, True).get(GUARD)
    with pytest.raises(SupervisionError, match=r"(?s)keepers.checkpoint\(\) failed: .*rank 1 .*SIGXFSZ"):
        checkpoint(mesh, tmp_path).get(GUARD)
    with pytest.raises(SupervisionError, match=r"keepers.checkpoint\(\)"):
        checkpoint(mesh, tmp_path)
    # The live ranks need no process group for it, which would be broken.
    alive = mesh.slice(gpus=slice(0, 3, 2))
    alive.drop.call("own").get(GUARD)
    assert restore(alive, tmp_path).get(GUARD).endswith("v000001")
    assert checkpoint(alive, tmp_path).get(GUARD).endswith("v000002")
    assert in_folder(tmp_path) == ["latest", "v000001", "v000002"]
    assert wait_until(lambda: nothing_kept(alive))


def test_death_of_first_rank_keeps_previous_version(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2).spawn("keepers", Keeper, 200_000)
    checkpoint(mesh, tmp_path).get(GUARD)
    mesh.slice(gpus=0).limit_files.call(1 << 20, True).get(GUARD)
    with pytest.raises(SupervisionError, match="rank 0"):
        checkpoint(mesh, tmp_path).get(GUARD)
    alive = mesh.slice(gpus=1)
    assert wait_until(lambda: nothing_kept(alive))
    # Leftovers of the dead rank go with the next checkpoint.
    assert any(name.endswith(".writing") for name in in_folder(tmp_path))
    assert checkpoint(alive, tmp_path).get(GUARD).endswith("v000002")
    assert in_folder(tmp_path) == ["latest", "v000001", "v000002"]


def test_checkpoint_can_be_abandoned(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2).spawn("keepers", Synchronous)
    go = tmp_path / "go"
    # The first one does its imports.
    checkpoint(mesh, tmp_path / "first").get(GUARD)
    busy = mesh.slice(gpus=1).wait_for.call(str(go))
    with pytest.raises(CallTimeoutError, match=r"was abandoned while copying the state: rank 1 did not answer"):
        checkpoint(mesh, tmp_path / "run", timeout=0.5).get(GUARD)
    go.touch()
    busy.get(GUARD)
    assert wait_until(lambda: nothing_kept(mesh)) and not (tmp_path / "run").exists()


def test_concurrent_writer_is_rejected(procs: Any, tmp_path: Path) -> None:
    mesh = procs(1).spawn("keepers", Keeper)
    other = NewVersion(str(tmp_path), "ab")
    with pytest.raises(DeviceMeshError, match=f"process {os.getpid()} of .* is writing a checkpoint to"):
        checkpoint(mesh, tmp_path).get(GUARD)
    other.abandon()
    assert checkpoint(mesh, tmp_path).get(GUARD).endswith("v000001")


def test_stopped_mesh_finishes_its_checkpoint(procs: Any, tmp_path: Path) -> None:
    ranks = procs(2)
    mesh = ranks.spawn("keepers", Synchronous)
    mesh.wait_for.broadcast(str(tmp_path / "go"))
    saved = checkpoint(mesh, tmp_path / "run")
    end = mesh.stop()
    (tmp_path / "go").touch()
    # It was sent before the stop.
    assert saved.get(GUARD).endswith("v000001")
    end.get(GUARD)
    with pytest.raises(StoppedError):
        checkpoint(mesh, tmp_path / "run")
    with pytest.raises(StoppedError):
        restore(mesh, tmp_path / "run")


PROGRAM = """
import glob, os, sys
import torch
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.distributed import device_mesh
from monarch._state.checkpoint.api import checkpoint, restore

class Keeper(Actor):
    def __init__(self, value, size):
        from torch.distributed.tensor import Shard, distribute_tensor
        plain = torch.arange(12.0).view(6, 2) * value
        self.state = {"w": distribute_tensor(plain, device_mesh(), [Shard(0)]), "big": torch.ones(size), "step": value}
    def state_dict(self):
        return self.state
    def load_state_dict(self, state):
        self.state = state
    @endpoint
    def seen(self):
        return self.state["w"].full_tensor().sum().item(), self.state["step"], self.state["big"].sum().item()

if __name__ == "__main__":
    what, size, path = sys.argv[1:]
    mesh = this_host().spawn_procs({"gpus": int(size)}).spawn("keeper", Keeper, 1 if what == "save" else 5, 1 << 24)
    if what == "save":
        print(os.path.basename(checkpoint(mesh, path).get(60)), flush=True)
        again = checkpoint(mesh, path)
        while not glob.glob(path + "/*.writing"):
            assert not again.done
        os.kill(os.getpid(), 9)
    print(os.path.basename(restore(mesh, path).get(60)), list(mesh.seen.call().get(60).values()), flush=True)
    print(os.path.basename(checkpoint(mesh, path).get(60)), sorted(os.listdir(path)))
"""


@pytest.mark.slow
def test_new_program_restores_checkpoint_of_killed_one(program: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    killed = program(PROGRAM, "save", "2", str(path))
    assert killed.code == -signal.SIGKILL and killed.out == "v000001\n" and not killed.left, killed.err
    # It was in the middle of the next one.
    assert any(name.endswith(".writing") for name in in_folder(path))
    for number, size in ((2, 1), (3, 3)):
        out = program(PROGRAM, "restore", str(size), str(path)).ok().splitlines()
        seen = [(66.0, 1, float(1 << 24))] * size
        kept = [".lock", "latest", f"v00000{number - 1}", f"v00000{number}"]
        assert out == [f"v00000{number - 1} {seen}", f"v00000{number} {kept}"]


HOSTS = """
import os, sys
import torch
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import device_mesh
from monarch.testing import local_hosts
from monarch._state.checkpoint.api import checkpoint, restore

class Keeper(Actor):
    def __init__(self, value):
        from torch.distributed.tensor import Shard, distribute_tensor
        rows = distribute_tensor(torch.arange(1 << 16).view(-1, 4) * value, device_mesh(), [Shard(0), Shard(1)])
        self.state = {"rows": rows, "names": {f"name {i}": i for i in range(3000)}}
    def state_dict(self):
        return self.state
    def load_state_dict(self, state):
        self.state = state
    @endpoint
    def seen(self):
        return self.state["rows"].full_tensor().sum().item(), sum(self.state["names"].values())

if __name__ == "__main__":
    with local_hosts(2) as hosts:
        one = hosts.spawn_procs({"gpus": 2}).spawn("one", Keeper, 1)
        print(os.path.basename(checkpoint(one, sys.argv[1]).get(60)))
        other = hosts.slice(hosts=slice(1, 2)).spawn_procs({"gpus": 1}).spawn("other", Keeper, 3)
        print(os.path.basename(restore(other, sys.argv[1]).get(60)), list(other.seen.call().get(60).values()))
"""


@pytest.mark.slow
def test_ranks_of_several_hosts_write_together(program: Any, tmp_path: Path) -> None:
    out = program(HOSTS, str(tmp_path / "run")).ok()
    assert out == f"v000001\nv000001 {[(sum(range(1 << 16)), sum(range(3000)))]}\n"
    assert len(list((tmp_path / "run" / "v000001").glob("*.distcp"))) == 4


class Pickled(Actor):
    """An actor whose state is that of pickle."""

    def __init__(self) -> None:
        self.weights = torch.zeros(3)
        self.steps = 0

    @endpoint
    def step(self) -> tuple[list[float], int]:
        self.weights += 1
        self.steps += 1
        return self.weights.tolist(), self.steps

    def __getstate__(self) -> dict[str, Any]:
        return {"weights": self.weights, "steps": self.steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Stateless(Actor):
    pass


def test_actors_are_saved_by_the_methods_of_pickle(procs: Any, tmp_path: Path) -> None:
    mesh = procs(1)
    first = mesh.spawn("first", Pickled)
    for _ in range(2):
        first.step.call().get(30)
    checkpoint(first, tmp_path).get(60)
    second = mesh.spawn("second", Pickled)
    restore(second, tmp_path).get(60)
    assert second.step.call_one().get(30) == ([3.0] * 3, 3)
    with pytest.raises(ArgumentError, match="has no method 'state_dict'; define state_dict and load_state_dict, or __"):
        checkpoint(mesh.spawn("none", Stateless), tmp_path)
