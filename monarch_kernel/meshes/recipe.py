"""The recipe of a notebook mesh: ranks, hosts and environment, so that a restart can make it again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from monarch._kernel_api import (
    HostMesh,
    Preemption,
    WorkerHosts,
    attach_to_workers,
    hosts_of,
    launch_hosts,
    make_launcher,
    visible_gpus,
)
from monarch.actor import ProcMesh, Restart, Role, this_host
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.mesh_commands import DEVICES

HEAL = "heal"
"""The rule for hosts that are taken back, unless another is given."""
Step = Callable[[str, bool], None]
"""Shows a line about the wait for hosts, and whether it still matters after it."""


def _unlimited() -> float | None:
    return None


def _none() -> HostMesh | None:
    return None


@dataclass
class Recipe:
    """The arguments of ``%mesh up``: where the hosts come from, and the ranks on each."""

    name: str
    axes: dict[str, int]
    """Axes of the ranks on each host."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    hosts: str = ""
    """How many hosts to start on this machine, or addresses of workers, or a variable that holds hosts."""
    key: str = ""
    """The key file of the workers."""
    device: str = ""
    """``cpu`` or ``cuda``; empty for CUDA where available."""
    restart: int = 0
    """How many dead ranks are replaced automatically per minute."""
    spares: int = 0
    """Spare processes per host."""
    roles: dict[str, Role] = field(default_factory=dict[str, Role])
    """Roles of ranks that differ."""
    on: str = ""
    """The launcher of the hosts, such as ``ssh:node1,node2`` or ``slurm``."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of the launcher."""
    at_least: int | None = None
    """Start with this many hosts if the others fail or take longer."""
    silence: float | None = None
    """Seconds after which a silent rank counts as unresponsive and a silent host as lost; None for the default."""

    spare_hosts: int = 0
    """How many of the hosts of the launcher are kept to replace others."""
    on_preempt: str = HEAL
    """The rule for hosts that are taken back, or the name of a function."""

    def __post_init__(self) -> None:
        # No field, since a detached mesh stores those.
        self.left: Callable[[], float | None] = _unlimited
        """Return the seconds until the scheduler takes the hosts back; None if it does not, or not known."""
        self.late: Callable[[], HostMesh | None] = _none
        """Returns the hosts that have joined since the last call; None if none has."""
        self.preemption: Preemption | None = None
        """The notices that hosts are taken back; None if nobody takes them."""
        self.spare: tuple[str, ...] = ()
        """The ids of the hosts that are kept to replace others."""

    def spawn(self, hosts: HostMesh) -> ProcMesh:
        """Start the processes."""
        if self.spare_hosts:
            used = hosts.sizes["hosts"] - self.spare_hosts
            if used < 1:
                raise HeaderError(
                    f"%mesh up: --spare-hosts {self.spare_hosts}: only {hosts.sizes['hosts']} hosts have joined, which "
                    f"leaves none for ranks; keep fewer, or ask for more hosts"
                )
            self.spare = tuple(hosts_of(hosts)[used:])
            hosts = hosts.slice(hosts=slice(0, used))
        return hosts.spawn_procs(
            self.axes,
            name=self.name,
            env=self.variables() or None,
            restart=Restart(self.restart) if self.restart else None,
            spares=self.spares,
            roles=self.roles or None,
            silence=self.silence,
        )

    def differing(self, other: Recipe) -> list[str]:
        """Return the fields whose values are others in another recipe."""
        mine = [each.name for each in fields(self) if each.compare]
        return [name for name in mine if getattr(self, name) != getattr(other, name, None)]

    def variables(self) -> dict[str, str]:
        """Return the environment of the ranks."""
        return {"CUDA_VISIBLE_DEVICES": "", **self.env} if self.device == "cpu" else self.env

    def find_hosts(self, names: Mapping[str, Any], step: Step | None = None) -> tuple[HostMesh, Callable[[], object]]:
        """Return the hosts, and the function that gives them back.

        Args:
            names: the variables of the notebook.
            step: shows the wait for hosts of a launcher.

        Raises:
            HeaderError: no hosts match.
        """
        if self.on:
            return self._launch(step)
        wanted = self.hosts
        if not wanted:
            return this_host(), _nothing
        if wanted.isdecimal():
            if int(wanted) < 1:
                raise HeaderError(f"%mesh up: --hosts: expected at least 1, got {wanted}")
            workers = WorkerHosts(int(wanted), silence=self.silence)
            return workers.mesh, lambda: workers.mesh.shutdown().get(15)
        if "://" in wanted:
            if not self.key:
                raise HeaderError("%mesh up: --hosts with addresses needs --key FILE, the key file of the workers")
            addresses = [part.strip() for part in wanted.split(",")]
            attached = attach_to_workers(ca=self.key, workers=addresses, silence=self.silence, tell=step)
            return attached, lambda: attached.shutdown().get(15)
        hosts = names.get(wanted)
        if not isinstance(hosts, HostMesh):
            raise HeaderError(
                f"%mesh up: --hosts: expected a number such as 2, addresses of workers such as "
                f"tcp://node1:22222,tcp://node2:22222, or a variable that holds hosts, got {wanted!r}"
            )
        # The user started these hosts, so they stay.
        return hosts, _nothing

    def given_back(self) -> str:
        """Say what has become of the hosts after an interrupted start; empty if there is nothing to say."""
        if self.on:
            return "its hosts were released, and pending requests were cancelled"
        return "its workers are free again" if "://" in self.hosts else ""

    def _launch(self, step: Step | None) -> tuple[HostMesh, Callable[[], object]]:
        count = int(self.hosts or 0)
        if step is not None:
            step(f"requesting hosts from {self.on.partition(':')[0]}", False)
        launched = launch_hosts(
            make_launcher(self.on, count, self.options),
            count,
            name=self.name,
            at_least=self.at_least,
            silence=self.silence,
            spare=self.spare_hosts,
            tell=step,
            advice=f"mesh {self.name!r} grows onto it before its next cell",
        )
        self.left = launched.launch.left
        self.late = launched.late_hosts
        self.preemption = launched.preemption
        return launched.mesh, lambda: launched.mesh.shutdown().get(30)


def roles_of(text: str) -> dict[str, Role]:
    """Parse ``--roles train=4,load=2:cpu``. HeaderError if it is invalid."""
    roles: dict[str, Role] = {}
    for part in text.split(",") if text else ():
        name, _, rest = part.strip().partition("=")
        size, _, device = rest.partition(":")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or device not in ("", *DEVICES):
            raise HeaderError(f"%mesh up: --roles: expected roles such as train=4,load=2:cpu, got {part!r}")
        if name in roles:
            raise HeaderError(f"%mesh up: --roles names {name!r} twice")
        roles[name] = Role(int(size), device)
    return roles


def usual_axes(device: str) -> dict[str, int]:
    """Return the default axes of a host: a rank for each GPU, or for each core up to eight."""
    gpus = len(visible_gpus()) if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise HeaderError(
            "%mesh up: this host has no GPU for --device cuda; give the number of ranks per host with --gpus N"
        )
    return {"gpus": gpus} if gpus else {"procs": max(1, min(8, len(os.sched_getaffinity(0))))}


def _nothing() -> None:
    pass
