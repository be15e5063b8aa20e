"""The process groups of a rank, whoever creates them: their sockets, connections, and the cores of their threads.

A thread inherits the cores of its creator, and a rank's code is bound to its share of them. With gloo's threads bound
as well, two ranks on two cores make a quarter fewer training steps.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from monarch._procs.os.helpers import as_helper
from monarch._tensors.collectives.connections import answer_listening, of_collectives, open_sockets
from monarch._tensors.torch_compat import release_names, wrap_group_maker


class GroupSockets:
    """The sockets of process groups, found by comparing the open ones before and after each creation."""

    def __init__(self) -> None:
        self.complete = False
        """Whether all groups of this process are created under ``opening``. Set once, before user code runs."""
        self._lock = threading.Lock()
        # Under _lock, both.
        self._opened: set[tuple[int, int]] = set()
        self._making: list[tuple[set[tuple[int, int]], int]] = []
        """For each group under creation, the sockets from before, and the number of members."""

    @contextmanager
    def opening(self, members: int) -> Generator[None]:
        """Note the sockets that are opened meanwhile, for a group with so many members."""
        before = open_sockets()
        with self._lock:
            self._making.append((before, members))
        try:
            yield
        finally:
            now = open_sockets()
            with self._lock:
                self._making = [each for each in self._making if each[0] is not before]
                self._opened = (self._opened & now) | (now - before)

    def all(self) -> set[tuple[int, int]]:
        """Return the sockets of all groups, those under creation included."""
        with self._lock:
            making = list(self._making)
            opened = set(self._opened)
        return opened.union(*(open_sockets() - before for before, _ in making))

    def answer(self) -> None:
        """Free the threads that wait for members to connect to a group under creation."""
        with self._lock:
            making = list(self._making)
        for before, members in making:
            answer_listening(open_sockets() - before, members)


on_made: list[Callable[[Any], None]] = []
"""Called with each new group; changed by threads that run programs, in atomic steps."""
on_renewed: list[Callable[[], object]] = []
"""Called when groups have got new connections, in the thread that has made them. Set up likewise."""
_sockets = GroupSockets()
_free_threads = False
_gpu: int | None = None
"""See ``connect_with``. Written by the thread that forms a default group, before it has any."""


def begin_observing(free_threads: bool) -> None:
    """Note the sockets of each group that this process creates, before user code runs.

    Args:
        free_threads: whether the threads of groups run on any core that helps the rank, not only on its own.
    """
    global _free_threads
    _free_threads = free_threads
    _sockets.complete = observe_groups()


def observe_groups() -> bool:
    """Note the sockets of each group that is created from now on; return False if torch.distributed is not imported."""
    if not wrap_group_maker(_observed):
        return False
    # Here, since the receiving thread looks for collectives with them, and must not import.
    importlib.import_module("monarch._tensors.collectives.waiting")
    importlib.import_module("monarch._tensors.collectives.any_rank").observe_receives()
    importlib.import_module("monarch._tensors.collectives.messages").observe_messages()
    return True


def connect_with(gpu: int | None) -> None:
    """Let NCCL connect the members of each group when it is created, so that their sockets are known from then on.

    Args:
        gpu: number of the GPU whose tensors its collectives have; None lets the first collective connect.
    """
    global _gpu
    _gpu = gpu


def noted_sockets() -> set[tuple[int, int]]:
    """Return the sockets of the groups that were created here since groups are observed."""
    return _sockets.all()


def free_making() -> None:
    """Free the threads that make groups, once the connections of these are shut down."""
    _sockets.answer()


def all_sockets(hosts: Sequence[str]) -> set[tuple[int, int]]:
    """Return the sockets of all groups; if some may not have been observed, those that may be of a group.

    Args:
        hosts: addresses of the hosts of the mesh.
    """
    return _sockets.all() if _sockets.complete else of_collectives(hosts)


def _observed(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_observed(*args: Any, **kwargs: Any) -> Any:
        release_names()
        # By torch, as the first argument.
        members = int(args[0] if args else kwargs["group_size"])
        with as_helper() if _free_threads else nullcontext(), _sockets.opening(members):
            made = make(*args, **kwargs)
            if _gpu is not None:
                from monarch._tensors.collectives.nccl import connect_at_once

                connect_at_once(made[0], _gpu)
        for hold in list(on_made):
            hold(made[0])
        return made

    return make_observed
