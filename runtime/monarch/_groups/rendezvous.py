"""The rendezvous of a mesh's ranks for process groups, by messages, even while their actors are busy.

When a rank asks for a group, the first rank of the mesh convenes the others: it serves a store at a free port, tells
all ranks its address, and each joins in a separate thread. So a slice gets its group while other ranks are busy. The
result is a generation of groups; it breaks when a rank dies or a stop leaves a collective half done, and the next use
makes a new generation. ``convening`` begins one, ``breaking`` ends one; here is what a rank knows of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._actors.running import current
from monarch._core.roster import Procs
from monarch._groups.calls import CallRecords
from monarch._groups.environment import rank_gpu
from monarch._node.current import current_node, has_node
from monarch._node.future import Promise
from monarch._procs.os.helpers import be_helper
from monarch._python.threads import spawn_thread
from monarch._tensors.collectives import connections
from monarch._tensors.torch_compat import default_group
from monarch.exceptions import GroupError

if TYPE_CHECKING:
    from monarch._tensors.collectives.renewed import Formers
    from monarch._tensors.collectives.world import JoinInfo, World

Sockets = frozenset[tuple[int, int]]
"""As ``open_sockets`` has them."""
NO_SOCKETS = Sockets()


class Expected(NamedTuple):
    """A working default group, or a promise of the next one."""

    world: World | None
    promise: Promise[Any] | None
    newer_than: int
    """The generation after which the promised one comes."""
    is_joining: bool
    """Whether this rank joins it already."""


class Rendezvous:
    """The process groups of this process's mesh."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Lock for writing: lock; any thread reads them.
        self.generation = 0
        """The newest generation that this rank has heard of."""
        self.convened = 0
        """The newest generation that this process has convened; only on the first rank."""
        self.roster = -1
        """Version of the roster of this generation. Lock: ``lock``."""
        self.world: World | None = None
        """The groups of this generation; None until they are formed. Lock for writing: ``lock``."""
        self._formed: World | None = None
        """The last world formed here, until this process has left it; it has torch's default group. Lock: ``lock``."""
        self._formers: Formers | None = None
        """The groups of the last world, for the next one; used by the thread that leaves one or forms the next."""
        self._turn = threading.Lock()
        """Held while leaving one world and forming the next: torch has one default group at a time."""
        self.broken = ""
        """Why the groups of this generation are broken; empty while they work. Lock for writing: ``lock``."""
        self._waiting: list[Promise[Any]] = []
        """Of the threads that wait for the groups. Lock: ``lock``."""
        self._joining = False
        """Whether a generation is being formed. Lock: ``lock``."""
        self.refused: tuple[int, str, float] = -1, "", 0.0
        """On the first rank: the generation after which another rank cannot join one, why, and until when that counts.
        Lock: ``lock``."""
        self.asked = ""
        """The process that this one has asked last to begin a generation. Written by threads of calls, as a whole."""
        self._sockets: set[tuple[int, int]] | None = None
        """The connections before the current formation; newer ones are cut if it cannot succeed. Lock for writing:
        ``lock``."""
        self.kept: list[Any] = []
        """The stores that this process serves while others may use them."""
        self.calls = CallRecords()
        self.actors: set[str] = set()
        """Keys of the actors of this process that have ever used groups. Only grows. Lock for writing: ``lock``."""
        self.on_broken: Callable[[], None] = _nothing
        """Called when a working generation has broken, by any thread; it must not wait. Set once."""
        self.on_failed: Callable[[], None] = _nothing
        """Called when a call has failed here while others may wait for it in a collective, likewise."""
        self.on_abort: Callable[[str], None] = _nothing
        """Called with the reason before NCCL groups are aborted, likewise."""
        self.on_formed: Callable[[World], None] = _nothing
        """Called with the groups of a generation before anyone gets them, by the thread that forms them."""
        self.on_unformed: Callable[[int, str], None] = _nothing
        """Called with a generation and the reason if this rank could not form its part of it."""
        self._ended = 0, ""
        """The newest broken generation and why; the call to join it may arrive later. Lock: ``lock``."""

    # The program's side

    def expect(self) -> Expected:
        """Return the default group if it works, else a promise of the next one."""
        with self.lock:
            if self.world is not None and not self.broken:
                self._note_use()
                return Expected(self.world, None, self.generation, False)
            promise: Promise[Any] = Promise(current_node(), f"the process group of {self.procs().name}")
            self._waiting.append(promise)
            return Expected(None, promise, self.generation, self._joining)

    def note_use(self, world: World) -> None:
        """Note that the running call uses a default group, if it still is the one of this generation."""
        with self.lock:
            if world is self.world:
                self._note_use()

    def works(self, number: int) -> bool:
        """Return whether the connections of a generation are there, and it is the newest one."""
        world = self.world
        return world is not None and not world.broken and self.generation == number

    def number_of(self, world: World) -> int:
        """Return the generation of a default group; 0 if a newer one has begun."""
        with self.lock:
            return self.generation if world is self.world else 0

    def is_used_by(self, src: str, port: int) -> bool:
        """Return whether a running call uses this generation, and it works."""
        return self.world is not None and not self.broken and self.calls.used(src, port, -1) == self.generation

    def _note_use(self) -> None:
        here = current.get()
        if here is not None:
            self.actors.add(here[0].key)
            self.calls.use(here[1].src, here[1].port, self.generation)

    def usable_generation(self) -> int:
        """Return this generation if its groups work or are being made, else 0."""
        with self.lock:
            return self.generation if (self.world is not None or self._joining) and not self.broken else 0

    @property
    def is_forming(self) -> bool:
        """Return whether this rank makes its part of a generation."""
        return self._joining or self._sockets is not None

    def procs(self) -> Procs:
        """Return the processes of this rank's mesh."""
        config = current_node().config
        assert config is not None
        return config.procs

    def place(self, address: str, port: int) -> JoinInfo:
        """Return the place of this rank among the others."""
        from monarch._tensors.collectives.interfaces import LOOPBACK
        from monarch._tensors.collectives.world import JoinInfo

        node, procs = current_node(), self.procs()
        assert node.config is not None
        addresses = node.config.addresses
        rank, local = node.rank, procs.per_host
        own = addresses[rank // local] if addresses else LOOPBACK
        gpu, size = rank_gpu(), procs.region().nelements
        return JoinInfo(rank, size, rank % local, local, address, port, own, gpu.name(), gpu.of_groups(), gpu.is_used())

    # Joining

    def join(
        self, number: int, address: str, port: int, roster: int, store: Any = None, of_store: Sockets = NO_SOCKETS
    ) -> None:
        """Join a generation, in a separate thread; the rank that serves the store passes its open sockets."""
        with self.lock:
            if number <= self.generation:
                return
            self.roster = roster
            self.world = None
            ended, why = self._ended
            self.generation, self.broken, self._joining = number, why if number <= ended else "", number > ended
        if store is None:
            self.cut_forming()
        if self.broken:
            self.settle(None, GroupError(why), number)
            return
        try:
            spawn_thread("monarch-group", self._join, number, address, port, store, of_store)
        except RuntimeError as error:
            # No memory for a thread. The caller that waits for the groups tells the other ranks.
            self.abandon(number, f"rank {current_node().rank} cannot join the process group: {error}")

    def abandon(self, number: int, reason: str) -> None:
        """Free those who wait for a generation that cannot be made, or make their part of it."""
        with self.lock:
            if number < self.generation:
                return
            self.generation, self.world, self.broken = number, None, reason
        self.cut_forming()
        self.settle(None, GroupError(reason), number)

    def cut_forming(self) -> None:
        """Cut the formation of an older generation, before the next one has connections."""
        with self.lock:
            before = self._sockets
        if before is not None:
            _cut(before)

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
            leave(old, self._known_formers())
        with self.lock:
            self._formed = None

    def _known_formers(self) -> Formers:
        from monarch._tensors.collectives.renewed import Formers

        self._formers = self._formers or Formers()
        return self._formers

    def _form(self, number: int, address: str, port: int, store: Any, of_store: Sockets) -> None:
        from monarch._tensors.collectives import newcomers
        from monarch._tensors.collectives import store as rendezvous
        from monarch._tensors.collectives import world as worlds
        from monarch._tensors.collectives.connections import open_sockets

        def ended() -> str:
            return self._ended_early(number)

        newcomers.joins = _joins_others
        try:
            self._leave_formed()
            with self.lock:
                # This rank waits on a socket of its own store as well; a cut must reach it.
                self._sockets = open_sockets() - of_store
            if reason := ended():
                # There was nothing to cut yet, so this rank would wait for ranks that do not come.
                raise GroupError(reason)
            place = self.place(address, port)
            if store is None:
                store = rendezvous.find_store(address, port, place.size, ended)
            world = worlds.form(place, rendezvous.part_of(store, number), self._known_formers(), ended)
            with self.lock:
                self._formed = world
            self.on_formed(world)
        except BaseException as error:
            failed = (
                error if isinstance(error, GroupError) else GroupError(f"the process group was not created: {error}")
            )
            with self.lock:
                is_first = number == self.generation and not self.broken
            self.settle(None, self._reason(failed), number)
            if is_first:
                self.on_unformed(number, str(failed))
        else:
            self.settle(world, None, number)

    def _ended_early(self, number: int) -> str:
        """Return why a generation under formation has ended; empty if it has not."""
        with self.lock:
            if number < max(self.generation, self.convened):
                return "superseded by a newer process group before all ranks had joined"
            return self.broken

    def _reason(self, error: GroupError) -> GroupError:
        """Return what broke the generation, rather than its consequence."""
        return GroupError(self.broken) if self.broken else error

    def settle(self, world: World | None, error: GroupError | None, number: int | None = None) -> None:
        """Give those who wait the default group of a generation or its error; without a number, of any."""
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

    def retire(self, reason: str, number: int) -> None:
        """Mark the groups of a generation broken and leave their connections open, since others may still use them."""
        with self.lock:
            if number != self.generation or self.world is None:
                return
            self.broken = self.broken or reason

    @property
    def has_default(self) -> bool:
        """Return whether torch's default group, if any, belongs to a generation."""
        return self._formed is not None

    @property
    def lacks_default(self) -> bool:
        """Return whether the default group of a generation has broken, and the next one has not been made yet."""
        with self.lock:
            had = self._formed is not None or self._joining
            return had and (self.world is None or bool(self.broken))

    def spoil(self, reason: str, number: int | None = None) -> int:
        """Mark the groups broken and free waiting ranks; return the number of connections cut.

        Args:
            reason: for those who wait.
            number: the generation that is meant: a newer one, for which other ranks wait, is left alone. None for any.
        """
        with self.lock:
            if number is not None and number != self.generation:
                return 0
            world, before = self.world, self._sockets
            # It may have no connections to cut yet.
            if world is not None or before is not None or self._joining:
                self.broken = self.broken or reason
        if world is not None:
            self.on_broken()
            if world.uses_nccl():
                self.on_abort(reason)
        count = world.free(reason) if world is not None else 0
        if before is not None:
            count += _cut(before)
        return count

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


def _cut(before: AbstractSet[tuple[int, int]]) -> int:
    """Cut the connections that the formation of a generation has made; return how many.

    Args:
        before: the sockets from before it.
    """
    from monarch._tensors.collectives.connections import open_sockets, shut_down
    from monarch._tensors.collectives.made_groups import free_making
    from monarch._tensors.collectives.nccl import free_connecting

    count = free_connecting() + shut_down(open_sockets() - before)
    free_making()
    return count


def _nothing(*_: object) -> None:
    pass


def _later(seconds: float, action: Callable[[], None]) -> None:
    if has_node():
        current_node().receive_loop.call_later(seconds, action)
    else:
        connections.by_timer(seconds, action)


connections.later = _later
_own = Rendezvous()


def local_rendezvous() -> Rendezvous:
    """Return the rendezvous of this process."""
    return _own


def is_dead(proc: str) -> bool:
    """Return whether this process knows that another one has died."""
    peer = current_node().peers.known.get(proc)
    return peer is not None and peer.dead is not None


def uses_collectives() -> bool:
    """Return whether this process has a default process group."""
    return default_group() is not None


def _raiser(error: BaseException) -> Callable[[], Any]:
    def make() -> Any:
        raise error

    return make


def _joins_others() -> bool:
    """Return whether this thread runs the constructor of an actor that joins others of its mesh."""
    here = current.get()
    return here is not None and here[1].method == "__init__" and here[0].spec is not None and here[0].spec.is_added
