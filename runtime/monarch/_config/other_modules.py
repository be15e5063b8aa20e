"""Modules of torchmonarch that this package lacks: importing one says so, and names the counterpart if there is one."""

from __future__ import annotations

import sys
from typing import Any

_PAGE = "docs/torchmonarch.md lists the names that run here"
_HERE = {
    "_rust_bindings": "SupervisionError is in monarch.exceptions",
    "_src": "the public names are in monarch.actor, monarch.config, monarch.job, monarch.rdma and monarch.spmd",
    "mesh_controller": "catch monarch.exceptions.TensorError instead of RemoteException; activate() needs no engine",
    "profiler": "torch.profiler works in endpoints, and python -m monarch top shows the ranks",
    "tools": "monarch.job starts hosts, and python -m monarch has commands",
}
"""By module, its counterpart here."""
_NONE = """builtins cached_remote_function common controller experimental fetch gather_mount gradient gradient_generator
    memory monarch_dashboard notebook opaque_module opaque_object parallel random remote_class remotemount simulator
    tensorboard timer"""
_KNOWN = {**dict.fromkeys(_NONE.split(), ""), **_HERE}


class _Finder:
    """The last finder of modules: it gets what no other one has found."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        """Raise ModuleNotFoundError for a module of torchmonarch, with a hint; find nothing else."""
        package, _, module = name.partition(".")
        if package != "monarch" or module not in _KNOWN:
            return
        hint = f"; {_KNOWN[module]}" if _KNOWN[module] else ""
        raise ModuleNotFoundError(f"{name} is a torchmonarch module that is missing here{hint}; {_PAGE}", name=name)


def explain_missing() -> None:
    """Explain such imports from now on."""
    # A finder needs no more than find_spec; its type asks for older methods.
    sys.meta_path.append(_Finder())  # pyright: ignore[reportArgumentType]
