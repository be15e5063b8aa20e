"""The context of running code: its actor, and the actor's place in the view that was addressed."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from monarch._actors.ending import fail_itself, stop_itself
from monarch._actors.running import ActorLike, current
from monarch._core.shapes.extent import Extent, Point
from monarch._core.shapes.region import Region
from monarch._meshes.identity import Creator, class_name_of, path_of, root
from monarch._node.current import open_node
from monarch._wire import messages as m
from monarch.exceptions import MonarchError

if TYPE_CHECKING:
    from monarch._meshes.procs.proc_mesh import ProcMesh

_NO_REASON = "no reason given"


class ActorInstance:
    """Identity of an actor, or of the program itself.

    Attributes:
        name: name of its mesh; ``root`` for the program.
        class_name: module and name of its class.
        actor_id: key of its mesh and proc id.
        proc_id: proc id, which is unique for each incarnation of a process.
        rank: its Point in the spawned mesh, which is its identity in every view.
        creator: the actor or program that spawned it, with ``name``, ``rank`` and its own ``creator``; None for the
            program.
    """

    def __init__(self, mailbox: ActorLike | None) -> None:
        self._mailbox = mailbox
        node = mailbox.node if mailbox is not None else open_node()
        self.proc_id: str = node.proc
        spec = mailbox.spec if mailbox is not None else None
        self.name: str = spec.name if spec is not None else "root"
        self.class_name: str = class_name_of(spec.cls) if spec is not None else "root"
        self.actor_id: str = f"{mailbox.key if mailbox is not None else 'root'}@{node.proc}"
        if mailbox is not None and spec is not None:
            self.rank = Point(spec.region.place_of(mailbox.rank), spec.region.extent)
        else:
            self.rank = Point(0, Extent((), ()))
        self.creator: Creator | None = (spec.creator or root(spec.owner)) if spec is not None else None

    def stop(self, reason: str | None = None) -> None:
        """Stop this actor after its earlier messages, with its ``__cleanup__``; later calls raise StoppedError.

        Raises:
            MonarchError: the program is not an actor.
        """
        stop_itself(self._actor("stop"), reason or "stopped by itself")

    def abort(self, reason: str | None = None) -> None:
        """Fail this actor: its owner is told, as of a broadcast that raised, and later calls raise SupervisionError.

        The running call still answers.

        Raises:
            MonarchError: the program is not an actor.
        """
        fail_itself(self._actor("abort"), reason or _NO_REASON)

    def kill(self, reason: str | None = None) -> None:
        """Fail this actor; see ``abort``."""
        fail_itself(self._actor("kill"), reason or _NO_REASON)

    def _actor(self, wish: str) -> ActorLike:
        if self._mailbox is None:
            raise MonarchError(
                f"{wish}(): the program is not an actor; call this in an endpoint, or stop a mesh instead"
            )
        return self._mailbox

    @property
    def proc(self) -> ProcMesh:
        """The process that it lives in, as a mesh of one."""
        from monarch._meshes.procs.proc_mesh import this_proc

        return this_proc()

    @property
    def proc_mesh(self) -> ProcMesh:
        """The mesh of processes that it was spawned on; the program's own process for the program."""
        from monarch._meshes.procs.proc_mesh import ProcMesh, this_proc

        spec = self._mailbox.spec if self._mailbox is not None else None
        return ProcMesh.refer(spec.procs, spec.region) if spec is not None else this_proc()

    def __repr__(self) -> str:
        return path_of(self.creator, self.class_name, self.name, self.rank)


class Context:
    """The actor and message of the running code: see ``context()``."""

    def __init__(self, here: tuple[ActorLike, m.Call] | None) -> None:
        self._here = here

    @cached_property
    def actor_instance(self) -> ActorInstance:
        """The actor that runs, or the program."""
        return ActorInstance(self._here[0] if self._here is not None else None)

    @cached_property
    def message_rank(self) -> Point:
        """The actor's place in the view that the message was sent to; its identity is ``actor_instance.rank``."""
        if self._here is None:
            return Point(0, Extent((), ()))
        mailbox, call = self._here
        region = view_of(mailbox, call)
        return Point(region.place_of(mailbox.rank), region.extent)


def view_of(mailbox: ActorLike, call: m.Call) -> Region:
    """Return the view that a message was sent to; the whole mesh outside a message."""
    if call.view:
        return mailbox.node.replies.region_of(call.view)
    return mailbox.spec.region if mailbox.spec is not None else Region((), mailbox.rank, (), ())


def context() -> Context:
    """Return the context of the running code: in an endpoint the actor and message, elsewhere the program."""
    return Context(current.get())


def current_rank() -> Point:
    """Return the place of this actor in the view that was addressed; in ``__init__``, the whole mesh."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Return the axes of the view that was addressed, with their sizes."""
    return dict(current_rank().extent)


def current_actor_name() -> str:
    """Return the key and proc id of this actor, unique in the session."""
    return context().actor_instance.actor_id
