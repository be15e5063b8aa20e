"""Ownership of meshes by the actor that spawns them."""

from __future__ import annotations

from typing import Any

from monarch._actors.running import current


def own_by_current(mesh: Any) -> str:
    """Make the running actor, if any, the owner of a mesh and return the actor's key."""
    here = current.get()
    if here is None:
        return ""
    here[0].owned.append(mesh)
    return here[0].key
