"""The errors of Monarch: a small tree; each says what happened, where, what is still alive and what to do.

Everything below is a MonarchError:

    AxisError, ShapeError, PointError   an invalid axis, shape, coordinate or rank of a mesh
    ArgumentError                       a call does not fit the endpoint's signature, or the endpoint is unknown
        NotAnEndpointError                  a method without ``@endpoint`` was called on a mesh
    EnvError                            an environment variable has a wrong name or value
    SerializationError                  an argument, a result or a class could not be pickled or unpickled; or a
                                        reference to a mesh or port was unpickled outside its session
    ActorError                          an endpoint, or ``__init__``, raised on one or more ranks
    DeviceMeshError                     a part of a mesh cannot be used
        SupervisionError                    the target cannot answer: its process, its host or the actor has died
            StoppedError                        the target was stopped by its owner
        SpawnError                          processes or actors could not be started
            LimitError                          the limit of open files leaves no room for them
        GroupError                          a process group could not be created, or is broken
            CollectiveMismatchError             ranks called different collectives; only where these are checked
        TransferError                       memory of another process could not be read or written
        TensorError                         a distributed tensor has no value, since an op that it depends on failed
        EditError                           living actors could not take a new version of their class
    NoDetachedMeshError                 the detached mesh does not exist, or its lease has ended
    DetachedMeshInUseError              a detached mesh of that name exists, or another program has it attached
    DeadlockError                       actors wait for each other
    CallTimeoutError                    ``get(timeout=...)`` timed out; the call is still running
        SendTimeoutError                    a receiver is too far behind; the message was not sent
    MeshOpError                         an op cannot run on tensors that are sharded over a mesh
    ProtocolError                       a message could not be understood
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

__all__ = [
    "ActorError",
    "ArgumentError",
    "AxisError",
    "CallTimeoutError",
    "CollectiveMismatchError",
    "DeadlockError",
    "DetachedMeshInUseError",
    "DeviceMeshError",
    "EditError",
    "EnvError",
    "GroupError",
    "LimitError",
    "MeshOpError",
    "MonarchError",
    "NoDetachedMeshError",
    "NotAnEndpointError",
    "PointError",
    "ProtocolError",
    "SendTimeoutError",
    "SerializationError",
    "ShapeError",
    "SpawnError",
    "StoppedError",
    "SupervisionError",
    "TensorError",
    "TransferError",
]


class PartialResults(Protocol):
    """The results of the ranks that did answer; a ``ValueMesh``."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[Any, Any]]: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def get(self, rank: int) -> Any: ...
    def item(self, /, **coords: int) -> Any: ...
    def values(self) -> list[Any]: ...
    def items(self) -> Iterator[tuple[Any, Any]]: ...


class MonarchError(Exception):
    """Any error that Monarch raises by itself."""


class AxisError(MonarchError, KeyError, TypeError):
    """An unknown axis. Raised by every method that takes axis names; the text lists the axes of the mesh."""

    def __str__(self) -> str:
        # KeyError would show the repr of the text.
        return str(self.args[0]) if self.args else ""


class ShapeError(MonarchError, ValueError):
    """A split, flatten or slice that the mesh's sizes do not allow."""


class PointError(MonarchError, IndexError):
    """A coordinate or rank outside the mesh."""


class ArgumentError(MonarchError, TypeError, ValueError, AttributeError):
    """The call does not fit: wrong arguments, an unknown endpoint, or a method that is not an endpoint."""


class NotAnEndpointError(ArgumentError, RuntimeError):
    """A method without ``@endpoint`` was called on a mesh."""


class EnvError(MonarchError, ValueError, TypeError):
    """An environment variable has a wrong name or value."""


class SerializationError(MonarchError, TypeError):
    """Something could not be pickled for sending, or unpickled on arrival; the text says what and where.

    Attributes:
        reason: why a result could not be pickled, without the call; empty for other errors.
    """

    reason: str = ""


class ActorError(MonarchError):
    """An endpoint raised on one or more ranks.

    Attributes:
        exception: the original exception of the first failing rank; None if it could not be sent.
        rank: position of that rank in the addressed mesh.
        point: its coordinates there.
        failures: every failing rank, as ``{rank: text of its traceback}``.
        results: the results of the ranks that did not fail, as a ValueMesh with None where a rank failed.
        reason: what the first failing rank raised, in one line.
        actors: the internal id of the actor mesh; empty if the call was to processes.
    """

    actors = ""

    def __init__(
        self,
        message: str,
        exception: BaseException | None = None,
        *,
        rank: int | None = None,
        point: Any = None,
        failures: dict[int, str] | None = None,
        results: PartialResults | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.exception = exception
        self.rank = rank
        self.point = point
        self.failures: dict[int, str] = failures or {}
        self.results = results
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


class DeviceMeshError(MonarchError, RuntimeError):
    """A part of a mesh cannot be used.

    Attributes:
        mesh: name of the mesh.
        ranks: positions in the addressed mesh that failed.
        results: the results of the ranks that did answer, as a ValueMesh with None elsewhere; None outside a call.
        when: seconds since the epoch at which the first of them died; 0 if unknown, or if none has.
        reason: why a call failed whose own ranks are alive; empty otherwise.
        advice: what to do; in the text, only notes follow it. May be empty.
    """

    def __init__(
        self,
        message: str,
        *,
        mesh: str = "",
        ranks: tuple[int, ...] = (),
        results: PartialResults | None = None,
        when: float = 0.0,
        reason: str = "",
        advice: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.mesh = mesh
        self.ranks = ranks
        self.results = results
        self.when = when
        self.reason = reason
        self.advice = advice

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


class SupervisionError(DeviceMeshError):
    """The target of a call has died: its process, its host, or the actor by an error without a caller.

    Attributes:
        actor_failed: whether an actor has failed whose process is alive; ``heal_mesh`` recreates it.
    """

    actor_failed = False


class StoppedError(SupervisionError):
    """The target was stopped by its owner; make a new one. ``except SupervisionError`` around a call catches it too."""


class SpawnError(DeviceMeshError):
    """Processes or actors could not be started."""


class LimitError(SpawnError):
    """A system limit leaves no room for a session, or for more processes; nothing was started.

    Attributes:
        limit: the limit of the process without room: of open files, or of memory in bytes.
        need: how many more descriptors, or bytes, it needs.
        free: how many it has left; 0 if that is unknown.
    """

    def __init__(self, message: str, *, limit: int = 0, need: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.limit = limit
        self.need = need
        self.free = free


class GroupError(DeviceMeshError):
    """A process group could not be created, or one of its ranks has died; the next use creates it again."""


class CollectiveMismatchError(GroupError):
    """Ranks of a process group called mismatching collectives; the text has their shapes and dtypes."""


class TransferError(DeviceMeshError):
    """Memory of another process could not be read or written: its owner died or dropped it."""


class TensorError(DeviceMeshError):
    """A distributed tensor has no value, since an op that it depends on failed on some ranks."""


class MeshOpError(MonarchError, NotImplementedError):
    """An op cannot run on tensors that are sharded over a mesh; the text names the op and the line."""


class EditError(DeviceMeshError):
    """Living actors could not take a new version of their class; all of the mesh keep the current one."""


class NoDetachedMeshError(MonarchError, LookupError):
    """The detached mesh does not exist, or its lease has ended."""


class DetachedMeshInUseError(MonarchError):
    """A detached mesh of that name already exists, or another program has it attached."""


class DeadlockError(MonarchError, RuntimeError):
    """Actors that handle one message at a time wait for each other; the text names the deadlock."""


class CallTimeoutError(MonarchError, TimeoutError):
    """``get(timeout=...)`` timed out. The call is still running; a later ``get`` can return its result."""


class SendTimeoutError(CallTimeoutError):
    """A receiver stayed too far behind for too long, so a message was sent to none of its receivers.

    Attributes:
        mesh: name of the mesh that was called.
        rank: position in the addressed mesh of the receiver without room.
        behind: how far it is behind, in messages; a large one counts as several.
    """

    def __init__(self, message: str, *, mesh: str = "", rank: int = 0, behind: int = 0) -> None:
        super().__init__(message)
        self.mesh = mesh
        self.rank = rank
        self.behind = behind

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.__dict__)


class ProtocolError(MonarchError):
    """A message of a peer could not be understood."""


def _rebuild(cls: type[MonarchError], message: str, state: dict[str, Any]) -> MonarchError:
    error = cls(message)
    error.__dict__.update(state)
    return error
