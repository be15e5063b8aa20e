"""Checkpoints: the state of actors on disk, as versions in a folder, and back again on a mesh of any size.

The program coordinates: the actors copy their state in the order of their calls, the ranks report their parts, the
first rank opens a version, all write their parts, and the first one publishes the version. Only the copies wait for
busy actors, and no step needs a process group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from monarch._actors.actor import Actor
from monarch._actors.ports import Port
from monarch._core.kinds import is_a
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.ask import ask, endpoint_of
from monarch._meshes.inside import check_alive, member_at, node_of, state_of, targets_of
from monarch._meshes.procs.events import progress
from monarch._node.future import Future, Promise, in_thread, missing_of, when_done
from monarch._node.replies.gather import Gather, is_gather
from monarch._node.services.frame import ask_frame
from monarch._node.services.registry import request
from monarch._state.checkpoint import worker
from monarch._state.contract import DICTS, Pair, method_of, saved_by
from monarch.exceptions import ArgumentError, CallTimeoutError, DeviceMeshError, MonarchError

_STEPS = 5
"""Steps of a checkpoint, for views of its progress."""
_ENDING = 5.0
"""Seconds to remove an incomplete version."""
_lock = threading.Lock()
_last: dict[str, Promise[str]] = {}
"""The last unfinished checkpoint of each folder; the next one waits for it. Under _lock."""


def checkpoint(
    mesh: ActorMesh | Actor,
    path: str | os.PathLike[str],
    *,
    state: str = "state_dict",
    keep: int = 2,
    timeout: float = 600.0,
) -> Future[str]:
    """Write the state of actors to disk as a new version in a folder, while they continue working.

    Each actor copies its state into CPU memory when it reaches this call in its queue, and continues at once; its rank
    writes the copy in a thread. Versions are atomic: whatever fails, earlier ones stay usable. A second checkpoint to
    the same folder copies the state at once and is written after the first.
    An endpoint of these actors must not wait for it, since its own actor must copy its state meanwhile.

    Args:
        mesh: actors, all of a mesh or a slice.
        path: the folder, visible to all hosts of the mesh; created if missing.
        state: a method of the actors, endpoint or not, that returns a nested dict of tensors, DTensors and values that
            can be pickled; of a class without ``state_dict``, ``__getstate__`` if it has ``__setstate__`` too. A key of
            several ranks counts as replicated, unless it is a DTensor: one copy is kept.
        keep: how many versions stay in the folder.
        timeout: seconds in total.

    Returns:
        A future of the path of the complete version. Its errors: ActorError for a state that cannot be saved or a full
        disk, SupervisionError if a rank dies, DeviceMeshError if another program is writing there, and
        CallTimeoutError.

    Raises:
        ArgumentError: ``mesh`` is not an actor mesh, or its class has no such method.
        StoppedError, SupervisionError: the mesh was stopped, or ranks of it have died.
    """
    actors, (state, _) = _check(mesh, timeout, (state, DICTS[1]), 1)
    if type(keep) is not int or keep < 1:
        raise ArgumentError(f"keep: expected an int of at least 1, got {keep!r}")
    return Save(actors, folder_of(path), state, (), keep, timeout).future


def restore(
    mesh: ActorMesh | Actor,
    path: str | os.PathLike[str],
    *,
    state: str = "state_dict",
    load: str = "load_state_dict",
    version: str | int | None = None,
    timeout: float = 600.0,
) -> Future[str]:
    """Read a version of ``checkpoint`` into the actors of a mesh of any size and layout.

    Each actor does so when it comes to this among its calls: what ``state`` returns says what is read, tensors are read
    in place, and ``load`` is called with all of it. Names missing in the state are not read: an optimizer that has
    made no step yet has none, so take its state by torch.distributed.checkpoint.state_dict.

    Args:
        mesh: actors, all of a mesh or a slice.
        path: the path of the folder.
        state: the method that returns the state.
        load: the method that takes it; ``__setstate__`` as above.
        version: the name or the number of a version; None for the latest.
        timeout: seconds in total.

    Returns:
        The path of the version that was read. Its errors: ArgumentError if the version lacks something that the state
        has, ActorError, SupervisionError and CallTimeoutError.

    Raises:
        ArgumentError: ``mesh`` is not an actor mesh, its class has no such method, or the version does not exist.
        StoppedError, SupervisionError: the mesh was stopped, or ranks of it have died.
    """
    actors, (state, load) = _check(mesh, timeout, (state, load), 2)
    until = time.monotonic() + timeout
    folder = find(actors, folder_of(path), version, timeout)
    answer = send(actors, "restore", worker.load, folder, state, load)

    def wait() -> str:
        answer.get(max(0.0, until - time.monotonic()))
        return folder

    return in_thread(node_of(actors), "restore", wait)


def folder_of(path: str | os.PathLike[str]) -> str:
    """Return an absolute path, which is the same for all ranks.

    Raises:
        ArgumentError: it is not a path.
    """
    if not is_a(path, str, os.PathLike):
        raise ArgumentError(f"path: expected the path of a folder, got {path!r}")
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


def find(mesh: ActorMesh, path: str, version: str | int | None, timeout: float) -> str:
    """Return the path of a version, as the first rank of a mesh sees it."""
    check_alive(mesh, "restore")
    return _steps(member_at(mesh, 0), "restore", "", "find", lambda _: (path, version)).get(timeout)[0]


def send(mesh: ActorMesh, what: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Make all actors of a mesh call a function with themselves, in the order of their calls."""
    check_alive(mesh, what)
    answer = endpoint_of(mesh, function).call(*args)
    if is_gather(answer):
        # Errors name the user's call.
        answer.method = what
    return answer


def _check(mesh: Any, timeout: float, methods: Pair, count: int) -> tuple[ActorMesh, Pair]:
    """Return the actors, and the methods by which they save; the first ones must exist."""
    if not is_a(mesh, ActorMesh):
        raise ArgumentError(f"mesh: expected a mesh of actors, got {type(mesh).__name__}")
    actors = cast("ActorMesh", mesh)
    pair = saved_by(state_of(actors).cls, *methods)
    for method in pair[:count]:
        method_of(state_of(actors).cls, method)
    if not (is_a(timeout, int, float) and timeout > 0):
        raise ArgumentError(f"timeout: expected seconds above 0, got {timeout!r}")
    return actors, pair


class Save:
    """One checkpoint, coordinated by the program; the copies are requested at once.

    Args:
        mesh: the actors.
        path: the path of the folder.
        state: the method that returns the state, or a function as ``module:name`` that gets the actor.
        args: more arguments of it.
        keep: how many versions stay.
        timeout: seconds in total.
        by_content: whether values under one key that differ between ranks are all kept.
    """

    def __init__(
        self,
        mesh: ActorMesh,
        path: str,
        state: str,
        args: tuple[Any, ...],
        keep: int,
        timeout: float,
        by_content: bool = False,
    ) -> None:
        self._mesh, self._path, self._keep, self._by_content = mesh, path, keep, by_content
        self._seconds, self._until = timeout, time.monotonic() + timeout
        self._token = secrets.token_hex(8)
        self._stage = "copying the state"
        self._steps_done = 0
        self.names: list[list[str]] = []
        """Of each rank, what its state has at the top, once the copies are taken."""
        node = node_of(mesh)
        try:
            self._copies = send(mesh, "checkpoint", worker.stage, node.proc, self._token, state, args)
            with _lock:
                self._before = _last.get(path)
                self.future: Promise[str] = in_thread(node, "checkpoint", self._run)
                """Done when the version is complete; its path."""
                _last[path] = self.future
            when_done(self.future, self._leave)
        except BaseException:
            # An interrupt comes once the ranks have been asked.
            self._end(None)
            raise

    def wait_for_copies(self) -> None:
        """Wait until all actors have copied their state; errors are those of the future."""
        with contextlib.suppress(CallTimeoutError):
            self._copies.exception(max(0.0, self._until - time.monotonic()))

    def _run(self) -> str:
        first, count = member_at(self._mesh, 0), len(self._mesh)
        try:
            self.names = list(self._get(self._copies).values())
            self._stage = f"waiting for another checkpoint to {self._path}"
            if self._before is not None:
                self._wait(self._before)
            self._stage = "planning what each rank writes"
            have = self._all("plan", lambda place: (self._by_content, place))
            (folder, plans), *_ = self._get(self._steps(first, "begin", lambda _: (self._path, have)))
            self._stage = f"writing {count} shards to {folder}"
            written = self._all("write", lambda place: (folder, plans[place]))
            return self._get(self._steps(first, "finish", lambda _: (written, self._keep)))[0]
        except BaseException:
            # A retry finds the folder free; if the first rank is dead, it is free anyway.
            with contextlib.suppress(MonarchError):
                self._steps(first, "give up", lambda _: ()).get(_ENDING)
            raise
        finally:
            progress(self._mesh, "checkpoint", self._steps_done, _STEPS, "steps", True)
            # After the copies, so that a rank still copies one that others wait for; a later one drops its own.
            when_done(self._copies, self._end)

    def _get(self, future: Future[Any]) -> Any:
        self._wait(future)
        self._steps_done += 1
        progress(self._mesh, "checkpoint", self._steps_done, _STEPS, "steps", False)
        return future.get()

    def _wait(self, future: Future[Any]) -> None:
        try:
            future.exception(max(0.0, self._until - time.monotonic()))
        except CallTimeoutError:
            name, missing = state_of(self._mesh).name, missing_of(future)
            raise CallTimeoutError(
                f"the checkpoint of {name} to {self._path} was not complete within {self._seconds:g} s: it "
                f"was abandoned while {self._stage}{missing}; earlier versions are unchanged"
            ) from None

    def _all(self, step: str, args: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        return self._get(self._steps(self._mesh, step, args))

    def _steps(self, mesh: ActorMesh, step: str, args: Callable[[int], tuple[Any, ...]]) -> Future[list[Any]]:
        targets = targets_of(mesh)
        if mesh is self._mesh and len(targets.peers) != len(self.names):
            raise DeviceMeshError(
                f"the checkpoint of {state_of(mesh).name} to {self._path} was abandoned while {self._stage}, since the "
                f"mesh was resized from {len(self.names)} to {len(targets.peers)} ranks; take it again. Earlier "
                f"versions are unchanged"
            )
        return _steps(mesh, "checkpoint", self._token, step, args, targets)

    def _end(self, _: object) -> None:
        # A stop or death meanwhile has ended it too.
        with contextlib.suppress(MonarchError):
            ask(self._mesh, worker.abandon, self._token)

    def _leave(self, _: object) -> None:
        with _lock:
            if _last.get(self._path) is self.future:
                del _last[self._path]


def _steps(
    mesh: ActorMesh,
    what: str,
    token: str,
    step: str,
    args: Callable[[int], tuple[Any, ...]],
    targets: Any = None,
) -> Future[list[Any]]:
    """Run a step on the ranks of a mesh, outside their actors; return the answers by position.

    Args:
        mesh: its actors.
        what: the ranks do it for, in errors.
        token: the token of the checkpoint.
        step: its name.
        args: gives the arguments for a position.
        targets: the processes of the mesh; None for the present ones.
    """
    node = node_of(mesh)
    targets = targets or targets_of(mesh)
    gather: Gather[Any] = Gather(
        node, targets.peers, mesh.extent, state_of(mesh).name, what, lambda _, values: list(values)
    )
    for place, peer in enumerate(targets.peers):
        # In one piece: a service gets no separate buffers.
        port: Port[Any] = Port(node, node.proc, gather.port)
        peer.send(ask_frame(node, request(worker.step, port, place, token, step, *args(place)), 0))
    gather.check()
    return gather
