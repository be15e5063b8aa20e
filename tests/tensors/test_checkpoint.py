"""Distributed checkpoints: written by the ranks of one mesh, and read by ranks of a mesh of another size."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch.actor import Actor, current_rank, current_size, endpoint
from monarch.distributed import device_mesh
from tensors.training import STEPS, assert_golden, make_net, make_optimizer, train

GUARD = 60
"""Seconds after which something counts as hanging."""


class Saver(Actor):
    """A model and its optimizer, sharded over all ranks or whole on a single one, saved to and restored from a
    folder."""

    def __init__(self, sharded: bool) -> None:
        self.model: Any = make_net()
        if sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=device_mesh())
        self.optimizer = make_optimizer(self.model)

    def _parts(self, full: bool = False) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        model, optimizer = get_state_dict(
            self.model, self.optimizer, options=StateDictOptions(full_state_dict=full, cpu_offload=False)
        )
        return {"model": model, "optimizer": optimizer}

    @endpoint
    def train(self, first: int, end: int) -> list[float]:
        size = current_size()["gpus"]
        return train(self.model, self.optimizer, range(first, end), current_rank().rank, size)

    @endpoint
    def save(self, folder: str) -> None:
        checkpoint: Any = import_module("torch.distributed.checkpoint")

        checkpoint.save(self._parts(), checkpoint_id=folder)

    @endpoint
    def save_meanwhile(self, folder: str) -> None:
        checkpoint: Any = import_module("torch.distributed.checkpoint")

        checkpoint.async_save(self._parts(), checkpoint_id=folder).result()

    @endpoint
    def load(self, folder: str) -> None:
        checkpoint: Any = import_module("torch.distributed.checkpoint")
        from torch.distributed.checkpoint.state_dict import set_state_dict

        parts = self._parts()
        checkpoint.load(parts, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])

    @endpoint
    def whole(self) -> dict[str, Any]:
        """Return the whole model and optimizer state, by full names."""
        parts = self._parts(full=True)
        states = parts["optimizer"]["state"]
        return {
            **parts["model"],
            **{
                f"{name}.{key}": torch.as_tensor(value)
                for name, state in states.items()
                for key, value in state.items()
            },
        }


def saver(mesh: Any, sharded: bool = True) -> Any:
    return mesh.spawn("saver", Saver, sharded)


def values(future: Any) -> list[Any]:
    return list(future.get(timeout=GUARD).values())


@pytest.mark.slow
def test_checkpoint_of_four_ranks_loads_on_two_and_one(procs: Any, tmp_path: Path) -> None:
    four, before = saver(procs(4)), STEPS // 2
    begun = values(four.train.call(0, before))
    at_once, meanwhile = str(tmp_path / "at once"), str(tmp_path / "meanwhile")
    values(four.save.call(at_once))
    values(four.save_meanwhile.call(meanwhile))
    for folder in (at_once, meanwhile):
        assert len(list(Path(folder).glob("*.distcp"))) == 4
    saved = values(four.whole.call())[0]
    assert len(saved) == 4 * 4, "each parameter, and three values of the optimizer for it"
    for size, sharded, folder in [(2, True, at_once), (1, True, meanwhile), (1, False, at_once)]:
        other = saver(procs(size), sharded)
        values(other.load.call(folder))
        for loaded in values(other.whole.call()):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], value) for name, value in saved.items())
        # It continues where the four were.
        rest = torch.tensor(values(other.train.call(before, STEPS)), dtype=torch.double).mean(0).tolist()
        assert_golden([each + rest for each in begun])
