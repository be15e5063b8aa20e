"""Checkpoints of distributed tensors: whole or absent, read by torch, and loaded at any other size and spec."""

from __future__ import annotations

import copy
import os
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import monarch
from monarch._tensors.checkpoints.versions import versions_in
from monarch.distributed import Mesh
from monarch.exceptions import ActorError, ArgumentError, DeviceMeshError, TensorError

SMALL = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.tokens(tokens)))


def train(parts: dict[str, Any], mesh: Any, steps: range) -> list[float]:
    model, optimizer, schedule = parts.values()
    found: list[float] = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        tokens = monarch.distribute(torch.randint(13, (8,), generator=draw), mesh, None)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    return found


def parts_of(model: nn.Module, make: Any = torch.optim.AdamW) -> dict[str, Any]:
    optimizer = make(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    }


@st.composite
def cases(draw: Any) -> Any:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]))

    def spec() -> Any:
        axes = draw(st.lists(st.sampled_from(["dp", "mp"]), unique=True))
        made: list[Any] = [None] * len(shape)
        for axis in sorted(axes):
            if shape:
                dim = draw(st.integers(0, len(shape) - 1))
                made[dim] = axis if made[dim] is None else (made[dim], axis)
        return made

    return shape, dtype, spec(), spec(), draw(st.sampled_from(["whole", "row", "one"]))


@pytest.fixture(scope="module")
def other_mesh() -> Any:
    made = Mesh(shape=(3, 1), mesh_dim_names=("dp", "mp"))
    assert made.procs.initialized.get(60)
    yield made
    made.stop().get(30)


@SMALL
@given(cases())
def test_tensors_load_at_any_size_and_spec(
    mesh: Any, other_mesh: Any, tmp_path_factory: pytest.TempPathFactory, case: Any
) -> None:
    shape, dtype, first, second, where = case
    path = tmp_path_factory.mktemp("checkpoint")
    value = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5).to(dtype)
    monarch.save({"x": monarch.distribute(value, mesh, first), "n": 3}, path)
    target = {"whole": mesh, "row": other_mesh, "one": mesh.slice(dp=slice(0, 1), mp=slice(0, 1))}[where]
    made = monarch.load(path, mesh=target, plan={"x": second})
    assert made["n"] == 3 and made["x"].spec == [each for each in second] and made["x"].dtype == dtype
    assert torch.equal(made["x"].full_tensor(), value)
    into = {"x": monarch.zeros(*shape, mesh=target, spec=second, dtype=dtype)}
    alias = into["x"].detach()
    assert monarch.load(path, into) is into
    assert torch.equal(alias.full_tensor(), value)


SGD = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "name"), [(torch.optim.AdamW, "exp_avg"), (SGD, "momentum_buffer"), (torch.optim.Adafactor, "variance")]
)
def test_training_goes_on_with_another_mesh_and_plan(
    mesh: Any, other_mesh: Any, tmp_path: Path, make: Any, name: str
) -> None:
    torch.manual_seed(0)
    plain = Net()
    before = parts_of(monarch.module_to_mesh(copy.deepcopy(plain), mesh, "shard"), make)
    train(before, mesh, range(3))
    version = monarch.save(before, tmp_path)
    assert version == str(tmp_path / "v000001")
    expected = train(before, mesh, range(3, 6))
    for target, plan in ((other_mesh, "replicate"), (mesh, {"tokens.weight": [None, "mp"]})):
        after = parts_of(monarch.module_to_mesh(Net(), target, plan), make)
        state = after["optimizer"].state
        assert monarch.load(tmp_path, after) is after
        for parameter in after["model"].parameters():
            if name in state[parameter]:
                assert state[parameter][name].spec == parameter.spec
            step = state[parameter].get("step", torch.tensor(3.0))
            assert type(step) is torch.Tensor and step.item() == 3
        assert after["schedule"].get_last_lr() == [0.005]
        assert train(after, target, range(3, 6)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_and_writes_the_same_format(mesh: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = parts_of(monarch.module_to_mesh(Net(), mesh, "shard"))
    train(state, mesh, range(2))
    version = monarch.save({**state, "step": 2}, tmp_path / "ours")
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters())
    plain(torch.arange(8)).sum().backward()
    optimizer.step()
    read = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    state_dict_loader.load(read, checkpoint_id=version)
    for name, value in state["model"].state_dict().items():
        assert torch.equal(read["model"][name], value.full_tensor())
    moments = state["optimizer"].state[state["model"].tokens.weight]["exp_avg_sq"]
    assert torch.equal(read["optimizer"]["state"][0]["exp_avg_sq"], moments.full_tensor()) and read["step"] == 2
    state_dict_saver.save({"model": plain.state_dict(), "step": 5}, checkpoint_id=str(tmp_path / "torch"))
    other = monarch.module_to_mesh(Net(), mesh, "shard")
    assert monarch.load(tmp_path / "torch", {"model": other, "step": 0})["step"] == 5
    assert torch.equal(other.tokens.weight.full_tensor(), plain.tokens.weight)
    made = monarch.load(tmp_path / "torch", mesh=mesh, plan={"model.tokens.*": [("dp", "mp"), None]})
    assert made["model"]["tokens.weight"].spec == [("dp", "mp"), None] and made["step"] == 5
    running = plain.state_dict()["norm.running_var"]
    assert torch.equal(made["model"]["norm.running_var"].full_tensor(), running)


def test_errors_name_what_is_missing(mesh: Any, tmp_path: Path) -> None:
    x = monarch.ones(4, 2, mesh=mesh, spec=["dp", None])
    monarch.save({"a": {"x": x}, "lr": 0.1}, tmp_path)
    with pytest.raises(ArgumentError, match="nowhere is not a folder on this host"):
        monarch.load(tmp_path / "nowhere", {"x": x})
    with pytest.raises(ArgumentError, match=r"has no 'b.x', which the state has; it has 'a.x', 'lr'"):
        monarch.load(tmp_path, {"b": {"x": x}})
    with pytest.raises(ArgumentError, match=r"'a.x' has size \(4, 2\) in the checkpoint .*, but \(2, 4\) in the state"):
        monarch.load(tmp_path, {"a": {"x": monarch.ones(2, 4, mesh=mesh)}})
    with pytest.raises(ArgumentError, match="'lr' is a tensor in the state, but not in the checkpoint"):
        monarch.load(tmp_path, {"lr": x})
    with pytest.raises(ArgumentError, match="no complete version 'v000007'; it has v000001"):
        monarch.load(tmp_path, {"a": {"x": x}}, version=7)
    with pytest.raises(ArgumentError, match="matches no tensor of the checkpoint"):
        monarch.load(tmp_path, mesh=mesh, plan={"*.y": None})
    with pytest.raises(ArgumentError, match="expected either a state to read into, or mesh="):
        monarch.load(tmp_path)
    with pytest.raises(ArgumentError, match=r"no distributed tensors; use torch\.save"):
        monarch.save({"x": torch.ones(2)}, tmp_path)
    with pytest.raises(ArgumentError, match="expected a dict such as"):
        monarch.save(x, tmp_path)
    with pytest.raises(ArgumentError, match="'pair', of type tuple, contains distributed tensors"):
        monarch.save({"pair": (x, x)}, tmp_path)
    with pytest.raises(ActorError, match="'made', of type Tensor, cannot be saved"):
        monarch.save({"x": x, "made": nn.Linear(2, 2, device="meta").weight}, tmp_path)
    assert os.listdir(tmp_path / "v000001") and x.sum().item() == 8


def test_terms_lists_and_slices_are_saved(mesh: Any, tmp_path: Path) -> None:
    rows = monarch.distribute(torch.arange(8.0).reshape(4, 2), mesh, ["dp", None])
    part = monarch.full((3,), 7.0, mesh=mesh.slice(dp=1), spec=["mp"])
    monarch.save({"terms": rows.sum(0), "list": [rows, {"part": part}], "plain": torch.arange(3)}, tmp_path)
    made = monarch.load(tmp_path, mesh=mesh)
    assert made["terms"].tolist() == [12, 16] and made["list"][1]["part"].tolist() == [7, 7, 7]
    state = {"plain": torch.zeros(3, dtype=torch.int64), "list": [monarch.zeros(4, 2, mesh=mesh, spec=[None, "mp"])]}
    monarch.load(tmp_path, state)
    assert state["plain"].tolist() == [0, 1, 2] and torch.equal(state["list"][0].full_tensor(), rows.full_tensor())
    # A view whose values the ranks have copied, and one in another order of dims.
    whole = monarch.zeros(2, 4, mesh=mesh, spec=["dp", None])
    monarch.load(tmp_path, {"list": {0: whole.t()}})
    assert torch.equal(whole.full_tensor(), rows.full_tensor().t())


def test_optimizer_goes_back_to_before_its_first_step(mesh: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = parts_of(monarch.module_to_mesh(Net(), mesh, "shard"))
    monarch.save(state, tmp_path)
    first = train(state, mesh, range(3))
    assert state["optimizer"].state
    monarch.load(tmp_path, state)
    assert not state["optimizer"].state
    assert train(state, mesh, range(3)) == first


def test_unreadable_files_leave_no_value_until_a_later_load(mesh: Any, tmp_path: Path) -> None:
    x = monarch.ones(8, mesh=mesh, spec=["dp"])
    other = monarch.ones(8, mesh=mesh, spec=["dp"])
    good = monarch.save({"x": x * 2}, tmp_path)
    bad = Path(monarch.save({"x": x * 3}, tmp_path))
    for each in bad.glob("*.distcp"):
        if each.name.startswith("__2"):
            os.truncate(each, 10)
    with pytest.raises(TensorError, match="load failed on ranks 2-3"):
        monarch.load(tmp_path, {"x": x})
    with pytest.raises(TensorError, match="load failed"):
        x.sum().item()
    assert other.sum().item() == 8
    monarch.load(good, {"x": x})
    assert x.sum().item() == 16


def test_save_refuses_tensors_without_value(mesh: Any, tmp_path: Path) -> None:
    wrong = F.embedding(monarch.distribute(torch.tensor([0, 9]), mesh, None), monarch.ones(3, 2, mesh=mesh))
    with pytest.raises(TensorError, match="embedding failed"):
        monarch.save({"wrong": wrong}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_async_save_has_the_values_of_the_call(mesh: Any, tmp_path: Path) -> None:
    x = monarch.zeros(1000, mesh=mesh, spec=["dp"])
    saved = [monarch.async_save({"x": x}, tmp_path, keep=3)]
    for _ in range(2):
        x += 1
        saved.append(monarch.async_save({"x": x}, tmp_path, keep=3))
    x += 10
    for value, version in enumerate(each.get() for each in saved):
        assert monarch.load(version, mesh=mesh)["x"].sum().item() == 1000 * value


@pytest.mark.slow
def test_lost_parts_come_back_from_the_checkpoint(shared_mesh: Any, tmp_path: Path) -> None:
    mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    state = parts_of(monarch.module_to_mesh(Net(), mesh, "shard"))
    train(state, mesh, range(3))
    monarch.save(state, tmp_path)
    expected = train(state, mesh, range(3, 6))
    kept = monarch.ones(4, mesh=mesh)
    os.kill(mesh.execute(os.getpid).values()[1], signal.SIGKILL)
    with pytest.raises(DeviceMeshError):
        train(state, mesh, range(6, 7))
    monarch.heal_mesh(mesh)
    with pytest.raises(DeviceMeshError, match="load it from a checkpoint"):
        state["model"].tokens.weight.detach().sum().item()
    assert kept.sum().item() == 4
    monarch.load(tmp_path, state)
    assert train(state, mesh, range(3, 6)) == pytest.approx(expected, rel=1e-5)
    mesh.stop().get(30)


def limit_files(rank: int) -> None:
    """A write of more than 1 MiB kills this rank."""
    if monarch.current_rank().rank == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_death_in_a_save_leaves_the_last_whole_version(shared_mesh: Any, tmp_path: Path, rank: int) -> None:
    mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
    x = monarch.ones(1 << 20, mesh=mesh, spec=["dp"])
    first = monarch.save({"x": x}, tmp_path)
    x += 1
    mesh.execute(limit_files, rank)
    with pytest.raises(DeviceMeshError, match=f"rank {rank} .*SIGXFSZ"):
        monarch.save({"x": x}, tmp_path)
    assert versions_in(str(tmp_path)) == ["v000001"]
    monarch.heal_mesh(mesh)
    monarch.load(tmp_path, {"x": x})
    assert x.sum().item() == 1 << 20
    assert monarch.save({"x": x + 4}, tmp_path) == str(tmp_path / "v000002") != first
    assert sorted(each.name for each in tmp_path.iterdir()) == [".lock", "latest", "v000001", "v000002"]
    mesh.stop().get(30)


PROGRAM = """
import glob, os, sys
import monarch
from monarch.distributed import Mesh

if __name__ == "__main__":
    path = sys.argv[1]
    mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
    x = monarch.ones(1 << 23, mesh=mesh, spec=["dp"])
    monarch.save({"x": x}, path)
    again = monarch.async_save({"x": x * 2}, path)
    while not glob.glob(path + "/*.writing"):
        assert not again.done
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_killed_program_leaves_the_last_whole_version(mesh: Any, program: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    killed = program(PROGRAM, str(path))
    assert killed.code == -signal.SIGKILL and not killed.left, killed.err
    assert any(each.name.endswith(".writing") for each in path.iterdir()) and versions_in(str(path)) == ["v000001"]
    assert monarch.load(path, mesh=mesh, plan={"x": ["mp"]})["x"].sum().item() == 1 << 23
