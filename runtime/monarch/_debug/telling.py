"""A rank tells the program that controls it that it has stopped by itself, and that it continues."""

from __future__ import annotations

import contextlib
from types import FrameType

from monarch._actors.pausing.tracing import StopReason
from monarch._core.position import PAUSED, Position
from monarch._debug.frames import described, users_frames
from monarch._debug.stops import left_there, paused_there, resumed_there, stopped_there
from monarch._node.current import current_node
from monarch._node.services.asking import tell_proc
from monarch._node.services.registry import service


@service("telling.tell_stopped", "local")
def tell_stopped(stop: StopReason, frame: FrameType) -> None:
    """Tell it where and why."""
    node = current_node()
    found = Position(PAUSED, [described(each) for each in users_frames(frame)], stop.text)
    # Output from before the stop is shown before it.
    node.output.idle()
    with contextlib.suppress(Exception):
        # It may have ended; the rank stays paused until somebody resumes it.
        tell_proc(node, node.root, stopped_there, node.proc, stop.kind, found.packed())


@service("telling.tell_left", "local")
def tell_left(step: bool) -> None:
    """Tell it that this rank continues, for a step or for good."""
    node = current_node()
    with contextlib.suppress(Exception):
        tell_proc(node, node.root, left_there, node.proc, step)


@service("telling.tell_paused", "local")
def tell_paused(frame: FrameType, parked: bool) -> None:
    """Tell it that this rank is paused, by somebody or while another one is at a breakpoint."""
    node = current_node()
    found = Position(PAUSED, [described(each) for each in users_frames(frame)])
    with contextlib.suppress(Exception):
        tell_proc(node, node.root, paused_there, node.proc, found.packed(), parked)


@service("telling.tell_resumed", "local")
def tell_resumed() -> None:
    """Tell it that this rank continues from there."""
    node = current_node()
    with contextlib.suppress(Exception):
        tell_proc(node, node.root, resumed_there, node.proc)
