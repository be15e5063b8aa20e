"""Growth of a mesh onto hosts that joined after it was started with fewer, before its next cell."""

from __future__ import annotations

import sys

from monarch._kernel_api import axes_text, describe_ranks
from monarch_kernel.meshes.mesh import Mesh


class Growing:
    """Grows meshes. Used by the thread that runs cells."""

    def __init__(self) -> None:
        self._told: set[tuple[str, int]] = set()
        """Meshes that cannot grow, with the number of hosts that wait: said once."""

    def grow(self, mesh: Mesh) -> None:
        """Grow a mesh onto the hosts that have joined, and say so."""
        more = mesh.hosts.arrived()
        if not more:
            return
        dead = mesh.dead()
        hosts = f"{more} more host{'s' if more > 1 else ''}"
        if dead:
            if (mesh.name, more) not in self._told:
                print(
                    f"note: mesh {mesh.name!r} can grow onto {hosts} when its dead ranks ({describe_ranks(dead)}) are "
                    f"replaced: %mesh heal {mesh.name}",
                    file=sys.stderr,
                )
            self._told.add((mesh.name, more))
            return
        axis = mesh.procs.extent.labels[0]
        before = len(mesh.procs)
        defined = mesh.resize({axis: mesh.procs.sizes[axis] + more})
        ranks = describe_ranks(range(before, len(mesh.procs)))
        cells = f"{defined} cell{'s' if defined != 1 else ''}"
        print(
            f"mesh {mesh.name!r} has grown onto {hosts}: {axes_text(mesh.procs.extent)}; new: {ranks}, with the "
            f"definitions of {cells}",
            file=sys.stderr,
        )
