"""Completion of the first line of a ``%%mesh`` cell: meshes, actors, slices, options, ``spawn``."""

from __future__ import annotations

import re

from monarch._kernel_api import DEVICES, is_actor_mesh, meshes_of, node_of, state_of
from monarch_kernel.grammar.header import OPTIONS, VALUED
from monarch_kernel.grammar.line_words import Typed, typed
from monarch_kernel.grammar.spawn import SPAWN_OPTIONS
from monarch_kernel.magics.mesh import MeshMagics

_SLICE = re.compile(r"\s*(?P<name>\w*)\s*\[(?:[^\]]*,)?\s*(?P<part>[^\],]*)")


def words_of_header(magics: MeshMagics, header: str) -> tuple[list[str], str]:
    """Return the words that fit at the end of a header, and the text that they replace."""
    inside = _SLICE.fullmatch(header)
    if inside is not None:
        return _of_slice(magics, inside["name"]), inside["part"]
    line = typed(header)
    if line.before[:1] == ["spawn"]:
        return _of_spawn(magics, line), line.raw
    if line.before and line.before[-1] == "--world":
        return [f"1x8:{device}" for device in DEVICES], line.raw
    if line.before and line.before[-1] in VALUED:
        return [], line.raw
    options = [each for each in OPTIONS if each not in line.before]
    if line.before:
        return options, line.raw
    return [*magics.meshes.by_name, *magics.actor_names(), "spawn", *options], line.raw


def _of_slice(magics: MeshMagics, name: str) -> list[str]:
    """Return the axes of a mesh and its roles, as they stand in brackets."""
    mesh = magics.meshes.by_name.get(name or magics.meshes.used or "")
    actors = mesh.cells if mesh is not None else magics.shell.user_ns.get(name)
    if not is_actor_mesh(actors):
        return []
    procs = meshes_of(node_of(actors)).own_procs.get(state_of(actors).procs.uid)
    return [*(f"{label}=" for label in actors.extent.labels), *(procs.roles if procs is not None else ())]


def _of_spawn(magics: MeshMagics, line: Typed) -> list[str]:
    if len(line.before) == 1:
        return magics.actor_names()
    if line.before[-1] == "--on":
        return list(magics.meshes.by_name)
    return [each for each in SPAWN_OPTIONS if each not in line.before]
