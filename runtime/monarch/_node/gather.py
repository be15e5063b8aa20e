"""Futures of calls, which collect the replies of the addressed actors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar, cast, final

from monarch._core.causes import Cause, CellRef, NotReady, NotStarted, Stopped
from monarch._core.flow import finish_all
from monarch._core.roster import split_proc
from monarch._core.shapes.extent import Extent
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.shapes.value_mesh import Deferred, ValueMesh
from monarch._core.text.advice import advice
from monarch._core.text.causes import describe, describe_all
from monarch._core.text.crash import crash_lines
from monarch._core.text.durations import duration_text
from monarch._node.bulk import Loading
from monarch._node.call_watch import CallGroup
from monarch._node.future import PENDING, Future
from monarch._node.liveness import Liveness
from monarch._node.node_like import NodeLike
from monarch._node.remote_errors import Failure, group, is_ours, pack_failure, unpack_failure, with_source
from monarch._node.unread import UnreadError, of_death, of_endpoint, of_mesh
from monarch._wire.messages import ERROR, FAILED, RESULT, STOPPED, Dead, Folded, Reply
from monarch._wire.pickling import loads
from monarch.config import TAIL_LINES
from monarch.exceptions import ActorError, DeviceMeshError, ProtocolError, SpawnError, StoppedError, SupervisionError

if TYPE_CHECKING:
    from monarch._node.peers import Peer
    from monarch._wire.receiving.loop import Waiter

R = TypeVar("R")


_HEARING = 0.05
"""Seconds after a death in which other ranks may still answer before the call fails."""


_CONSTANT = frozenset({type(None), bool, int, float, str, bytes})
"""Types whose values may be shared."""
_LINE = 200
"""Characters of the first line of an error in the events of a mesh."""
_OLD = 2.0
"""Seconds before the end of a process from which on the age of its last lines is told."""
_WORTH = 1.0
"""Seconds of a timed-out wait from which on the ranks are asked what they run instead."""


@final
class Lost:
    """Stands for the reply of a dead proc."""

    __slots__ = ("dead",)

    def __init__(self, dead: Dead) -> None:
        self.dead = dead


Answer = Reply | tuple[Reply, Sequence[bytes]] | Lost
"""The reply of an actor, with its buffers if it has any."""


class Gather(Future[R]):
    """Collects one reply from each of some actors, and is done when it has all of them.

    Args:
        node: the node of this process.
        targets: the procs of the actors, by position in the addressed view.
        extent: the extent of that view.
        mesh: name of the mesh, for errors.
        method: the endpoint, for errors.
        finish: makes the result from the values.
        actor: key of the actors.
        patient: whether a death does not end the wait for the others.
    """

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

    # Most calls keep these, so they are not set for each.
    _why = ""
    _error_to_tell: UnreadError | None = None
    """The first one that has arrived; set by the receiving thread, taken by a reader."""
    goes_on = True
    """Whether unanswered ranks continue when a death ends the wait; set by the caller."""
    on_loss: Callable[[], None] | None = None
    """Called in the receiving thread at a death that will end the wait; set by the caller."""
    unanswered: Sequence[Peer] = ()
    """The procs that had not answered when a death ended the wait."""
    party: CallGroup | None = None
    """Watches the other ranks once one has failed."""
    waiter: Waiter | None = None
    """Called when another rank has answered."""

    def __init__(
        self,
        node: NodeLike,
        targets: Sequence[Peer],
        extent: Extent,
        mesh: str,
        method: str,
        finish: Callable[[Gather[R], list[Any]], R],
        actor: str = "",
        patient: bool = False,
    ) -> None:
        # Not super(), which each call would pay for.
        Future.__init__(self, node)  # pyright: ignore[reportUnknownMemberType]
        self.targets = targets
        self.extent = extent
        self.mesh = mesh
        self.method = method
        self.actor = actor
        self._left = len(targets)
        self._replies: list[Answer | None] = [None] * self._left
        self._finish = finish
        self._patient = patient
        self.view: Any = None
        """The addressed mesh, for errors: a slice has its own ranks."""
        self.watched = not patient
        """Whether to watch the other ranks once one has failed."""
        self.sent_at: float
        """When it was sent, until the log of events has it; the log sets it, and the next one before."""
        self.title: tuple[str, int]
        """See ``monarch._core.telemetry.calling``."""
        self.port: int = node.ports.open_call(self)

    def check(self) -> None:
        """Note procs that died while the call was being sent."""
        for peer in self.targets:
            if peer.dead is not None:
                self.lost(peer, peer.dead)

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

    def reply(self, reply: Reply, frames: Sequence[bytes]) -> None:
        """Take the reply of an actor; ignore a second one.

        A reply from a position outside the view is an error of its sender.
        """
        with self._lock:
            replies, left = self._replies, self._left
            if not left:
                return
            rank = reply.rank
            if not 0 <= rank < len(replies):
                reply = replaced(reply, self.targets, self.label)
                rank = reply.rank
            if replies[rank] is not None:
                return
            failed = reply.status and self.actor
            if failed:
                # Before anybody can see that the rank has answered. Its subscribers only note it.
                self._node.events.call_failed.tell(self.port, self.base_rank(rank), *_failure_of(reply))
            replies[rank] = (reply, frames) if frames else reply
            self._left = left = left - 1
        if failed and self.watched:
            if reply.status == ERROR and self._tells():
                self._error_to_tell = of_endpoint(self.label, self.base_rank(rank), unpack_failure(reply.body))
            # Other ranks may wait for this one.
            self._node.watch.failed(self, rank)
        if not left:
            self._end()
        elif self.waiter is not None:
            self._node.receive_loop.notify(self.waiter)

    def reply_alike(self, reply: Reply, ranks: range) -> None:
        """Take the same value from the actors at some positions, without buffers; ignore second replies."""
        with self._lock:
            replies = self._replies
            if not self._left:
                return
            begin, end = ranks.start, ranks.stop
            new = replies[begin:end].count(None)
            if new == end - begin:
                replies[begin:end] = [reply] * new
            elif new:
                replies[begin:end] = [reply if each is None else each for each in replies[begin:end]]
            self._left -= new
            complete = not self._left
        if complete:
            self._end()
        elif self.waiter is not None:
            self._node.receive_loop.notify(self.waiter)

    def _end(self) -> None:
        """Complete, with all answers that come."""
        self._node.ports.close(self.port)
        if self.party is not None:
            # Before the waiting callers continue.
            self.party.completed()
        self._complete()

    def base_rank(self, position: int) -> int:
        """Return the base rank of a position."""
        return split_proc(self.targets[position].proc)[1]

    @property
    def unread(self) -> bool:
        """Whether nobody has read its outcome."""
        return self._value is PENDING and self._error is None

    def failed_positions(self) -> list[int]:
        """Return the positions that have failed so far."""
        return [position for position, reply, _ in self._replied() if reply.status]

    def _tells(self) -> bool:
        """Return whether an error that arrives now is told if nobody reads it."""
        return bool(self.actor) and self.watched and self._error_to_tell is None and self.method != "__init__"

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

    def lost(self, peer: Peer, dead: Dead) -> bool:
        """Note the death of a proc, and return whether its answer was outstanding."""
        waited = False
        with self._lock:
            for position, target in enumerate(self.targets):
                if target is peer and self._left and self._replies[position] is None:
                    self._replies[position] = Lost(dead)
                    self._left -= 1
                    waited = True
            complete = waited and not self._left
        if waited and not dead.expected and self._tells():
            self._error_to_tell = of_death(self.label, split_proc(dead.proc)[1], dead)
        if complete:
            self._end()
        elif waited and not self._patient:
            if self.on_loss is not None:
                self.on_loss()
            # Answers at the same time count; but do not wait for the others to report a death.
            self._node.receive_loop.call_later(_HEARING, self._give_up)
        return waited

    def fail(self, uid: str, key: str, why: str) -> bool:
        """Fail the call if it is to actors of a failed mesh, and return whether it was pending."""
        if self._patient or self.method == "__init__" or not self.actor or (key and self.actor != key):
            return False
        if split_proc(self.targets[0].proc)[0] != uid:
            return False
        with self._lock:
            if not self._left:
                return False
            self._why = why
        if self._tells():
            self._error_to_tell = of_mesh(self.label, why)
        self._give_up()
        return True

    def _give_up(self) -> None:
        """Complete without the outstanding answers."""
        if self._abandon():
            self._end()

    def _abandon(self) -> bool:
        """Stop waiting for the outstanding answers; return whether there were any."""
        with self._lock:
            if not self._left:
                return False
            self.unanswered = self.waits_for()
            self._left = 0
            return True

    def waits_for(self) -> list[Peer]:
        """Return the procs that have not answered."""
        if not self._left:
            return list(self.unanswered)
        return [peer for peer, reply in zip(self.targets, self._replies, strict=True) if reply is None]

    def _missing(self) -> str:
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

    def _front(self, waited: float) -> str:
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
            return _with_advice(error, split_proc(self.targets[0].proc)[0])
        return died(self.label, self.mesh, lost, self._base(), results)

    def _values(self, values: list[Any]) -> ValueMesh[Any]:
        """Return the values of the ranks that have answered."""
        return ValueMesh.of(self.extent, values, partial(ranks_of_peers, self.targets))

    def _base(self) -> list[int]:
        """Return the base rank of each position."""
        return ranks_of_peers(self.targets)


def ranks_of_peers(peers: Iterable[Peer]) -> list[int]:
    """Return the rank of each process in its mesh."""
    return [split_proc(peer.proc)[1] for peer in peers]


def _with_advice(error: BaseException, uid: str) -> BaseException:
    """Return an error, with what to do if it is of a failed actor."""
    if isinstance(error, SupervisionError) and error.actor_failed:
        text = advice().placed("\n".join(with_source(str(error))))
        error.args, error.message = (text,), text
        add_note(error, advice().after_failure(uid))
    return error


def replaced(reply: Reply, targets: Sequence[Peer], label: str) -> Reply:
    """Turn a reply from a position outside the view into an error of its sender.

    Raises:
        ProtocolError: its sender is not a member.
    """
    places = [place for place, peer in enumerate(targets) if peer.proc == reply.src]
    what = f"{reply.src} answered {label} from position {reply.rank}; the call was sent to {len(targets)} ranks"
    if not places:
        raise ProtocolError(f"{what}, and {reply.src} is not one of them")
    status, body = reply.status, reply.body
    if status != ERROR:
        status, body = ERROR, pack_failure(ProtocolError(what), True)
    return Reply(reply.src, reply.port, places[0], status, reply.done, body)


_INTERRUPTS = ("KeyboardInterrupt", "asyncio.exceptions.CancelledError")


def _failure_of(reply: Reply) -> tuple[str, bool]:
    """Return the first line of an error, and whether the call was only ended from outside."""
    if reply.status != ERROR:
        # It is the value of a cell, which only its reader unpickles.
        return ("stopped", True) if reply.status == STOPPED else ("see its output", False)
    failure = unpack_failure(reply.body)
    line = f"{failure.kind}: {failure.text}".partition("\n")[0][:_LINE]
    return line, failure.freed or failure.kind in _INTERRUPTS


class _Sink(Protocol):
    """Takes the replies to a call."""

    targets: Any
    """The peers, by position."""

    def reply(self, reply: Reply, frames: Sequence[Any], /) -> None: ...


def take_folded(node: NodeLike, folded: Folded) -> None:
    """Give replies that were folded on their way to the call that waits for them."""
    sink = cast("_Sink | None", node.ports.sinks.get(folded.port))
    if sink is None:
        # The next replies of these ranks say again what they have finished.
        return
    targets = sink.targets
    alike: Callable[[Reply, range], None] | None = getattr(sink, "reply_alike", None)
    for status, done, body, ends in folded.groups:
        for ranks in map(range, ends[::2], ends[1::2]):
            peers: list[Peer] = [targets[rank] for rank in ranks]
            for peer in finish_all(peers, done):
                node.receive_loop.notify(peer)
            if alike is not None and status == RESULT:
                alike(Reply(peers[0].proc, folded.port, ranks.start, status, done, body), ranks)
                continue
            for rank, peer in zip(ranks, peers, strict=True):
                sink.reply(Reply(peer.proc, folded.port, rank, status, done, body), ())


def is_gather(sink: object) -> TypeGuard[Gather[Any]]:
    """Return whether the sink of a port is a Gather."""
    return isinstance(sink, Gather)


def died(
    label: str,
    mesh: str,
    lost: dict[int, Dead],
    base: Sequence[int],
    results: ValueMesh[Any] | None,
) -> DeviceMeshError:
    """Return the error of a call with dead ranks: the ranks, causes, and last lines of stderr.

    Args:
        label: the label of the call.
        mesh: the name of the mesh.
        lost: the deaths, by rank in the addressed view.
        base: the rank in the mesh of each rank in the view, by which the text names it.
        results: the results of the others.
    """
    total = len(base) if list(base) == list(range(len(base))) else None
    kinds: dict[tuple[Cause, CellRef | None], list[int]] = {}
    for rank, dead in lost.items():
        kinds.setdefault((dead.cause, dead.at), []).append(rank)
    stopped = all(dead.expected for dead in lost.values())
    kind: type[DeviceMeshError] = StoppedError if stopped else SupervisionError
    if all(isinstance(dead.cause, (NotStarted, NotReady)) for dead in lost.values()):
        kind = SpawnError
    lines: list[str] = []
    for (cause, at), ranks in list(kinds.items())[:8]:
        whose = describe_ranks([base[rank] for rank in ranks], total)
        procs = f"the process{'es' if len(ranks) > 1 else ''} of {whose} of {mesh}"
        if stopped:
            cause, at = Stopped(), None
        lines.append(f"{procs} {(describe_all if len(ranks) > 1 else describe)(cause, at)}")
        tail = last_lines(lost[ranks[0]])
        if tail and not stopped:
            lines.append(f"  last lines of stderr of rank {base[ranks[0]]}{age_of_lines(lost[ranks[0]])}:")
            lines.extend(f"    {line}" for line in tail)
    alive = sorted(base[rank] for rank in range(len(base)) if rank not in lost)
    lines[0] = f"{label} failed: {lines[0]}"
    if not alive and (stopped or kind is SpawnError):
        lines.append(f"{advice().after_stop()} to continue")
    else:
        uid = split_proc(next(iter(lost.values())).proc)[0]
        lines.append(advice().after_deaths(uid, sorted(base[rank] for rank in lost), alive))
    when = min((dead.when for dead in lost.values() if dead.when), default=0.0)
    return kind("\n".join(lines), mesh=mesh, ranks=tuple(sorted(lost)), results=results, when=when)


def add_note(error: BaseException, note: str) -> None:
    """Add a line to the message of a Monarch error."""
    text = f"{error}\n{note}"
    error.args = (text,)
    if isinstance(error, (ActorError, DeviceMeshError)):
        error.message = text


def age_of_lines(dead: Dead) -> str:
    """Describe how old the last stderr lines of a proc are; empty if they are from its end."""
    return f", written {duration_text(dead.quiet)} before its death" if dead.quiet >= _OLD else ""


def last_lines(dead: Dead) -> list[str]:
    """Return the last stderr lines of a proc, at most ``TAIL_LINES``; of a progress bar, its last state.

    Of a dump of faulthandler, the frames of the thread that crashed.

    Lines from before its last cell have nothing to do with its death.
    """
    count = TAIL_LINES()
    for stream, offset, data in dead.tails:
        if stream == "stderr":
            # A program that opens /dev/stderr itself has made the file shorter.
            old = max(0, dead.since - offset) if dead.since <= offset + len(data) else 0
            if not (data := data[old:]).strip():
                return []
            lines = data.decode(errors="replace").rstrip().split("\n")
            lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
            crash = crash_lines(lines, lambda file: is_ours(file) or file.startswith("<frozen"))
            # A dump begins with what matters.
            return crash[:count] or (lines[-count:] if count else [])
    return []
