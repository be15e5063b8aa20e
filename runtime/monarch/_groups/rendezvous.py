"""The rendezvous of a mesh's ranks for process groups, by messages, even while their actors are busy.

When a rank asks for a group, the first rank of the mesh convenes the others: it serves a store at a free port, tells
all ranks its address, and each joins in a separate thread. So a slice gets its group while other ranks are busy. The
result is a generation of groups; it breaks when a rank dies or a stop leaves a collective half done, and the next use
makes a new generation.
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

PROGRAM = "the program has no process groups, only ranks do; use them in endpoints and in %%mesh cells"
_BROKEN = re.compile(r"gloo/|NCCL error|Connection (closed|reset) by peer|Connection was likely closed")
"""torch's messages for a collective with broken connections."""
_UNCHECKED = re.compile(r"(failed to pass|reached) monitoredBarrier")
"""The same while the collective is being checked."""
_GENERATIONS = 1_000_000
"""More generations than one incarnation of a rank convenes."""
_PATIENCE = 90.0
"""Seconds to wait for a generation; joining ranks report missing ones earlier."""
_FREED = 256
"""The most freed calls that have not ended."""
_HEARING = 0.15
"""Seconds to wait for the reason why a collective's connections were closed."""
Sockets = frozenset[tuple[int, int]]
"""As ``open_sockets`` has them."""
NO_SOCKETS = Sockets()


class Rendezvous:
    """The process groups of this process's mesh."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0
        self.convened = 0
        self.roster = -1
        """Version of the roster of this generation. Lock: ``lock``."""
        self.world: World | None = None
        self._formed: World | None = None
        """The last world formed here, until this process has left it; it has torch's default group. Lock: ``lock``."""
        self._turn = threading.Lock()
        """Held while leaving one world and forming the next: torch has one default group at a time."""
        self.broken = ""
        """Why the groups of this generation are broken; empty while they work."""
        self._waiting: list[Promise[Any]] = []
        self._joining = False
        """Whether a generation is being formed."""
        self._sockets: set[tuple[int, int]] | None = None
        """The connections before the current formation; newer ones are cut if it cannot succeed."""
        self.kept: list[Any] = []
        """The stores that this process serves while others may use them."""
        self._death_in = -1
        """The generation of the last death in the mesh. Under ``_told``."""
        self._freed: dict[tuple[str, int], str] = {}
        """Why collectives of running calls cannot end, by caller and port. With the condition."""
        self._told = threading.Condition()
        self._doomed: dict[tuple[str, int], tuple[str, frozenset[int]]] = {}
        """For constructors of a failed spawn: the reason and the ranks that will not join. With the condition."""
        self._used: dict[tuple[str, int], int] = {}
        """The last generation that a call has used, by caller and port. Lock: ``lock``."""
        self._failed_calls: dict[str, list[int]] = {}
        """The ports of calls that have failed here, by caller. Lock: ``lock``."""
        self.gates: dict[str, int] = {}
        """By caller, its call that waits here until older ones have ended; single operations, read without a lock."""
        self._ended = 0, ""
        """The newest broken generation and why; the call to join it may arrive later. Lock: ``lock``."""

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
        """Note a failed call; its caller may have sent others before it knew."""
        with self.lock:
            ports = self._failed_calls.setdefault(src, [])
            ports[:] = [*ports[1 - _FREED :], port]

    def _await_failed_calls(self) -> None:
        """Wait, in a call sent before a failure was known, until the failed call has ended on all ranks."""
        here = current.get()
        if here is None or not self._failed_calls:
            return
        src, port = here[1].src, here[1].port
        with self.lock:
            failed = [each for each in self._failed_calls.get(src, ()) if each < port]
        if not failed:
            return
        self.gates[src] = port
        try:
            number = await_end(src, self.procs().uid, failed, port)
        finally:
            self.gates.pop(src, None)
        with self.lock:
            left = set(self._failed_calls.get(src, ())).difference(failed)
            self._failed_calls[src] = sorted(left)
        if number:
            spoil_generation("ranks were freed from a collective of a call that failed; use the group again", number)

    def _note_use(self) -> None:
        """Note that the running call uses the groups of this generation; with the lock."""
        here = current.get()
        if here is not None:
            while len(self._used) >= _FREED:
                del self._used[next(iter(self._used))]
            self._used[here[1].src, here[1].port] = self.generation

    def used_generation(self, src: str, port: int) -> int:
        """Return the generation that a call has used; the current one if it has used none."""
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
        """Return the place of this rank among the others."""
        from monarch._tensors.collectives.interfaces import LOOPBACK
        from monarch._tensors.collectives.world import Place, own_device

        node, procs = current_node(), self.procs()
        assert node.config is not None
        addresses = node.config.addresses
        rank, local = node.rank, procs.per_host
        own = addresses[rank // local] if addresses else LOOPBACK
        return Place(rank, procs.region().nelements, rank % local, local, address, port, own, own_device())

    # Joining

    def join(
        self, number: int, address: str, port: int, roster: int, store: Any = None, of_store: Sockets = NO_SOCKETS
    ) -> None:
        """Join a generation, in a separate thread; the rank that serves the store passes its open sockets."""
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
            target=self._join, args=(number, address, port, store, of_store), name="monarch-group", daemon=True
        ).start()

    def cut_forming(self) -> None:
        """Cut the formation of an older generation, before the next one has connections."""
        with self.lock:
            before = self._sockets
        if before is not None:
            from monarch._tensors.collectives.connections import open_sockets, shut_down

            shut_down(open_sockets() - before)

    def _join(self, number: int, address: str, port: int, store: Any, of_store: Sockets) -> None:
        # This thread starts the threads of gloo.
        be_helper()
        with self._turn:
            if number == self.generation:
                self._form(number, address, port, store, of_store)

    def _leave_formed(self) -> None:
        """End the groups of the last world, including torch's default group."""
        from monarch._tensors.collectives.world import leave

        with self.lock:
            old = self._formed
        if old is not None:
            leave(old)
        with self.lock:
            self._formed = None

    def _form(self, number: int, address: str, port: int, store: Any, of_store: Sockets) -> None:
        from monarch._tensors.collectives import store as rendezvous
        from monarch._tensors.collectives import world as worlds
        from monarch._tensors.collectives.connections import open_sockets

        try:
            self._leave_formed()
            with self.lock:
                # This rank waits on a socket of its own store as well; a cut must reach it.
                self._sockets = open_sockets() - of_store
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
        """Return what broke the generation, rather than its consequence."""
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
        """End the groups, since a program makes its own; the next use recreates them."""
        with self.lock:
            self.world = None
        self._leave_formed()

    @property
    def has_default(self) -> bool:
        """Return whether torch's default group, if any, belongs to a generation."""
        return self._formed is not None

    def spoil(self, reason: str) -> int:
        """Mark the groups broken and free waiting ranks; return the number of connections cut."""
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
        """Note that collectives of a call cannot end or are about to be aborted."""
        with self._told:
            if len(self._freed) >= _FREED:
                self._freed.clear()
            self._freed[src, port] = reason
            self._told.notify_all()

    def take_freed(self, src: str, port: int, patience: float) -> str:
        """Return why the collectives of an ended call could not end; empty if nobody told in time."""
        with self._told:
            # After a death there are no further reasons.
            self._told.wait_for(lambda: (src, port) in self._freed or self._death_in == self.generation, patience)
            return self._freed.pop((src, port), "")

    def doom(self, src: str, port: int, reason: str, failed: Iterable[int]) -> None:
        """Note that ranks will not join the collectives of a constructor."""
        with self._told:
            while len(self._doomed) >= _FREED:
                del self._doomed[next(iter(self._doomed))]
            self._doomed[src, port] = reason, frozenset(failed)

    def check_doom(self, ranks: Iterable[int]) -> None:
        """Raise if this code is a constructor whose collectives some of these ranks will not join."""
        here = current.get()
        if here is None or not self._doomed:
            return
        with self._told:
            reason, failed = self._doomed.get((here[1].src, here[1].port), ("", ()))
        if any(rank in failed for rank in ranks):
            raise GroupError(reason, mesh=self.procs().name)

    def end_generation(self, reason: str, number: int) -> bool:
        """Mark a generation broken, joined or not; return False if a newer one has begun."""
        with self.lock:
            if self.generation > number:
                return False
            if self._ended[0] < number:
                self._ended = number, reason
            if self._joining:
                # It may be ready before it has connections to cut.
                self.broken = self.broken or reason
            return True

    def note_death(self) -> None:
        """Note a death in the mesh, which breaks this generation and explains its errors."""
        with self._told:
            self._death_in = self.generation
            self._told.notify_all()


_own = Rendezvous()


def local_rendezvous() -> Rendezvous:
    """Return the rendezvous of this process."""
    return _own


# Services for other processes


@service("groups.convene", "quick")
def convene(procs: Procs, newer_than: int) -> None:
    """Begin a generation in the first rank of a mesh, unless a newer one has begun."""
    with _own.lock:
        # A new incarnation has not counted any, so a broken generation does not answer it.
        if _own.convened > newer_than and not (_own.broken and _own.generation == _own.convened):
            return
        # A new incarnation does not know its predecessor's count.
        known = max(_own.convened, newer_than, procs.version * _GENERATIONS)
        number = _own.convened = known + 1
    threading.Thread(target=_convene, args=(number,), name="monarch-convene", daemon=True).start()


def _convene(number: int) -> None:
    from monarch._tensors.collectives.connections import open_sockets
    from monarch._tensors.collectives.interfaces import LOOPBACK
    from monarch._tensors.collectives.store import serve_store

    node, procs = current_node(), _own.procs()
    assert node.config is not None
    address = (node.config.addresses or (LOOPBACK,))[0]
    roster, size = procs.version, procs.region().nelements
    _own.cut_forming()
    before = open_sockets()
    try:
        store, port = serve_store(address, size)
    except (OSError, RuntimeError) as error:
        _own.join(number, address, 0, roster)
        _own._settle(None, GroupError(f"no store can be served at {address}: {error}"), number)
        return
    of_store = frozenset(open_sockets() - before)
    _own.kept[:] = [*_own.kept[-1:], store]
    for rank in range(size):
        if rank != node.rank:
            tell_proc(node, procs.proc(rank), join, procs, number, address, port, roster)
    _own.join(number, address, port, roster, store, of_store)


@service("groups.join", "quick")
def join(procs: Procs, number: int, address: str, port: int, roster: int) -> None:
    """Join a generation in the other ranks, called by the first rank with a version of the roster."""
    _own.join(number, address, port, roster)


@service("groups.renew", "quick")
def renew(procs: Procs, roster: int) -> None:
    """Handle the replacement of ranks; the arrival of the roster updates all references in this process.

    It comes from the program. The first rank's call to a new generation may be faster: a generation with this version
    of the roster includes the new ranks and stays.
    """
    node = current_node()
    if node.config is None:
        # If the owner is a rank, the program knows more processes.
        tell_of_new_ones(procs)
        return
    for mailbox in list(actors_of(node).here.values()):
        spec = mailbox.spec
        if spec is not None and spec.whole and spec.procs == procs:
            spec.region = procs.region()
    if node.config.procs == procs and _own.roster < roster:
        _own.spoil(f"ranks of {procs.name} were replaced, added or removed; the next use of the group recreates it")


def tell_of_new_ones(procs: Procs) -> None:
    """Tell all known processes which ranks of a mesh were replaced."""
    node = current_node()
    frame = ask_frame(node, request(renew, procs, procs.version), 0)
    for proc, peer in list(node.peers.known.items()):
        if peer.dead is None and proc != node.proc and not proc.endswith("/agent"):
            peer.send(frame)


@service("groups.spoil", "quick")
def spoil(reason: str) -> int:
    """Free a rank from a collective, of its mesh's groups or of the user's."""
    from monarch._tensors.collectives.connections import of_collectives, shut_down

    if _own.world is not None or _own._sockets is not None:
        return _own.spoil(reason)
    config = current_node().config
    # A rank without groups has only the user's connections.
    return shut_down(of_collectives(config.addresses if config is not None else ())) if uses_collectives() else 0


@service("groups.generation_now", "quick")
def generation_now() -> int:
    """Return the number of this rank's last generation, working or broken."""
    return _own.generation


@service("groups.spoil_generation", "quick")
def spoil_generation(reason: str, number: int) -> int:
    """Call ``spoil`` unless a newer generation has begun, since others may overtake this message."""
    return spoil(reason) if _own.end_generation(reason, number) else 0


@service("groups.doom", "quick")
def doom(key: str, src: str, port: int, reason: str, failed: Sequence[int]) -> int:
    """Keep this rank's constructor, if it goes on, from waiting for failed ones of its spawn.

    Args:
        key: of the spawned mesh.
        src: the spawning proc.
        port: the port at which it waits for the actors.
        reason: for the error of the constructor.
        failed: ranks of this process mesh whose constructors raised.

    Returns:
        The generation in whose groups it may wait; 0 if there are none.
    """
    mailbox = actors_of(current_node()).here.get(key)
    if mailbox is not None and mailbox.is_coming:
        _own.doom(src, port, reason, failed)
        _own.free_call(src, port, reason)
    with _own.lock:
        return _own.generation if (_own.world is not None or _own._joining) and not _own.broken else 0


@service("groups.leave_generation", "quick")
def leave_generation(reason: str, number: int) -> None:
    """Call ``spoil_generation``, but leave the user's own groups alone."""
    if _own.end_generation(reason, number):
        _own.spoil(reason)


def note_failure(error: BaseException) -> GroupError | None:
    """Handle an error of an endpoint or a cell: after a broken collective, the next use makes new groups.

    Returns:
        A replacement if the call was freed from a collective, since torch only reports closed connections.
    """
    mismatch = _mismatch(error)
    if mismatch:
        return _instead_of(error, CollectiveMismatchError(mismatch, mesh=_own.procs().name))
    here = current.get()
    if here is not None and here[1].port:
        _own.note_failed_call(here[1].src, here[1].port)
    # The closed connections of another freed rank may be noticed before the reason arrives.
    patience = _HEARING if broke(error) else 0.0
    # A newer generation, which may begin now, is not the broken one.
    number = _own.used_generation(here[1].src, here[1].port) if here is not None else _own.generation
    reason = _own.take_freed(here[1].src, here[1].port, patience) if here is not None else ""
    _give_up_if_broken(error, number)
    # A pending interrupt is raised when the collective ends, with its error as context.
    caused = broke(error) or (isinstance(error, KeyboardInterrupt) and broke(error.__context__))
    # So is one that arrived after the collective was freed.
    caused = caused or (isinstance(error, GroupError) and str(error) == reason)
    if not reason or not caused:
        return None
    # Report the origin of the error, not gloo's text about connections closed here.
    return _instead_of(error, GroupError(reason, mesh=_own.procs().name))


def _instead_of(error: BaseException, known: GroupError) -> GroupError:
    """Replace an error with a more precise one, keeping its traceback."""
    known.__suppress_context__ = True
    return known.with_traceback(error.__traceback__)


def _mismatch(error: BaseException) -> str:
    """Return the finding of the check of collectives; empty for other errors or without a check."""
    if not CHECK_COLLECTIVES() or current_node().config is None:
        return ""
    from monarch._tensors.collectives.checks import describe_mismatch

    return describe_mismatch(error)


def broke(error: BaseException | None) -> bool:
    """Return whether an error comes from broken connections of a collective or of a group being made."""
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
    """Mark a generation broken, since a connection between two of its ranks broke."""
    if _own.generation == number:
        _own.spoil(f"a connection of the process group of {procs.name} broke; the next use of the group recreates it")


@service("groups.position", "quick")
def position() -> tuple[int, dict[str, int] | None]:
    """Return this rank's last generation and its progress in each group; None without working groups."""
    world = _own.world
    return _own.generation, (None if world is None or _own.broken else {"": _own.generation, **world.position()})


def member_died(dead: m.Dead) -> None:
    """Handle the death of a rank that this one may wait for in a collective."""
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
