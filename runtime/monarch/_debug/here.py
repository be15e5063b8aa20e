"""Services of a rank: pause, and tell where its code is."""

from __future__ import annotations

from monarch._actors.pausing.gate import gate
from monarch._core.position import IDLE, PAUSED, PAUSING, RUNNING, Packed, Position
from monarch._debug.failure import failed_position
from monarch._debug.frames import described, users_frames
from monarch._node.services.registry import service

PATIENCE = 0.5
"""Seconds for Python code to reach its next line; after that it is in C."""


@service("debug.pause_here", "threaded")
def pause_here() -> Packed:
    """Service: pause the main thread at its next Python line, and return where it is."""
    gate.pause(PATIENCE)
    return position().packed()


@service("debug.where_here", "probe")
def where_here() -> Packed:
    """Service: return where the main thread is, without stopping it."""
    return position().packed()


def position() -> Position:
    """Return where the main thread of this process is."""
    frame = gate.frame
    if frame is not None:
        return Position(PAUSED, [described(each) for each in users_frames(frame)], _reason())
    frame = gate.place()
    if frame is None:
        return failed_position() or Position(IDLE, [])
    frames = users_frames(frame)
    return Position(PAUSING if gate.asked else RUNNING, [described(each) for each in frames])


def _reason() -> str:
    stop = gate.stop
    if stop is not None:
        return stop.text
    return "while another rank is at a breakpoint" if gate.parked else ""
