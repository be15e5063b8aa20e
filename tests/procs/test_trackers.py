"""Shared memory that the code of a rank makes is removed at its end, by those that tidy up after processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, endpoint
from monarch.exceptions import MonarchError

BOUND = 15.0
"""Seconds; torch_shm_manager alone waits for 2 s before it removes anything."""


class Sharer(Actor):
    """Makes shared memory in each way that is usual, and keeps it."""

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
            # Of each worker one: a manager whose first process is killed as it starts leaves its folder.
            next(self.kept)

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", ["stop", "die"])
@pytest.mark.parametrize("how", ["memory", "semaphore", "tensor", "loader"])
def test_shared_memory_of_a_rank_ends_with_it(procs: Callable[..., Any], tmp_path: Path, how: str, end: str) -> None:
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
