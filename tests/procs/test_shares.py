"""Cores, threads and variables of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._procs.agent.cpu_shares import affinity_plan, threads_plan
from monarch._procs.zygote.load_time import is_load_time, needs_cold_zygote


@given(st.integers(1, 20), st.lists(st.integers(0, 300), min_size=1, max_size=40, unique=True).map(sorted))
def test_cores_are_shared_out_fairly(n: int, cores: list[int]) -> None:
    plan = affinity_plan(n, cores)
    assert len(plan) == n
    if n > len(cores):
        assert all(share == cores for share in plan)
        return
    assert [core for share in plan for core in share] == cores
    sizes = {len(share) for share in plan}
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_no_ranks_have_no_shares() -> None:
    assert affinity_plan(0, [0, 1]) == []


def test_shares_do_not_share_list() -> None:
    plan = affinity_plan(3, [0, 1])
    plan[0].append(9)
    assert plan[1] == [0, 1]


@pytest.mark.parametrize(("n", "cores", "threads"), [(1, 8, 8), (3, 8, 2), (8, 8, 1), (9, 8, 1), (2, 0, 1), (0, 4, 4)])
def test_threads_are_share_of_cores(n: int, cores: int, threads: int) -> None:
    assert threads_plan(n, list(range(cores))) == threads


@pytest.mark.parametrize(
    "key",
    [
        "LD_PRELOAD",
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "MALLOC_ARENA_MAX",
        "GLIBC_TUNABLES",
        "KMP_AFFINITY",
        "LC_ALL",
        "OMP_PROC_BIND",
        "MKL_NUM_THREADS",
        "TORCH_LOGS",
        "PYTORCH_CUDA_ALLOC_CONF",
    ],
)
def test_load_time_variables_need_a_new_zygote(key: str) -> None:
    assert is_load_time(key)


@pytest.mark.parametrize(
    "key",
    [
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHINDUCTOR_CACHE_DIR",
        "PYTHONUNBUFFERED",
        "RANK",
        "HOME",
        "OLD_LD_PRELOAD",
        "GLIBC_TUNABLES_NOT",
    ],
)
def test_other_variables_need_no_new_zygote(key: str) -> None:
    assert not is_load_time(key)


def test_only_load_time_variables_are_selected() -> None:
    assert needs_cold_zygote({"A": "1", "OMP_NUM_THREADS": "2"}) == {}
    assert needs_cold_zygote({"A": "1", "LD_PRELOAD": "x", "MKL_DEBUG": None}) == {
        "LD_PRELOAD": "x",
        "MKL_DEBUG": None,
    }


def test_unchanged_variables_are_not_selected() -> None:
    env = {"LD_PRELOAD": "x", "LD_AUDIT": "y", "LC_ALL": None}
    assert needs_cold_zygote(env, base={"LD_PRELOAD": "x", "LD_AUDIT": "z"}) == {"LD_AUDIT": "y"}
