"""Meshes of hosts, processes and actors: one program that addresses all of them.

Names are imported on first use, so that ``import monarch`` is quick and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from monarch._config.other_modules import explain_missing
from monarch._node.opener import set_opener
from monarch._node.services.registry import set_modules
from monarch._services import SERVICES

_WHERE = {
    "monarch.actor": """
        Actor ActorError ActorMesh Channel Extent Future HostMesh Point ProcMesh ValueMesh checkpoint context
        current_rank current_size endpoint heal_mesh proc_mesh restore shutdown_context supervise this_host this_proc
    """,
    "monarch.tensor": """
        RankTensor Stream Tensor arange async_save call_on_shard_and_fetch compile distribute empty fetch fetch_shard
        from_local full get_active_mesh get_active_stream grad_function grad_generator inspect load module_to_mesh
        no_mesh ones rand randn reduce reduce_ remote save show simulate slice_mesh to_mesh zeros
    """,
    "monarch._telemetry.metrics": "log_metric",
    "monarch._telemetry.progress": "track",
    "monarch._core.shapes.selection_text": "Selection",
    "monarch._core.shapes.shape": "NDSlice Shape",
    "monarch.config": "clear_runtime_config configure configured get_global_config get_runtime_config",
    "monarch.exceptions": """
        CallTimeoutError DeadlockError DeviceMeshError MonarchError SpawnError StoppedError SupervisionError
    """,
}


def _open_session() -> object:
    from monarch._session.session import start

    return start()


set_opener(_open_session)
explain_missing()
set_modules(SERVICES)

_HOME = {name: module for module, names in _WHERE.items() for name in names.split()}

# Type checkers see the imports above; the list is built from the same table.
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'monarch' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
