"""The hosts that a mesh of the notebook may grow or move onto, and how all that were taken for it are given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from monarch._kernel_api import Extent, HostMesh, Region, axes_text, current_node, reaches
from monarch.actor import ProcMesh
from monarch_kernel.magics.header import HeaderError
from monarch_kernel.meshes.recipe import Recipe


class Hosts:
    """Those of one mesh.

    Args:
        recipe: of the mesh.
        procs: its processes.
        release: gives back the hosts that it was started on.
    """

    def __init__(self, recipe: Recipe, procs: ProcMesh, release: Callable[[], object]) -> None:
        self._recipe = recipe
        self._procs = procs
        self._releases = [release]
        self._known = list(procs._state.procs.hosts)

    def add(self, text: str, key: str, names: Mapping[str, Any]) -> None:
        """Attaches more.

        Args:
            text: addresses of workers, a variable that holds hosts, or how many to start on this machine.
            key: the key file of the workers.
            names: the variables of the notebook.

        Raises:
            HeaderError: there are none of that description, or the mesh cannot use them.
        """
        if not self._procs._state.procs.host_axes:
            raise HeaderError(
                f"mesh {self._recipe.name!r} has no axis of hosts ({axes_text(self._procs.extent)}), so it stays on "
                f"the one that it is on; %mesh up --hosts starts one on several"
            )
        like = Recipe(self._recipe.name, {}, hosts=text, key=key or self._recipe.key, silence=self._recipe.silence)
        found, release = like.find_hosts(names)
        self._releases.append(release)
        self._known += found._hosts

    def free(self, missing: int) -> HostMesh | None:
        """Hosts that the mesh is not on; None if there are none.

        Args:
            missing: how many it needs; where they are processes of this machine, as many are started.
        """
        there, node = self._procs._state.procs.hosts, current_node()
        found = [each for each in dict.fromkeys(self._known) if each not in there and reaches(node, each)]
        if len(found) < missing and self._recipe.hosts.isdecimal():
            self.add(str(missing - len(found)), "", {})
            return self.free(missing)
        region = Region.full(Extent(("hosts",), (len(found),))) if found else None
        return HostMesh.of_hosts(tuple(found), region, node) if region is not None else None

    def lost(self) -> int:
        """How many hosts of the mesh are lost."""
        node = current_node()
        return sum(not reaches(node, host) for host in dict.fromkeys(self._procs._state.procs.hosts))

    def release(self) -> None:
        """Gives all of them back."""
        with ExitStack() as stack:
            while self._releases:
                stack.callback(self._releases.pop(0))
