"""Which actor owns a mesh that is spawned here."""

from __future__ import annotations

from typing import Any

from monarch._actors.running import current


def own_by_current(mesh: Any) -> str:
    """Note that the actor that runs, if any, owns a mesh; the actor's key."""
    here = current.get()
    if here is None:
        return ""
    here[0].owned.append(mesh)
    return here[0].key
