"""Actors on meshes of processes: what a program imports to spawn, address and stop them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monarch._actors.actor import Actor
from monarch._actors.endpoint import concurrent_endpoint, endpoint
from monarch._actors.ports import Channel, Port, PortReceiver
from monarch._core.shapes.extent import Extent, Point
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._core.supervision import Restart
from monarch._meshes.actors.accumulate import Accumulator
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.adverbs import as_endpoint, send
from monarch._meshes.context import (
    ActorInstance,
    Context,
    context,
    current_actor_name,
    current_rank,
    current_size,
)
from monarch._meshes.host_mesh import (
    BootstrapCommand,
    HostMesh,
    default_bootstrap_cmd,
    proc_mesh,
    this_host,
)
from monarch._meshes.procs.proc_mesh import ProcMesh, this_proc
from monarch._meshes.procs.roles import Role
from monarch._node.clash import warn_of_torchmonarch
from monarch._node.future import Future
from monarch._session.controllers import get_or_spawn_controller
from monarch._session.session import shutdown_context
from monarch._supervision.escalation import default_fault_hook
from monarch._supervision.mesh_failure import MeshFailure
from monarch._supervision.supervise import Supervisor, supervise
from monarch.exceptions import ActorError, SupervisionError

if TYPE_CHECKING:
    # The static type of a class's endpoints.
    from monarch._actors.endpoint import EndpointLike as Endpoint
    from monarch._debug.debug_controller import debug_controller
    from monarch._session.jobs.current_job import hosts_from_config
    from monarch._session.returning import returns_future
    from monarch._session.torchmonarch.transport import ChannelTransport, enable_transport
    from monarch._session.workers import (
        attach_to_workers,
        new_key_file,
        run_worker_loop_forever,
        run_worker_loop_until_shutdown,
    )
    from monarch._state.checkpoint.api import checkpoint, restore
    from monarch._state.heal import heal_mesh
    from monarch._telemetry.meters import get_meter
    from monarch._telemetry.spans import span, traced
else:
    from monarch._meshes.actors.adverbs import Endpoint

_LATER = {
    "ChannelTransport": "monarch._session.torchmonarch.transport",
    "attach_to_workers": "monarch._session.workers",
    "checkpoint": "monarch._state.checkpoint.api",
    "debug_controller": "monarch._debug.debug_controller",
    "enable_transport": "monarch._session.torchmonarch.transport",
    "get_meter": "monarch._telemetry.meters",
    "heal_mesh": "monarch._state.heal",
    "hosts_from_config": "monarch._session.jobs.current_job",
    "new_key_file": "monarch._session.workers",
    "restore": "monarch._state.checkpoint.api",
    "returns_future": "monarch._session.returning",
    "run_worker_loop_forever": "monarch._session.workers",
    "run_worker_loop_until_shutdown": "monarch._session.workers",
    "span": "monarch._telemetry.spans",
    "traced": "monarch._telemetry.spans",
}
"""Names that few programs need at start, each with its module: imported on first use."""

warn_of_torchmonarch()

unhandled_fault_hook = default_fault_hook
"""Called with a MeshFailure that no ``__supervise__`` has handled; a program may assign its own function."""

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorInstance",
    "ActorMesh",
    "BootstrapCommand",
    "Channel",
    "ChannelTransport",
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
    "debug_controller",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "heal_mesh",
    "hosts_from_config",
    "new_key_file",
    "proc_mesh",
    "restore",
    "returns_future",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "span",
    "supervise",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
]


def __getattr__(name: str) -> Any:
    home = _LATER.get(name)
    if home is None:
        raise AttributeError(f"module 'monarch.actor' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
