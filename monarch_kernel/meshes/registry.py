"""The meshes of a notebook, by name."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from monarch._kernel_api import (
    ActorMesh,
    Answers,
    CellResult,
    Channel,
    Future,
    Liveness,
    Namespace,
    ProcMesh,
    StateTransfer,
    current_node,
    give_copies,
    groups,
    heal_mesh,
    in_step,
    in_thread,
    meshes_of,
    request,
    spoil_groups,
    take_copies,
    to_its_end,
)
from monarch.exceptions import DeviceMeshError, MonarchError
from monarch_kernel.cells.running import STOPPED, Run
from monarch_kernel.editing.definitions import Definitions
from monarch_kernel.magics.header import Header, HeaderError, ranks_of
from monarch_kernel.meshes.hosts import Hosts
from monarch_kernel.meshes.recipe import Recipe

Stage = Callable[[str, Any], None]
"""Is told what begins, and the future that it ends with."""


_LOOK = 0.5
"""Seconds for ranks to say that they are there, before a table says that they do not."""
_HEARING = 0.2
"""Seconds for ranks to say how far they are."""
_HEARING_ONE = 0.3
"""Seconds more for the first of them, on a busy machine."""


class NoMesh(MonarchError):
    """There is no mesh, or none of that name."""


class Mesh:
    """A mesh that was started by ``%mesh up``: its processes, and the namespace on each."""

    def __init__(self, recipe: Recipe, procs: ProcMesh, cells: ActorMesh, release: Callable[[], object]) -> None:
        self.recipe = recipe
        self.name = recipe.name
        self.procs = procs
        self.cells = cells
        self.hosts = Hosts(recipe, procs, release)
        self.definitions = Definitions()
        self._bare: set[int] = set()
        """Ranks that are new, or will be, and lack the definitions."""
        self.unfinished: list[Run] = []
        """Cells that were stopped while ranks were inside C calls, which they leave when those return."""

    def finishing(self) -> list[int]:
        """The ranks that are still inside a C call of a cell that was stopped."""
        self.unfinished = [run for run in self.unfinished if not run.done]
        return sorted({rank for run in self.unfinished for rank in run.missing()})

    def check_groups(self, cut: bool, known: int = 0) -> None:
        """After a stop: the process groups are made anew if some ranks have left a collective that others are in.

        Args:
            cut: whether a rank was freed from a collective, so that there is no doubt.
            known: the newest generation of groups that ranks have said to have, if any has.
        """
        if cut and known:
            self._spoil(known)
            return
        peers = [peer.proc for peer in self.cells._members_at().peers if peer.dead is None]
        positions = _positions(peers)
        # A rank that cannot say is in C, and may be in a collective.
        if cut or len(positions) < len(peers) or not in_step({n: at for n, (_, at) in enumerate(positions)}):
            self._spoil(max((number for number, _ in positions), default=0))

    def _spoil(self, number: int) -> None:
        """A rank that hears of it late, as it was suspended or held the GIL, may be in newer groups by then."""
        spoil_groups(current_node(), [self.procs._state.procs], STOPPED, number)

    def actors(self) -> list[ActorMesh]:
        """The meshes of actors that live in its processes, besides the namespaces."""
        found = list(meshes_of(current_node()).actor_meshes.values())
        return [
            mesh
            for mesh in found
            if mesh._state.procs == self.procs._state.procs and mesh._stopped is None and mesh != self.cells
        ]

    def dead(self) -> list[int]:
        """The ranks that have died."""
        procs, node = self.procs._state.procs, current_node()
        return [rank for rank in range(len(self.procs)) if node.peers.get(procs.proc(rank)).dead is not None]

    def heal(self, define: bool) -> list[tuple[int, int]]:
        """Puts new processes in the place of the ranks that have died.

        Args:
            define: whether the definitions of the cells that ran on them are run there again.

        Returns:
            The new ranks, each with how many cells of definitions it has got.
        """
        self._bare.update(self.dead())
        lost = self.hosts.lost()
        heal_mesh(self.procs, hosts=self.hosts.free(lost) if lost else None)
        return self._fill(define)

    def copy(self, ranks: list[int], source: int | None, names: list[str]) -> tuple[list[str], dict[str, str]]:
        """Copies variables to some ranks from one that lives.

        Args:
            ranks: which are to have them.
            source: the rank that has them; None for any other.
            names: of the variables; all that can be copied if there are none.

        Returns:
            The names of what was copied, and of what was not, with the reason.
        """
        return StateTransfer(self.cells, ranks, source).run(60.0, give_copies, take_copies, names)

    def resize(self, sizes: dict[str, int]) -> int:
        """Makes it larger or smaller; how many cells of definitions new ranks have got."""
        procs = self.procs._state.procs
        now = dict(self.procs.sizes)
        of_hosts = procs.labels[: procs.host_axes]
        missing = prod(sizes.get(label, now[label]) for label in of_hosts) - len(procs.hosts) if of_hosts else 0
        wanted = prod({**now, **{label: size for label, size in sizes.items() if size > 0}}.values())
        self._bare.update(range(len(self.procs), wanted))
        self.procs.resize(self.hosts.free(missing) if missing > 0 else None, **sizes)
        # A restart makes it as it is now.
        if not self.recipe.roles:
            self.recipe.axes = {label: size for label, size in self.procs.sizes.items() if label not in of_hosts}
        if self.recipe.hosts.isdecimal():
            self.recipe.hosts = str(len(procs.hosts))
        return max((count for _, count in self._fill(True)), default=0)

    def _fill(self, define: bool) -> list[tuple[int, int]]:
        """Has the definitions run on ranks that lack them; also on those of a heal or resize that was interrupted."""
        filled: list[tuple[int, int]] = []
        for rank in sorted(self._bare):
            try:
                if rank < len(self.procs):
                    filled.append((rank, self._define(rank) if define else 0))
            except Exception:
                # It would not be otherwise the next time.
                self._bare.discard(rank)
                raise
            self._bare.discard(rank)
        return filled

    def _define(self, rank: int) -> int:
        cells: Any = self.cells._member(rank)
        port, receiver = Channel.open()
        try:
            defined = self.definitions.of(rank)
            for each in defined:
                result: CellResult = cells.run.call_one(each.text, each.name, port).get()
                if result.error is not None:
                    raise MonarchError(
                        f"rank {rank} is there again, but what {each.name} defines could not be defined there: "
                        f"{result.error.kind}: {result.error.text}; run the cell again"
                    )
            return len(defined)
        finally:
            receiver.close()

    def look(self) -> None:
        """Learns which ranks answer now, for a table to show."""
        node, procs = current_node(), self.procs._state.procs
        if (silence := node.find_part(Liveness)) is not None:
            peers = [node.peers.get(procs.proc(rank)) for rank in range(len(self.procs))]
            silence.look([peer.proc for peer in peers if peer.dead is None], _LOOK)

    def end(self) -> None:
        """Ends its processes, and gives the hosts back."""
        try:
            self.procs.stop().get(15)
        finally:
            self.hosts.release()

    def choose(self, header: Header) -> list[ActorMesh]:
        """The ranks that a cell is for, as views of the namespaces."""
        return choose(self.cells, header)


def choose(actors: ActorMesh, header: Header) -> list[ActorMesh]:
    """The actors that a cell is for: one view, or one of each if they make no regular view."""
    if header.role:
        shared = meshes_of(current_node()).own_procs.get(actors._state.procs.uid)
        roles = shared.roles if shared is not None else {}
        if header.role not in roles:
            raise HeaderError(
                f"[{header.role}] is neither numbers nor ranges of ranks, such as [0,3] or [0:4], nor a role; this "
                f"mesh has {'the roles ' + ', '.join(roles) if roles else 'no roles'}"
            )
        ranks = roles[header.role]
        return [actors.slice(**{actors.extent.labels[-1]: slice(ranks.start, ranks.stop)})]
    if header.axes is not None:
        return [actors.slice(**header.axes)]
    if header.ranks is None:
        return [actors]
    chosen = ranks_of(header.ranks, len(actors))
    if chosen == list(range(len(actors))):
        return [actors]
    return [actors._member(rank) for rank in chosen]


class Meshes:
    """All meshes of the notebook, and the one that is in use.

    Args:
        variables: of the notebook; each mesh has one of its name, unless the person has that already.
    """

    def __init__(self, variables: dict[str, Any] | None = None) -> None:
        self.by_name: dict[str, Mesh] = {}
        self.used: str | None = None
        self._variables = variables if variables is not None else {}
        self._changing: dict[str, Future[Mesh]] = {}
        """Restarts that are under way, by name; added by the main thread, taken away by that of the restart."""

    def add(self, mesh: Mesh) -> bool:
        """Takes a mesh, makes it the one in use, and a variable of its name; whether there could be one."""
        self.by_name[mesh.name] = mesh
        self.used = mesh.name
        known = self._variables.get(mesh.name)
        free = mesh.name not in self._variables or (isinstance(known, ProcMesh) and known.name == mesh.name)
        if free:
            self._variables[mesh.name] = mesh.procs
        return free

    def up(self, recipe: Recipe, names: Mapping[str, Any], stage: Stage) -> Mesh:
        """Starts a mesh, waits until it is there, and makes it the one in use.

        Args:
            recipe: what it is made of.
            names: the variables of the notebook.
            stage: is told of each stage.
        """
        name = recipe.name
        if name in self.by_name:
            raise HeaderError(f"there is a mesh {name!r} already; take it down first by %mesh down {name}")
        hosts, release = recipe.find_hosts(names)
        mesh: Mesh | None = None
        try:
            procs = recipe.spawn(hosts)
            cells: Any = procs.spawn(name, Namespace, name, recipe.device)
            mesh = Mesh(recipe, procs, cells, release)
            stage("ranks run", procs.initialized)
            stage("namespaces are ready", cells.initialized)
        except BaseException as error:
            # Nothing is left behind of what did not come to be; a second interrupt ends only the wait for that.
            with contextlib.suppress(MonarchError, KeyboardInterrupt):
                to_its_end(current_node(), f"end of {name}", mesh.end if mesh is not None else release)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"mesh {name!r} was not started; what had begun of it is ended") from None
            raise
        self.add(mesh)
        return mesh

    def restart(self, name: str | None, names: Mapping[str, Any], told: Callable[[str], None]) -> Mesh:
        """Ends a mesh and starts it anew, empty; goes on to its end also if who waits for it here is interrupted.

        Args:
            name: of the mesh; None for the one in use.
            names: the variables of the notebook.
            told: is given what came of it, in words, if nobody waited any more.

        Raises:
            KeyboardInterrupt: the wait was interrupted; its text says what goes on.
        """
        mesh = self.get(name)
        used = self.used
        try:
            self._changing[mesh.name] = change = in_thread(
                current_node(), f"restart of {mesh.name}", lambda: self._restart(mesh, used, names)
            )
            return change.get()
        except KeyboardInterrupt:
            change = self._changing.get(mesh.name)
            if change is None:
                raise
            change.add_done_callback(lambda _: told(_outcome(mesh.name, change)))
            raise KeyboardInterrupt(
                f"the restart of mesh {mesh.name!r} goes on, and its variables are lost; cells wait until it is up"
            ) from None

    def _restart(self, mesh: Mesh, used: str | None, names: Mapping[str, Any]) -> Mesh:
        try:
            self.down(mesh.name)
            new = self.up(mesh.recipe, names, lambda _, future: (future.get(), None)[1])
            # Whichever was in use still is.
            self.used = used if used in self.by_name else new.name
            return new
        finally:
            self._changing.pop(mesh.name, None)

    def coming(self) -> list[str]:
        """The meshes that are being restarted and are not there yet."""
        return [name for name, change in list(self._changing.items()) if not change.done and name not in self.by_name]

    def get(self, name: str | None) -> Mesh:
        """A mesh by its name; the one in use if none is given. One that is being restarted is waited for."""
        wanted = name or self.used or next(iter(self._changing), None)
        change = self._changing.get(wanted or "")
        if change is not None and not change.done and wanted not in self.by_name:
            print(f"waiting for mesh {wanted!r}, which is being restarted", file=sys.stderr)
            return change.get()
        if wanted is None:
            raise NoMesh("there is no mesh yet; start one by %mesh up, or %mesh up --procs 4")
        if wanted not in self.by_name:
            there = ", ".join(self.by_name) or "none"
            raise NoMesh(f"there is no mesh {wanted!r}; there are: {there}")
        return self.by_name[wanted]

    def use(self, name: str) -> Mesh:
        """Makes a mesh the one in use."""
        mesh = self.get(name)
        self.used = name
        return mesh

    def down(self, name: str | None) -> Mesh:
        """Ends a mesh."""
        mesh = self.get(name)
        del self.by_name[mesh.name]
        if self.used == mesh.name:
            self.used = next(iter(self.by_name), None)
        if self._variables.get(mesh.name) is mesh.procs:
            del self._variables[mesh.name]
        mesh.end()
        return mesh


def _outcome(name: str, change: Future[Mesh]) -> str:
    """What came of a restart, in words."""
    error = change.exception()
    return f"mesh {name!r} is up again" if error is None else f"the restart of mesh {name!r} has failed: {error}"


def with_hint(error: DeviceMeshError, name: str) -> DeviceMeshError:
    """An error of a mesh that has lost ranks, with the magics that help."""
    hint = (
        f"%mesh heal {name} puts new ranks in their place, %mesh restart {name} starts all anew, and "
        f"%%mesh {name}[RANKS] runs a cell on the others"
    )
    return type(error)(f"{error}\n{hint}", mesh=error.mesh, ranks=error.ranks, results=error.results, when=error.when)


def _positions(procs: list[str]) -> list[tuple[int, dict[str, int] | None]]:
    """How far ranks are in their process groups, from those that can say it soon."""
    positions: list[tuple[int, dict[str, int] | None]] = []
    said, all_said = threading.Event(), threading.Event()

    def heard(_: str, answer: Any) -> None:
        positions.append(answer if isinstance(answer, tuple) else (0, None))
        said.set()
        if len(positions) == len(procs):
            all_said.set()

    answers = Answers(current_node(), procs, request(groups.position), heard)
    if not all_said.wait(_HEARING):
        said.wait(_HEARING_ONE)
    answers.close()
    return list(positions)
