"""The part that a rank has in the process groups of its mesh: the ranks meet by messages, whatever their actors do.

The first rank of a mesh convenes the others when any of them asks for a group: it serves a store at a port that the
system chose, tells all where that is, and each joins in a thread of its own. So a slice has its group while other
ranks are busy, and nobody chooses a port. What was formed is a round; it is broken by the death of a rank, or by a
stop that left a collective half done, and the next use makes a new round.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from monarch._actors.running import current
from monarch._actors.table import actors_of
from monarch._core.roster import Procs
from monarch._core.shapes.ranks import describe_ranks
from monarch._groups.pipelined import await_end
from monarch._node.current import current_node
from monarch._node.future import Promise
from monarch._node.services.asking import tell_proc
from monarch._node.services.frame import ask_frame
from monarch._node.services.registry import request, service
from monarch._procs.os.helpers import be_helper
from monarch._wire import messages as m
from monarch.config import CHECK_COLLECTIVES
from monarch.exceptions import CollectiveMismatchError, GroupError

if TYPE_CHECKING:
    from monarch._tensors.collectives.world import Place, World

PROGRAM = "only ranks have process groups, and this is the program; use them in endpoints and in %%mesh cells"
_BROKEN = re.compile(r"gloo/|NCCL error|Connection (closed|reset) by peer|Connection was likely closed")
"""What torch says of a collective whose connections do not work."""
_UNCHECKED = re.compile(r"(failed to pass|reached) monitoredBarrier")
"""What it says if that is so while the collective is being checked."""
_GENERATIONS = 1_000_000
"""More than one incarnation of a rank convenes."""
_PATIENCE = 90.0
"""Seconds to wait for a round at most; those that join complain earlier of those that do not."""
_FREED = 256
"""Calls that were freed and have not ended, at most."""
_HEARING = 0.15
"""Seconds to wait at most for the reason for which the connections of a collective were closed."""


class Rendezvous:
    """The part that this process has in the process groups of its mesh."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0
        self.convened = 0
        self.roster = -1
        """Version of the roster by which the ranks of this round were called. Lock: ``lock``."""
        self.world: World | None = None
        self._formed: World | None = None
        """The last world that was formed here, until this process has left it: torch's default group is of it. Lock:
        ``lock``."""
        self._turn = threading.Lock()
        """Of the thread that leaves one world and forms the next: torch has one default group at a time."""
        self.broken = ""
        """Why the groups of this round are of no use; empty while they are."""
        self._waiting: list[Promise[Any]] = []
        self._joining = False
        """Whether a round is under way."""
        self._sockets: set[tuple[int, int]] | None = None
        """What there was before the round under way, whose connections are to be cut if it cannot succeed."""
        self.kept: list[Any] = []
        """The stores that this process serves, for as long as others may use them."""
        self._death_in = -1
        """The round in which a rank of the mesh died last. Under ``_told``."""
        self._freed: dict[tuple[str, int], str] = {}
        """Why collectives of calls cannot end, by caller and port; of those under way. With the condition."""
        self._told = threading.Condition()
        self._doomed: dict[tuple[str, int], tuple[str, frozenset[int]]] = {}
        """Of constructors whose spawn has failed: why, and which ranks will not join them. With the condition."""
        self._used: dict[tuple[str, int], int] = {}
        """By caller and port, the round whose groups a call has got last. Lock: ``lock``."""
        self._failed_calls: dict[str, list[int]] = {}
        """By caller, the ports of its calls that have failed here. Lock: ``lock``."""
        self._ended = 0, ""
        """The newest round that is of no use, and why: the call to it may come later. Lock: ``lock``."""

    # The program's side

    def ensure(self) -> World:
        """Return the default group of this process's mesh; make it with the other ranks if none works."""
        node = current_node()
        if node.config is None:
            raise GroupError(PROGRAM)
        self._await_failed_calls()
        procs = self.procs()
        if self.world is not None and not uses_collectives():
            self.spoil("the program has ended it")
        with self.lock:
            if self.world is not None and not self.broken:
                self._note_use()
                return self.world
            newer_than, joining = self.generation, self._joining
            promise: Promise[Any] = Promise(node, f"the process group of {procs.name}")
            self._waiting.append(promise)
        dead = [rank for rank in range(procs.region().nelements) if self._is_dead(procs.proc(rank))]
        if dead:
            self._settle(None, GroupError(_lost(procs, dead), mesh=procs.name, ranks=tuple(dead)))
        elif joining:
            # Another rank was faster.
            pass
        elif procs.proc(0) == node.proc:
            convene(procs, newer_than)
        else:
            tell_proc(current_node(), procs.proc(0), convene, procs, newer_than)
        world = cast("World", promise.get(_PATIENCE))
        with self.lock:
            if world is self.world:
                self._note_use()
        return world

    def note_failed_call(self, src: str, port: int) -> None:
        """A call has failed here; those that its caller sent without knowing may be under way."""
        with self.lock:
            ports = self._failed_calls.setdefault(src, [])
            ports[:] = [*ports[1 - _FREED :], port]

    def _await_failed_calls(self) -> None:
        """Return a call that was sent before a failure was known waits until the failed one has ended on all ranks."""
        here = current.get()
        if here is None or not self._failed_calls:
            return
        src, port = here[1].src, here[1].port
        with self.lock:
            failed = [each for each in self._failed_calls.get(src, ()) if each < port]
        if not failed:
            return
        number = await_end(src, self.procs().uid, failed, port)
        with self.lock:
            left = set(self._failed_calls.get(src, ())).difference(failed)
            self._failed_calls[src] = sorted(left)
        if number:
            spoil_generation("ranks were freed from a collective of a call that failed; use the group again", number)

    def _note_use(self) -> None:
        """Return the call that runs here has the groups of this round; with the lock."""
        here = current.get()
        if here is not None:
            while len(self._used) >= _FREED:
                del self._used[next(iter(self._used))]
            self._used[here[1].src, here[1].port] = self.generation

    def used_generation(self, src: str, port: int) -> int:
        """Return the round that a call has got its groups from; the one of now if it has got none."""
        with self.lock:
            return self._used.get((src, port), self.generation)

    def _is_dead(self, proc: str) -> bool:
        peer = current_node().peers.known.get(proc)
        return peer is not None and peer.dead is not None

    def procs(self) -> Procs:
        """Return the processes of this rank's mesh."""
        config = current_node().config
        assert config is not None
        return config.procs

    def place(self, address: str, port: int) -> Place:
        """Where this rank stands among the others."""
        from monarch._tensors.collectives.interfaces import LOOPBACK
        from monarch._tensors.collectives.world import Place, own_device

        node, procs = current_node(), self.procs()
        assert node.config is not None
        addresses = node.config.addresses
        rank, local = node.rank, procs.per_host
        own = addresses[rank // local] if addresses else LOOPBACK
        return Place(rank, procs.region().nelements, rank % local, local, address, port, own, own_device())

    # Joining

    def join(self, number: int, address: str, port: int, roster: int, store: Any = None) -> None:
        """Take part in a round, in a thread of its own."""
        if store is None:
            self.cut_forming()
        with self.lock:
            if number <= self.generation:
                return
            self.roster = roster
            self.world = None
            ended, why = self._ended
            self.generation, self.broken, self._joining = number, why if number <= ended else "", number > ended
        if self.broken:
            self._settle(None, GroupError(why), number)
            return
        threading.Thread(
            target=self._join, args=(number, address, port, store), name="monarch-group", daemon=True
        ).start()

    def cut_forming(self) -> None:
        """What an older round still waits for does not come any more; before connections of the next one are there."""
        with self.lock:
            before = self._sockets
        if before is not None:
            from monarch._tensors.collectives.connections import open_sockets, shut_down

            shut_down(open_sockets() - before)

    def _join(self, number: int, address: str, port: int, store: Any) -> None:
        # The threads of gloo are started by this one.
        be_helper()
        with self._turn:
            if number == self.generation:
                self._form(number, address, port, store)

    def _leave_formed(self) -> None:
        """End the groups of the last world; until then torch's default group is one that belongs to nobody else."""
        from monarch._tensors.collectives.world import leave

        with self.lock:
            old = self._formed
        if old is not None:
            leave(old)
        with self.lock:
            self._formed = None

    def _form(self, number: int, address: str, port: int, store: Any) -> None:
        from monarch._tensors.collectives import store as rendezvous
        from monarch._tensors.collectives import world as worlds
        from monarch._tensors.collectives.connections import open_sockets

        try:
            self._leave_formed()
            with self.lock:
                self._sockets = open_sockets()
            place = self.place(address, port)
            if store is None:
                store = rendezvous.find_store(address, port, place.size)
            world = worlds.form(place, rendezvous.part_of(store, number))
            with self.lock:
                self._formed = world
        except BaseException as error:
            failed = error if isinstance(error, GroupError) else GroupError(f"the process group was not made: {error}")
            self._settle(None, self._reason(failed), number)
        else:
            self._settle(world, None, number)

    def _reason(self, error: GroupError) -> GroupError:
        """What broke the round, if that is known, rather than what came of it."""
        return GroupError(self.broken) if self.broken else error

    def _settle(self, world: World | None, error: GroupError | None, number: int | None = None) -> None:
        with self.lock:
            if number is not None and number != self.generation:
                return
            if number is not None:
                self._sockets, self._joining = None, False
                self.world = world
            if error is not None and number is not None:
                self.broken = self.broken or str(error)
            broken = GroupError(self.broken) if self.broken else error
            waiting, self._waiting = self._waiting, []
        for promise in waiting:
            if broken is not None:
                promise.complete(_raiser(broken))
            else:
                promise.complete(lambda: world)

    # Breaking

    def leave(self) -> None:
        """End the groups, because a program is to make its own; the next use makes them anew, with the others."""
        with self.lock:
            self.world = None
        self._leave_formed()

    @property
    def has_default(self) -> bool:
        """Whether torch's default group, if there is one, is of a round: of that of now, or of one before it."""
        return self._formed is not None

    def spoil(self, reason: str) -> int:
        """The groups are of no use any more: frees whoever waits in a collective; how many connections that cut."""
        from monarch._tensors.collectives.connections import open_sockets, shut_down

        with self.lock:
            world, before = self.world, self._sockets
            if world is not None or before is not None:
                self.broken = self.broken or reason
        count = world.free() if world is not None else 0
        if before is not None:
            count += shut_down(open_sockets() - before)
        return count

    def free_call(self, src: str, port: int, reason: str) -> None:
        """The collectives of a call cannot end, or are about to be aborted."""
        with self._told:
            if len(self._freed) >= _FREED:
                self._freed.clear()
            self._freed[src, port] = reason
            self._told.notify_all()

    def take_freed(self, src: str, port: int, patience: float) -> str:
        """Why the collectives of a call that has ended could not end; empty if nobody has said that in time."""
        with self._told:
            # After a death there is nothing more to be told.
            self._told.wait_for(lambda: (src, port) in self._freed or self._death_in == self.generation, patience)
            return self._freed.pop((src, port), "")

    def doom(self, src: str, port: int, reason: str, failed: Iterable[int]) -> None:
        """Ranks will not join the collectives of a constructor."""
        with self._told:
            while len(self._doomed) >= _FREED:
                del self._doomed[next(iter(self._doomed))]
            self._doomed[src, port] = reason, frozenset(failed)

    def check_doom(self, ranks: Iterable[int]) -> None:
        """Raise if the code that runs here is a constructor that some of these ranks will not join."""
        here = current.get()
        if here is None or not self._doomed:
            return
        with self._told:
            reason, failed = self._doomed.get((here[1].src, here[1].port), ("", ()))
        if any(rank in failed for rank in ranks):
            raise GroupError(reason, mesh=self.procs().name)

    def end_generation(self, reason: str, number: int) -> bool:
        """A round is of no use any more, whether this rank was called to it or not; False if a newer one has begun."""
        with self.lock:
            if self.generation > number:
                return False
            if self._ended[0] < number:
                self._ended = number, reason
            if self._joining:
                # It may be ready before connections are there to be cut.
                self.broken = self.broken or reason
            return True

    def note_death(self) -> None:
        """A rank of the mesh has died, so its groups of this round are broken, which explains what they raise."""
        with self._told:
            self._death_in = self.generation
            self._told.notify_all()


_own = Rendezvous()


def local_rendezvous() -> Rendezvous:
    """That of this process."""
    return _own


# Services, which other processes ask for


@service("groups.convene", "quick")
def convene(procs: Procs, newer_than: int) -> None:
    """In the first rank of a mesh: begins a round, unless a newer one has begun already."""
    with _own.lock:
        # A new incarnation has counted no rounds, so one that is broken is no answer to it.
        if _own.convened > newer_than and not (_own.broken and _own.generation == _own.convened):
            return
        # A new incarnation does not know how far the one before had counted.
        known = max(_own.convened, newer_than, procs.version * _GENERATIONS)
        number = _own.convened = known + 1
    threading.Thread(target=_convene, args=(number,), name="monarch-convene", daemon=True).start()


def _convene(number: int) -> None:
    from monarch._tensors.collectives.interfaces import LOOPBACK
    from monarch._tensors.collectives.store import serve_store

    node, procs = current_node(), _own.procs()
    assert node.config is not None
    address = (node.config.addresses or (LOOPBACK,))[0]
    roster, size = procs.version, procs.region().nelements
    _own.cut_forming()
    try:
        store, port = serve_store(address, size)
    except (OSError, RuntimeError) as error:
        _own.join(number, address, 0, roster)
        _own._settle(None, GroupError(f"no store can be served at {address}: {error}"), number)
        return
    _own.kept[:] = [*_own.kept[-1:], store]
    for rank in range(size):
        if rank != node.rank:
            tell_proc(node, procs.proc(rank), join, procs, number, address, port, roster)
    _own.join(number, address, port, roster, store)


@service("groups.join", "quick")
def join(procs: Procs, number: int, address: str, port: int, roster: int) -> None:
    """In the other ranks: takes part in a round, to which the first rank calls those of a version of the roster."""
    _own.join(number, address, port, roster)


@service("groups.renew", "quick")
def renew(procs: Procs, roster: int) -> None:
    """Some ranks of a mesh were replaced; that the message has arrived tells all references in this process.

    It comes from the program, and the call to a new round from the first rank, which may be faster: a round of this
    version of the roster is one of the new ranks, and stays.
    """
    node = current_node()
    if node.config is None:
        # The program knows those that the owner does not, if that is a rank.
        tell_of_new_ones(procs)
        return
    for mailbox in list(actors_of(node).here.values()):
        spec = mailbox.spec
        if spec is not None and spec.whole and spec.procs == procs:
            spec.region = procs.region()
    if node.config.procs == procs and _own.roster < roster:
        _own.spoil(f"ranks of {procs.name} were replaced, or came or went; use the group again to make it anew")


def tell_of_new_ones(procs: Procs) -> None:
    """Tell all processes that this one knows which ranks of a mesh were replaced."""
    node = current_node()
    frame = ask_frame(node, request(renew, procs, procs.version), 0)
    for proc, peer in list(node.peers.known.items()):
        if peer.dead is None and proc != node.proc and not proc.endswith("/agent"):
            peer.send(frame)


@service("groups.spoil", "quick")
def spoil(reason: str) -> int:
    """Free a rank that waits in a collective, of its mesh's groups or of the person's own."""
    from monarch._tensors.collectives.connections import of_collectives, shut_down

    if _own.world is not None or _own._sockets is not None:
        return _own.spoil(reason)
    config = current_node().config
    # A rank without any group has connections of the person's own only.
    return shut_down(of_collectives(config.addresses if config is not None else ())) if uses_collectives() else 0


@service("groups.generation_now", "quick")
def generation_now() -> int:
    """Return the number of this rank's last round, whether its groups work or not."""
    return _own.generation


@service("groups.spoil_generation", "quick")
def spoil_generation(reason: str, number: int) -> int:
    """As ``spoil``, unless a newer round has begun: others may be faster than this message."""
    return spoil(reason) if _own.end_generation(reason, number) else 0


@service("groups.doom", "quick")
def doom(key: str, src: str, port: int, reason: str, failed: Sequence[int]) -> int:
    """Some constructors of a spawn have raised: if that of this rank goes on, it waits for none of them.

    Args:
        key: of the mesh that is spawned.
        src: proc that spawns it.
        port: where it waits for the actors.
        reason: for the error of the constructor.
        failed: ranks of this mesh of processes whose constructors have raised.

    Returns:
        The round of this rank whose groups it may wait in; 0 if there are none.
    """
    mailbox = actors_of(current_node()).here.get(key)
    if mailbox is not None and mailbox.is_coming:
        _own.doom(src, port, reason, failed)
        _own.free_call(src, port, reason)
    with _own.lock:
        return _own.generation if (_own.world is not None or _own._joining) and not _own.broken else 0


@service("groups.leave_generation", "quick")
def leave_generation(reason: str, number: int) -> None:
    """As ``spoil_round``, but groups that the person's code has made are left alone."""
    if _own.end_generation(reason, number):
        _own.spoil(reason)


def note_failure(error: BaseException) -> GroupError | None:
    """An endpoint or a cell has raised this: if it is of a collective that broke, the next use makes new groups.

    Returns:
        What to say instead, if the call was freed from a collective: torch only knows that connections were closed.
    """
    mismatch = _mismatch(error)
    if mismatch:
        return _instead_of(error, CollectiveMismatchError(mismatch, mesh=_own.procs().name))
    here = current.get()
    if here is not None and here[1].port:
        _own.note_failed_call(here[1].src, here[1].port)
    # Another rank that was freed closes its connections to this one, which may be faster than the reason.
    patience = _HEARING if broke(error) else 0.0
    # A newer one, which may begin now, is not what broke.
    number = _own.used_generation(here[1].src, here[1].port) if here is not None else _own.generation
    reason = _own.take_freed(here[1].src, here[1].port, patience) if here is not None else ""
    _give_up_if_broken(error, number)
    # An interrupt that came meanwhile is raised where the collective ends, with its error as context.
    caused = broke(error) or (isinstance(error, KeyboardInterrupt) and broke(error.__context__))
    # So is one that came to the collective after it was freed.
    caused = caused or (isinstance(error, GroupError) and str(error) == reason)
    if not reason or not caused:
        return None
    # Where the error comes from is told, and not what gloo says of connections that were closed here.
    return _instead_of(error, GroupError(reason, mesh=_own.procs().name))


def _instead_of(error: BaseException, known: GroupError) -> GroupError:
    """Have an error that says more take the place of another one, with its traceback."""
    known.__suppress_context__ = True
    return known.with_traceback(error.__traceback__)


def _mismatch(error: BaseException) -> str:
    """What the check of collectives has found; empty if this is something else, or there is no check."""
    if not CHECK_COLLECTIVES() or current_node().config is None:
        return ""
    from monarch._tensors.collectives.checks import describe_mismatch

    return describe_mismatch(error)


def broke(error: BaseException | None) -> bool:
    """Return whether an error is of a collective, or of the making of a group, whose connections do not work."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return _BROKEN.search(text) is not None or (CHECK_COLLECTIVES() and _UNCHECKED.search(text) is not None)


def _give_up_if_broken(error: BaseException, number: int) -> None:
    if _own.world is None or _own.broken or _own.generation != number or not broke(error):
        return
    procs = _own.procs()
    give_up(procs, number)
    for rank in range(procs.size):
        if rank != current_node().rank and not _own._is_dead(procs.proc(rank)):
            tell_proc(current_node(), procs.proc(rank), give_up, procs, number)


@service("groups.give_up", "quick")
def give_up(procs: Procs, number: int) -> None:
    """A round is of no use any more, since a connection between two of its ranks broke."""
    if _own.generation == number:
        _own.spoil(f"a connection of the process group of {procs.name} broke; use the group again to make it anew")


@service("groups.position", "quick")
def position() -> tuple[int, dict[str, int] | None]:
    """Return this rank's last generation and its progress in each group; None without working groups."""
    world = _own.world
    return _own.generation, (None if world is None or _own.broken else {"": _own.generation, **world.position()})


def member_died(dead: m.Dead) -> None:
    """A rank of this process's mesh has died, and this one may wait for it in a collective."""
    procs = _own.procs()
    rank = procs.rank_of(dead.proc)
    if procs.has(dead.proc):
        reason = f"{_lost(procs, [rank])}; it {dead.reason}"
        _own.note_death()
        spoil(reason)
        if _own.world is None:
            _own._settle(None, GroupError(reason, mesh=procs.name, ranks=(rank,)))


def uses_collectives() -> bool:
    """Return whether this process has a default process group."""
    import sys

    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _lost(procs: Procs, ranks: list[int]) -> str:
    total = procs.region().nelements
    return f"the process group of {procs.name} is broken, since {describe_ranks(ranks, total)} of it died"


def _raiser(error: BaseException) -> Callable[[], Any]:
    def make() -> Any:
        raise error

    return make
