"""Shared memory created by a rank's code is removed at its end, by cleanup processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._procs.os.shared_names import remove_names
from monarch.actor import Actor, endpoint
from monarch.exceptions import MonarchError

BOUND = 15.0
"""Seconds; torch_shm_manager alone waits for 2 s before it removes anything."""


class Sharer(Actor):
    """Create shared memory in each usual way, and keep it."""

    @endpoint
    def share(self, how: str) -> None:
        getattr(self, f"_{how}")()

    def _memory(self) -> None:
        from multiprocessing.shared_memory import SharedMemory

        self.kept: Any = SharedMemory(create=True, size=1000)

    def _semaphore(self) -> None:
        import multiprocessing

        self.kept = multiprocessing.get_context("spawn").Queue()

    def _tensor(self) -> None:
        import torch

        torch.multiprocessing.set_sharing_strategy("file_system")
        self.kept = torch.zeros(100_000).share_memory_()

    def _loader(self) -> None:
        import torch
        from torch.utils.data import DataLoader

        torch.multiprocessing.set_sharing_strategy("file_system")
        data: Any = torch.randn(100, 1000)
        self.kept = iter(DataLoader(data, num_workers=2, batch_size=10))
        for _ in range(2):
            # One for each worker: a manager whose first process is killed as it starts leaves its folder.
            next(self.kept)

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def die_with_tracker(self) -> None:
        from multiprocessing import resource_tracker

        os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # pyright: ignore
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def hand_over(self) -> str:
        """Create shared memory that must outlive this rank."""
        from multiprocessing import resource_tracker

        self._memory()
        resource_tracker.unregister(self.kept._name, "shared_memory")
        return self.kept.name


@pytest.mark.parametrize("end", ["stop", "die"])
@pytest.mark.parametrize("how", ["memory", "semaphore", "tensor", "loader"])
def test_shared_memory_of_rank_ends_with_it(procs: Callable[..., Any], tmp_path: Path, how: str, end: str) -> None:
    mesh = procs(1, env={"TMPDIR": str(tmp_path)})
    sharer = mesh.spawn("sharer", Sharer)
    before = set(os.listdir("/dev/shm"))
    sharer.share.call_one(how).get(timeout=60)
    kind = {"memory": "psm_", "semaphore": "sem.mp-"}.get(how, "torch_")
    made = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(kind)}
    assert made
    if end == "die":
        with pytest.raises(MonarchError):
            sharer.die.call_one().get(timeout=20)
    else:
        mesh.stop().get(timeout=30)
    assert wait_until(lambda: not made & set(os.listdir("/dev/shm")), BOUND), made
    assert wait_until(lambda: not [*tmp_path.glob("torch-shm-dir-*")], BOUND), [*tmp_path.iterdir()]


@pytest.mark.parametrize("how", ["memory", "semaphore"])
def test_shared_memory_is_removed_if_tracker_dies_with_its_rank(procs: Callable[..., Any], how: str) -> None:
    mesh = procs(1)
    sharer = mesh.spawn("sharer", Sharer)
    before = set(os.listdir("/dev/shm"))
    sharer.share.call_one(how).get(timeout=60)
    kind = {"memory": "psm_", "semaphore": "sem.mp-"}[how]
    made = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(kind)}
    assert made
    with pytest.raises(MonarchError):
        sharer.die_with_tracker.call_one().get(timeout=20)
    assert wait_until(lambda: not made & set(os.listdir("/dev/shm")), BOUND), made


def test_shared_memory_handed_over_by_rank_stays(procs: Callable[..., Any]) -> None:
    mesh = procs(2)
    sharer = mesh.spawn("sharer", Sharer)
    handed = Path("/dev/shm", sharer.slice(gpus=0).hand_over.call_one().get(timeout=60))
    before = set(os.listdir("/dev/shm"))
    sharer.slice(gpus=0).share.call_one("memory").get(timeout=60)
    made = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("psm_")}
    try:
        with pytest.raises(MonarchError):
            sharer.slice(gpus=0).die_with_tracker.call_one().get(timeout=20)
        assert wait_until(lambda: not made & set(os.listdir("/dev/shm")), BOUND), made
        assert handed.exists()
    finally:
        handed.unlink()


def test_names_of_living_ranks_stay(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    for proc in ("dead", "alive"):
        own = tmp_path / f"{proc}.names"
        own.mkdir()
        for name in (f"psm_{proc}", "gone"):
            (own / name).touch()
        (memory / f"psm_{proc}").touch()
    remove_names(str(tmp_path), ["host/alive"], str(memory))
    assert os.listdir(memory) == ["psm_alive"] and not (tmp_path / "dead.names").exists()
    remove_names(str(tmp_path), [], str(memory))
    assert not os.listdir(memory) and sorted(os.listdir(tmp_path)) == ["memory"]
