"""Which backend a group has, by the devices of its ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from monarch._tensors.collectives.world import BOTH, JoinInfo, choose_backend, torchrun_variables


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["cpu", "cpu"], "gloo"),
        (["cuda a 0", "cuda a 1"], BOTH),
        (["cuda a 0", "cuda b 0"], BOTH),
        # NCCL needs a GPU for each rank.
        (["cuda a 0", "cuda a 0"], "gloo"),
        (["cuda a 0", "cpu"], "gloo"),
    ],
)
def test_backend_matches_the_devices(devices: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_backend(devices) == expected


def test_backend_is_gloo_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert choose_backend(["cuda a 0", "cuda a 1"]) == "gloo"


def test_torchrun_variables_match_the_mesh() -> None:
    found = torchrun_variables(JoinInfo(5, 8, 1, 4, "node0", 29500, "node1", "cpu"))
    assert {key: found[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
    }
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["GROUP_WORLD_SIZE"]) == ("node0", "29500", "2")
