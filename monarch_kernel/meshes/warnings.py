"""Warnings about a mesh that is about to start: ranks without the devices that their names promise."""

from __future__ import annotations

import os

from monarch._kernel_api import visible_gpus
from monarch_kernel.meshes.recipe import Recipe

_CROWD = 8
"""Ranks per core from which on a mesh is called slow."""


def warnings_of(recipe: Recipe) -> list[str]:
    """Return what the user may not expect of a mesh on this host; nothing is known of other hosts."""
    if recipe.hosts and not recipe.hosts.isdecimal():
        return []
    found: list[str] = []
    gpus, cores = recipe.axes.get("gpus", 0), len(os.sched_getaffinity(0))
    count = 1
    for size in recipe.axes.values():
        count *= size
    if gpus and recipe.device != "cpu":
        found += _about_gpus(gpus, len(visible_gpus()))
    if count > _CROWD * cores:
        found.append(f"{count} ranks share {cores} core{'s' if cores > 1 else ''} of this host and will be slow")
    return found


def _about_gpus(wanted: int, present: int) -> list[str]:
    if not present:
        return [f"this host has no GPU, so the {wanted} ranks of axis gpus run on the CPU"]
    if wanted > present:
        return [f"this host has {present} GPU{'s' if present > 1 else ''}, which the {wanted} ranks share"]
    return []
