"""Actors on meshes of processes: what a program imports to spawn, address and stop them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monarch._actors.accumulate import Accumulator
from monarch._actors.actor import Actor
from monarch._actors.actormesh import ActorMesh
from monarch._actors.call import Endpoint, as_endpoint, send
from monarch._actors.channel import Channel, Port, PortReceiver
from monarch._actors.clash import warn_of_torchmonarch
from monarch._actors.client import shutdown_context
from monarch._actors.context import (
    ActorInstance,
    Context,
    context,
    current_actor_name,
    current_rank,
    current_size,
)
from monarch._actors.controllers import get_or_spawn_controller
from monarch._actors.endpoint import concurrent_endpoint, endpoint
from monarch._actors.escalation import default_fault_hook
from monarch._actors.future import Future
from monarch._actors.hostmesh import (
    BootstrapCommand,
    HostMesh,
    default_bootstrap_cmd,
    proc_mesh,
    this_host,
)
from monarch._actors.meshfailure import MeshFailure
from monarch._actors.procmesh import ProcMesh, this_proc
from monarch._actors.roles import Role
from monarch._actors.supervise import Supervisor, supervise
from monarch._core.extent import Extent, Point
from monarch._core.supervision import Restart
from monarch._core.valuemesh import ValueMesh
from monarch.exceptions import ActorError, SupervisionError

if TYPE_CHECKING:
    from monarch._actors.workers import (
        attach_to_workers,
        hosts_from_config,
        new_key_file,
        run_worker_loop_forever,
    )
    from monarch._transfers.checkpoint import checkpoint, restore
    from monarch._transfers.heal import heal_mesh

_LATER = {
    "attach_to_workers": "monarch._actors.workers",
    "checkpoint": "monarch._transfers.checkpoint",
    "heal_mesh": "monarch._transfers.heal",
    "hosts_from_config": "monarch._actors.workers",
    "new_key_file": "monarch._actors.workers",
    "restore": "monarch._transfers.checkpoint",
    "run_worker_loop_forever": "monarch._actors.workers",
}
"""What few programs need when they start, with its module: imported when it is first used."""

warn_of_torchmonarch()

unhandled_fault_hook = default_fault_hook
"""Called with a MeshFailure that no ``__supervise__`` has handled; a program may put a function of its own here."""

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorInstance",
    "ActorMesh",
    "BootstrapCommand",
    "Channel",
    "Context",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "Restart",
    "Role",
    "SupervisionError",
    "Supervisor",
    "ValueMesh",
    "as_endpoint",
    "attach_to_workers",
    "checkpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "default_bootstrap_cmd",
    "endpoint",
    "get_or_spawn_controller",
    "heal_mesh",
    "hosts_from_config",
    "new_key_file",
    "proc_mesh",
    "restore",
    "run_worker_loop_forever",
    "send",
    "shutdown_context",
    "supervise",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]


def __getattr__(name: str) -> Any:
    home = _LATER.get(name)
    if home is None:
        raise AttributeError(f"module 'monarch.actor' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value
