"""The hosts that a notebook mesh may grow or move onto, and their release."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from monarch._kernel_api import (
    Extent,
    HostMesh,
    Region,
    axes_text,
    current_node,
    hosts_of,
    need_session,
    reaches,
    state_of,
)
from monarch.actor import ProcMesh
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.meshes.recipe import Recipe


class MeshHosts:
    """The hosts of one mesh.

    Args:
        recipe: the recipe of the mesh.
        procs: its processes.
        release: gives back the hosts that the mesh started on.
    """

    def __init__(self, recipe: Recipe, procs: ProcMesh, release: Callable[[], object]) -> None:
        self._recipe = recipe
        self._procs = procs
        self._releases = [release]
        self._known = [*state_of(procs).procs.hosts, *recipe.spare]
        """All hosts. Any thread, in single list operations."""
        self.shrinking = False
        """Whether the rule for hosts that are taken back is being followed. Written by the thread that follows it."""
        self._late: list[str] = []
        """Hosts that have joined later, and that the mesh is to grow onto. Thread that runs cells only."""

    def add(self, text: str, key: str, names: Mapping[str, Any]) -> None:
        """Attach more hosts.

        Args:
            text: addresses of workers, a variable that holds hosts, or how many to start on this machine.
            key: the key file of the workers.
            names: the variables of the notebook.

        Raises:
            HeaderError: no hosts match, or the mesh cannot use them.
        """
        if not state_of(self._procs).procs.host_axes:
            raise HeaderError(
                f"mesh {self._recipe.name!r} has no hosts axis ({axes_text(self._procs.extent)}), so it cannot grow "
                f"onto more hosts; start one that can with %mesh up --hosts"
            )
        like = Recipe(self._recipe.name, {}, hosts=text, key=key or self._recipe.key, silence=self._recipe.silence)
        more, release = like.find_hosts(names)
        self._releases.append(release)
        self._known += hosts_of(more)

    def arrived(self) -> int:
        """Return the number of hosts that have joined since the mesh was started, and that it is not on yet."""
        late = self._recipe.late()
        if late is not None:
            self._late += hosts_of(late)
            self._known += hosts_of(late)
        current, node = state_of(self._procs).procs.hosts, current_node()
        self._late = [host for host in self._late if host not in current and reaches(node, host)]
        return len(self._late)

    def free_now(self, leaving: Sequence[str]) -> list[str]:
        """Return the ids of hosts that the mesh is not on and that do not leave."""
        current, node = state_of(self._procs).procs.hosts, current_node()
        used = {*current, *leaving}
        preemption = self._recipe.preemption
        return [
            host
            for host in dict.fromkeys(self._known)
            if host not in used and reaches(node, host) and (preemption is None or preemption.notice_of(host) is None)
        ]

    def leave(self, leaving: Sequence[str]) -> None:
        """Give hosts back that the mesh has left."""
        for host in leaving:
            # Several times, if it has come back; a new list would lose what another thread adds.
            while host in self._known:
                with suppress(ValueError):
                    self._known.remove(host)
        need_session(current_node()).release(leaving)

    def name(self, host: str) -> str:
        """Return the name of a host of a launcher, for messages."""
        return self._recipe.preemption.name(host) if self._recipe.preemption is not None else host

    def leaving_text(self, host: str) -> str:
        """Return that a host is being taken back, and when; empty if it is not."""
        notice = self._recipe.preemption.notice_of(host) if self._recipe.preemption is not None else None
        if notice is None:
            return ""
        left = notice.seconds_left
        when = f"in {left:.0f} s" if left >= 0.5 else "at any moment"
        return f"host will be preempted {when} ({notice.reason})"

    def free(self, missing: int) -> HostMesh | None:
        """Return hosts that the mesh is not on; None if there are none.

        Args:
            missing: how many it needs; if they are processes of this machine, they are started.
        """
        node, free = current_node(), self.free_now(())
        if len(free) < missing and self._recipe.hosts.isdecimal() and not self._recipe.on:
            self.add(str(missing - len(free)), "", {})
            return self.free(missing)
        region = Region.full(Extent(("hosts",), (len(free),))) if free else None
        return HostMesh.of_hosts(tuple(free), region, node) if region is not None else None

    def to_heal(self) -> HostMesh | None:
        """Return hosts for the ranks of lost ones; None if none is lost.

        Raises:
            HeaderError: there are not enough.
        """
        lost, name = self.lost(), self._recipe.name
        if not lost:
            return None
        free = self.free(len(lost))
        if free is not None and len(free) >= len(lost):
            return free
        raise HeaderError(
            f"mesh {name!r} has lost {len(lost)} of its {self._count()} hosts, and has no free host for their ranks; "
            f"{self.without_lost(name)}"
        )

    def lost(self) -> list[str]:
        """Return the ids of the hosts of the mesh that cannot be reached any more."""
        node = current_node()
        return [host for host in dict.fromkeys(state_of(self._procs).procs.hosts) if not reaches(node, host)]

    def instead_of_heal(self, name: str) -> str:
        """Return what helps if there are too few hosts to heal the mesh; empty if a heal is possible.

        Args:
            name: the name of the mesh for the magics; empty for the one in use.
        """
        starts = self._recipe.hosts.isdecimal() and not self._recipe.on
        lost = self.lost()
        if starts or len(self.free_now(())) >= len(lost):
            return ""
        if self.shrinking:
            return "the mesh shrinks automatically (--on-preempt)"
        return self.without_lost(name)

    def _count(self) -> int:
        return len({*state_of(self._procs).procs.hosts})

    def without_lost(self, name: str) -> str:
        """Return how the mesh continues without its lost hosts."""
        procs, left = state_of(self._procs).procs, self._count() - len(self.lost())
        if left and procs.host_axes == 1:
            what = " ".join(filter(None, ["%mesh resize", name, f"{procs.labels[0]}={left}"]))
            return f"{what} continues on the remaining {'host' if left == 1 else 'hosts'}"
        return f"{' '.join(filter(None, ['%mesh restart', name]))} starts it again, without its variables"

    def release(self) -> None:
        """Give all hosts back."""
        with ExitStack() as stack:
            while self._releases:
                stack.callback(self._releases.pop(0))
