"""The result of the replies to a call, or its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from monarch._core.roster import split_proc
from monarch._core.shapes.extent import Extent
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.shapes.value_mesh import Deferred, ValueMesh
from monarch._core.text.advice import advice
from monarch._node.bulk import Loading
from monarch._node.future import PENDING, Future
from monarch._node.liveness import Liveness
from monarch._node.remote_errors import Failure, group, unpack_failure, with_source
from monarch._node.replies.answers import Answer, Lost, ranks_of_peers
from monarch._node.replies.death_errors import died
from monarch._node.replies.unread import UnreadError
from monarch._wire.messages import ERROR, FAILED, RESULT, STOPPED, Dead, Reply
from monarch._wire.pickling import loads
from monarch.exceptions import ActorError, DeviceMeshError, SupervisionError

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer

R = TypeVar("R")


_CONSTANT = frozenset({type(None), bool, int, float, str, bytes})
"""Types whose values may be shared."""


_WORTH = 1.0
"""Seconds of a timed-out wait from which on the ranks are asked what they run instead."""


class Outcome(Future[R]):
    """The values or the error of the replies to a call; a Gather collects them."""

    __slots__ = (
        "_finish",
        "_left",
        "_patient",
        "_replies",
        "actor",
        "extent",
        "mesh",
        "method",
        "port",
        "sent_at",
        "targets",
        "title",
        "view",
        "watched",
    )

    targets: Sequence[Peer]
    extent: Extent
    mesh: str
    method: str
    view: Any
    """The addressed mesh, for errors: a slice has its own ranks."""
    _replies: list[Answer | None]
    _finish: Callable[[Any, list[Any]], R]

    # Most calls keep these, so they are not set for each.
    _why = ""
    _error_to_tell: UnreadError | None = None
    """The first one that has arrived; set by the receiving thread, taken by a reader."""
    goes_on = True
    """Whether unanswered ranks continue when a death ends the wait; set by the caller."""
    unanswered: Sequence[Peer] = ()
    """The procs that had not answered when a death ended the wait."""

    @property
    def label(self) -> str:
        """The call, for errors."""
        if self._label:
            return self._label
        if self.view is not None and self.method:
            return self.view._title_of(self.method)
        return f"{self.mesh}.{self.method}()" if self.method else self._called

    def rename(self, label: str) -> None:
        """Let errors name the call by something else than its endpoint."""
        self._label = label

    @property
    def _called(self) -> str:
        return self.mesh if self.view is None else self.view._called

    def base_rank(self, position: int) -> int:
        """Return the base rank of a position."""
        return split_proc(self.targets[position].proc)[1]

    @property
    def unread(self) -> bool:
        """Whether nobody has read its outcome."""
        return self._value is PENDING and self._error is None

    def forget_error(self) -> None:
        """Do not report its error when it is dropped: it will be read."""
        if self._error_to_tell is not None:
            self._error_to_tell.is_read = True

    def outcomes(self) -> dict[int, Any]:
        """Return the values so far that report a failure, by position."""
        self.forget_error()
        return {
            position: self._node.bulk.load(reply, frames)
            for position, reply, frames in self._replied()
            if reply.status in (FAILED, STOPPED)
        }

    def _replied(self) -> list[tuple[int, Reply, Sequence[bytes]]]:
        replies: list[tuple[int, Reply, Sequence[bytes]]] = []
        for position, each in enumerate(list(self._replies)):
            reply, frames = each if isinstance(each, tuple) else (each, ())
            if isinstance(reply, Reply):
                replies.append((position, reply, frames))
        return replies

    def _unanswered_text(self) -> str:
        ranks = [rank for rank, reply in enumerate(self._replies) if reply is None and not self.done]
        if not ranks:
            return ""
        base = self._base()
        all_ranks = len(base) if base == list(range(len(base))) else None
        early = [rank for rank in ranks if self.targets[rank].starting]
        late = [rank for rank in ranks if rank not in early]
        parts = [(late, "did not answer"), (early, "not started yet")]
        named = [f"{describe_ranks([base[rank] for rank in part], all_ranks)} {what}" for part, what in parts if part]
        text = ": " + ", ".join(named)
        silence = self._node.find_part(Liveness)
        if silence is not None:
            silent = [(rank, silence.text(self.targets[rank].proc)) for rank in ranks]
            notes = [f"rank {base[rank]}, which {why}" for rank, why in silent if why]
            text += "".join(f" ({each})" for each in notes[:8])
        return text

    def _running_instead(self, waited: float) -> str:
        if waited < _WORTH or self.done:
            return ""
        text = self._node.watch.ahead(self)
        return f"; {text}" if text else ""

    def _make(self) -> R:
        try:
            made = self._read_replies()
        except KeyboardInterrupt:
            # The next reader reads the answers again.
            raise
        except BaseException:
            self._replies = []
            raise
        self._replies = []
        return made

    def _read_replies(self) -> R:
        if self._error_to_tell is not None:
            self.forget_error()
        if len(self._replies) == 1:
            reply = self._replies[0]
            if type(reply) is Reply and reply.status == RESULT:
                return self._finish(self, [self._load(reply, ())])
        values: list[Any] = []
        failures: dict[int, Failure] = {}
        lost: dict[int, Dead] = {}
        value: Any = None
        nobody = object()
        shared: object = nobody
        """The last reply, if it may be the one of several actors: they share constants only."""
        for rank, reply in enumerate(self._replies):
            if reply is shared:
                values.append(value)
                continue
            frames: Sequence[bytes] = ()
            if type(reply) is tuple:
                reply, frames = reply
            if type(reply) is Reply and reply.status != ERROR:
                value = self._load(reply, frames)
                shared = reply if type(value) in _CONSTANT else nobody
                values.append(value)
                continue
            values.append(None)
            if type(reply) is Reply:
                failures[rank] = unpack_failure(reply.body)
            elif type(reply) is Lost:
                lost[rank] = reply.dead
        if self._why and not lost:
            raise SupervisionError(
                f"{self.label} failed: {self._why}",
                mesh=self.mesh,
                results=self._values(values) if len(self.unanswered) < len(values) else None,
                reason=self._why,
            )
        if failures and self.view is not None:
            self.view._has_read(failures)
        if lost or failures:
            some = len(lost) + len(failures) + len(self.unanswered) < len(values)
            error = self._error_of(failures, lost, self._values(values) if some else None)
            if self.unanswered and self.goes_on:
                ranks = describe_ranks(self.base_rank(position) for position in self._unanswered())
                add_note(error, f"{ranks} had not answered by then; the call continues there")
            raise error
        return self._finish(self, values)

    def _load(self, reply: Reply, frames: Sequence[bytes]) -> Any:
        load: Loading | None = None
        try:
            if reply.bulk is None:
                # The usual answer is small.
                return loads(reply.body, frames)
            load = Loading(self._node.bulk, reply, frames)
            return load()
        except Exception:
            # Raised when it is read, so that the other values stay available.
            return Deferred(load or Loading(self._node.bulk, reply, frames))

    def _unanswered(self) -> list[int]:
        return [rank for rank, peer in enumerate(self.targets) if peer in self.unanswered]

    def _error_of(
        self, failures: dict[int, Failure], lost: dict[int, Dead], results: ValueMesh[Any] | None
    ) -> BaseException:
        if not lost:
            error = group(failures, self.extent, self.label, results, self._unanswered(), self._base())
            if isinstance(error, ActorError):
                error.actors = self.actor
            uid = split_proc(self.targets[0].proc)[0]
            here = uid in self._node.names
            return _with_advice(
                error, advice().after_failure(uid) if here else advice().after_failure_elsewhere(self.mesh)
            )
        return died(self.label, self.mesh, lost, self._base(), results, self._node.names)

    def _values(self, values: list[Any]) -> ValueMesh[Any]:
        """Return the values of the ranks that have answered."""
        return ValueMesh.of(self.extent, values, partial(ranks_of_peers, self.targets))

    def _base(self) -> list[int]:
        """Return the base rank of each position."""
        return ranks_of_peers(self.targets)


def _with_advice(error: BaseException, todo: str) -> BaseException:
    """Return an error, with what to do if it is of a failed actor."""
    if isinstance(error, SupervisionError) and error.actor_failed:
        text = advice().placed("\n".join(with_source(str(error))))
        error.args, error.message = (text,), text
        add_note(error, todo)
    return error


def add_note(error: BaseException, note: str) -> None:
    """Add a line to the message of a Monarch error."""
    text = f"{error}\n{note}"
    error.args = (text,)
    if isinstance(error, (ActorError, DeviceMeshError)):
        error.message = text
