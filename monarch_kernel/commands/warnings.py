"""Warnings about a mesh that is about to start: ranks without the devices that their names promise."""

from __future__ import annotations

import os

from monarch._kernel_api import ask_soon, is_dict, shared_gpus, state_of, visible_gpus
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.recipe import Recipe

_CROWD = 8
"""Ranks per core from which on a mesh is called slow."""


def warnings_of(recipe: Recipe) -> list[str]:
    """Return warnings about a mesh on this host; nothing is known about other hosts."""
    if recipe.on or (recipe.hosts and not recipe.hosts.isdecimal()):
        return []
    warnings: list[str] = []
    gpus, cores = recipe.axes.get("gpus", 0), len(os.sched_getaffinity(0))
    count = 1
    for size in recipe.axes.values():
        count *= size
    if gpus and recipe.device != "cpu":
        warnings += _about_gpus(gpus, len(visible_gpus()))
    if count > _CROWD * cores:
        warnings.append(f"{count} ranks share {cores} core{'s' if cores > 1 else ''} of this host and will be slow")
    return warnings


def sharing_of(mesh: Mesh) -> list[str]:
    """Return which GPUs the ranks of a new mesh share with other meshes."""
    if not visible_gpus() or mesh.recipe.device == "cpu":
        return []
    procs = state_of(mesh.procs).procs
    agents = [f"{host}/agent" for host in dict.fromkeys(procs.hosts)]
    others: dict[str, list[str]] = {}
    for answer in ask_soon(agents, shared_gpus(procs.uid)).values():
        for gpu, titles in (answer if is_dict(answer) else {}).items():
            for title in dict.fromkeys(each for each in titles if each != procs.name):
                others.setdefault(title, []).append(gpu)
    return [
        f"mesh {mesh.name!r} uses the same GPUs as mesh {title!r}: {', '.join(gpus)}; no others are free"
        for title, gpus in others.items()
    ]


def _about_gpus(wanted: int, present: int) -> list[str]:
    if not present:
        return [f"this host has no GPU, so the {wanted} ranks of axis gpus run on the CPU"]
    if wanted > present:
        return [f"this host has {present} GPU{'s' if present > 1 else ''}, which the {wanted} ranks share"]
    return []
