"""The hosts that a notebook mesh may grow or move onto, and their release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from monarch._kernel_api import Extent, HostMesh, Region, axes_text, current_node, hosts_of, reaches, state_of
from monarch.actor import ProcMesh
from monarch_kernel.magics.header import HeaderError
from monarch_kernel.meshes.recipe import Recipe


class Hosts:
    """The hosts of one mesh.

    Args:
        recipe: of the mesh.
        procs: its processes.
        release: gives back the hosts that the mesh started on.
    """

    def __init__(self, recipe: Recipe, procs: ProcMesh, release: Callable[[], object]) -> None:
        self._recipe = recipe
        self._procs = procs
        self._releases = [release]
        self._known = list(state_of(procs).procs.hosts)

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
                f"onto more hosts; start a mesh on several with %mesh up --hosts"
            )
        like = Recipe(self._recipe.name, {}, hosts=text, key=key or self._recipe.key, silence=self._recipe.silence)
        more, release = like.find_hosts(names)
        self._releases.append(release)
        self._known += hosts_of(more)

    def free(self, missing: int) -> HostMesh | None:
        """Return hosts that the mesh is not on; None if there are none.

        Args:
            missing: how many it needs; if they are processes of this machine, they are started.
        """
        current, node = state_of(self._procs).procs.hosts, current_node()
        free = [each for each in dict.fromkeys(self._known) if each not in current and reaches(node, each)]
        if len(free) < missing and self._recipe.hosts.isdecimal():
            self.add(str(missing - len(free)), "", {})
            return self.free(missing)
        region = Region.full(Extent(("hosts",), (len(free),))) if free else None
        return HostMesh.of_hosts(tuple(free), region, node) if region is not None else None

    def lost(self) -> int:
        """Return the number of lost hosts of the mesh."""
        node = current_node()
        return sum(not reaches(node, host) for host in dict.fromkeys(state_of(self._procs).procs.hosts))

    def release(self) -> None:
        """Give all hosts back."""
        with ExitStack() as stack:
            while self._releases:
                stack.callback(self._releases.pop(0))
