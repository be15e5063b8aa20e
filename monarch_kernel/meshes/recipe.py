"""What a mesh of a notebook is made of: how many ranks, where, with which variables; so that it can be made again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch._kernel_api import HostMesh, WorkerHosts, attach_to_workers, visible_gpus
from monarch.actor import ProcMesh, Restart, Role, this_host
from monarch_kernel.magics.header import HeaderError

DEVICES = ("cpu", "cuda")


@dataclass
class Recipe:
    """What ``%mesh up`` was told."""

    name: str
    axes: dict[str, int]
    """Of the ranks of each host."""
    env: dict[str, str] = field(default_factory=dict)
    hosts: str = ""
    """How many hosts to start on this machine, or addresses of workers, or a variable that holds hosts."""
    key: str = ""
    """The key file of those workers."""
    device: str = ""
    """``cpu`` or ``cuda``; empty for what there is."""
    restart: int = 0
    """How often in a minute ranks that die are replaced by themselves."""
    spares: int = 0
    """How many processes of each host wait for the place of one that dies."""
    roles: dict[str, Role] = field(default_factory=dict[str, Role])
    """Ranks that differ."""
    silence: float | None = None
    """Seconds after which ranks and hosts that do not answer are said to be so, or lost; None for what is usual."""

    def spawn(self, hosts: HostMesh) -> ProcMesh:
        """Starts the processes."""
        return hosts.spawn_procs(
            self.axes,
            name=self.name,
            env=self.variables() or None,
            restart=Restart(self.restart) if self.restart else None,
            spares=self.spares,
            roles=self.roles or None,
            silence=self.silence,
        )

    def variables(self) -> dict[str, str]:
        """The environment of the ranks."""
        return {"CUDA_VISIBLE_DEVICES": "", **self.env} if self.device == "cpu" else self.env

    def find_hosts(self, names: Mapping[str, Any]) -> tuple[HostMesh, Callable[[], object]]:
        """The hosts, and what gives them back at the end.

        Args:
            names: the variables of the notebook.

        Raises:
            HeaderError: there are none of that description.
        """
        wanted = self.hosts
        if not wanted:
            return this_host(), _nothing
        if wanted.isdecimal():
            if int(wanted) < 1:
                raise HeaderError("%mesh up: --hosts takes a number of at least 1")
            workers = WorkerHosts(int(wanted), silence=self.silence)
            return workers.mesh, lambda: workers.mesh.shutdown().get(15)
        if "://" in wanted:
            if not self.key:
                raise HeaderError(
                    "%mesh up: --hosts with addresses needs --key FILE, the key file that the workers were started with"
                )
            addresses = [part.strip() for part in wanted.split(",")]
            attached = attach_to_workers(ca=self.key, workers=addresses, silence=self.silence)
            return attached, lambda: attached.shutdown().get(15)
        found = names.get(wanted)
        if not isinstance(found, HostMesh):
            raise HeaderError(
                f"%mesh up: --hosts takes a number, as in --hosts 2, addresses of workers, as in "
                f"--hosts tcp://node1:22222,tcp://node2:22222, or a variable that holds hosts, and not {wanted!r}"
            )
        # They are the notebook's own, so they stay.
        return found, _nothing


def roles_of(text: str) -> dict[str, Role]:
    """What ``--roles train=4,load=2:cpu`` says. HeaderError if it says nothing that can be."""
    found: dict[str, Role] = {}
    for part in text.split(",") if text else ():
        name, _, rest = part.strip().partition("=")
        size, _, device = rest.partition(":")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or device not in ("", *DEVICES):
            raise HeaderError(f"%mesh up: --roles takes roles like train=4,load=2:cpu, and cannot understand {part!r}")
        if name in found:
            raise HeaderError(f"%mesh up: --roles names {name!r} twice")
        found[name] = Role(int(size), device)
    return found


def usual_axes(device: str) -> dict[str, int]:
    """What a host has if nothing is said: a rank for each GPU, or one for each core, but not more than eight."""
    gpus = len(visible_gpus()) if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise HeaderError(
            "%mesh up: this host has no GPU for --device cuda; say how many ranks the others have: --gpus N"
        )
    return {"gpus": gpus} if gpus else {"procs": max(1, min(8, len(os.sched_getaffinity(0))))}


def _nothing() -> None:
    pass
