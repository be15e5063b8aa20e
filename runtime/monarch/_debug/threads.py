"""The stacks of all Python threads of a rank, and asking the ranks of a mesh for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from monarch._actors.pausing.gate import gate
from monarch._core.kinds import is_tuple
from monarch._core.places import is_ours
from monarch._core.position import IDLE, PAUSED, RUNNING, ThreadPosition
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._debug.frames import described, users_frames
from monarch._debug.pausing import ask_ranks, values_of
from monarch._meshes.inside import region_of, state_of
from monarch._meshes.mesh_like import ProcMeshLike
from monarch._node.services.registry import request, service
from monarch._python.frames import frame_of
from monarch._python.threads import is_own

_LIBRARY = 4
"""Most frames that are shown of a thread that runs no code of the user."""
_DEPTH = 100
_STARTS = ("_bootstrap", "_bootstrap_inner", "run")
"""Functions of ``threading`` that every thread begins in."""


@service("threads.threads_here", "probe")
def threads_here() -> tuple[ThreadPosition, ...]:
    """Service: return where each Python thread of this rank is, the main thread first."""
    return tuple(_threads())


@service("threads.threads", "local")
def threads(mesh: ProcMeshLike) -> ValueMesh[tuple[ThreadPosition, ...]]:
    """Return where each Python thread of each rank is; nothing of ranks that give no answer."""
    answers = ask_ranks(state_of(mesh).procs, region_of(mesh).base_ranks(), request(threads_here))
    return values_of(mesh, [known_threads(answer) or () for answer in answers.values()])


def known_threads(answer: Any) -> tuple[ThreadPosition, ...] | None:
    """Return the threads in an answer of ``threads_here``; None if the rank has sent something else."""
    return tuple(ThreadPosition(*each) for each in answer) if is_tuple(answer) else None


def _threads() -> Iterator[ThreadPosition]:
    main = threading.main_thread()
    every = sorted(threading.enumerate(), key=lambda each: (each is not main, each.name))
    here = threading.get_ident()
    for each in every:
        ident = each.ident or 0
        frame = frame_of(ident) if ident != here else None
        frames = users_frames(frame)
        if not frames and each is not main:
            frames = _of_library(frame, each)
            if not frames:
                continue
        state = PAUSED if gate.holds(ident) else RUNNING if frames else IDLE
        yield ThreadPosition(str(each.name), state, tuple(map(described, frames)), each is main)


def _of_library(frame: FrameType | None, thread: threading.Thread) -> list[FrameType]:
    """Return the innermost frames of a thread that runs no code of the user; none for one of this package."""
    found: list[FrameType] = []
    while frame is not None and len(found) < _DEPTH:
        found.append(frame)
        frame = frame.f_back
    if is_own(thread) or any(map(is_ours, found)):
        return []
    return [each for each in found if not _starts(each)][:_LIBRARY]


def _starts(frame: FrameType) -> bool:
    return frame.f_code.co_name in _STARTS and frame.f_code.co_filename == threading.__file__
