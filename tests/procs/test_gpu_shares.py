"""Which GPUs each mesh of a host uses, and what its ranks see of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from light import LIGHT
from monarch._procs.agent.gpu_shares import GpuShares, arrange, variables

FOUR = ["0", "1", "2", "3"]
PROGRAM = """
import os
from monarch.actor import Actor, endpoint, this_host

class Rank(Actor):
    @endpoint
    def seen(self):
        names = "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CUDA_DEVICE_ORDER"
        return [os.environ.get(name) for name in names]

def show(count, **options):
    mesh = this_host().spawn_procs({"procs": count}, **options)
    print(*(":".join(map(str, each)) for each in mesh.spawn("rank", Rank).seen.call().get(60).values()))
    return mesh

first = show(2)
second = show(2)
third = show(1)
alone = show(2, env={"MONARCH_ISOLATE_GPUS": "1"})
given = show(2, env={"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
for mesh in (first, second, third, alone, given):
    mesh.stop().get(60)
last = show(3)
"""


@given(st.lists(st.text("abc", min_size=1), unique=True, min_size=1), st.integers(1, 9), st.data())
def test_the_least_used_gpus_come_first(names: list[str], count: int, data: Any) -> None:
    loads = data.draw(st.dictionaries(st.sampled_from(names), st.integers(0, 3)))
    found = arrange(names, count, loads)
    own, others = found[:count], found[count:]
    assert sorted(found) == sorted(names)
    assert not others or max(loads.get(name, 0) for name in own) <= min(loads.get(name, 0) for name in others)
    assert own == sorted(own, key=names.index) and others == sorted(others, key=names.index)


def test_meshes_use_different_gpus_while_there_are_enough() -> None:
    shares = GpuShares()
    assert shares.order("a", "a", FOUR, 2) == FOUR
    assert shares.order("b", "b", FOUR, 2) == ["2", "3", "0", "1"]
    assert shares.sharers("a") == shares.sharers("b") == {}
    assert shares.order("c", "c", FOUR, 1) == FOUR
    assert shares.sharers("c") == {"0": ["c", "a"]} and shares.sharers("a") == {"0": ["a", "c"]}
    # More ranks than GPUs.
    shares.order("d", "d", FOUR[:2], 3)
    assert shares.sharers("d")["0"][:2] == ["d", "d"]
    # A mesh keeps its GPUs when ranks are replaced, and gives them back with its last process.
    assert shares.order("b", "b", FOUR, 2) == ["2", "3", "0", "1"]
    shares.keep(["host/b.0"])
    assert shares.sharers("b") == {} and shares.order("e", "e", FOUR, 2) == FOUR


def test_variables_are_set_only_where_needed() -> None:
    assert variables(FOUR, FOUR, 1, False) == {}
    assert variables(["2", "3", "0", "1"], FOUR, 1, False) == {"CUDA_VISIBLE_DEVICES": "2,3,0,1"}
    assert variables(["2", "3", "0", "1"], FOUR, 1, True)["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.slow
def test_ranks_see_all_gpus_and_count_as_under_torchrun(program: Callable[..., Any]) -> None:
    ran = program(LIGHT + PROGRAM, CUDA_VISIBLE_DEVICES="0,1,2,3")
    by_bus = ":PCI_BUS_ID"
    assert ran.ok().splitlines() == [
        " ".join(each + by_bus for each in ("0,1,2,3:0:2:0", "0,1,2,3:1:2:0")),
        " ".join(each + by_bus for each in ("2,3,0,1:0:2:0", "2,3,0,1:1:2:0")),
        "0,1,2,3:0:1:0" + by_bus,
        " ".join(each + by_bus for each in ("1:0:2:0", "2:1:2:0")),
        "3:0:2:0:FASTEST_FIRST 3:1:2:0:FASTEST_FIRST",
        " ".join(each + by_bus for each in ("0,1,2,3:0:3:0", "0,1,2,3:1:3:0", "0,1,2,3:2:3:0")),
    ]
