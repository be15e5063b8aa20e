"""Services of a rank: steps, breakpoints, and waiting for other ranks that are at one."""

from __future__ import annotations

from monarch._actors.pausing.failed import failed
from monarch._actors.pausing.gate import gate
from monarch._actors.pausing.points import Packed
from monarch._actors.pausing.tracing import StepState
from monarch._node.services.registry import service


@service("stepping.go_here", "quick")
def go_here(how: str, line: int) -> bool:
    """Service: let a paused rank continue for a step; return whether it was paused."""
    return gate.go(StepState(how, line))


@service("stepping.break_here", "quick")
def break_here(points: list[Packed]) -> None:
    """Service: have these breakpoints from now on, and no others."""
    gate.set_points(points)


@service("stepping.park_here", "quick")
def park_here() -> None:
    """Service: pause a running call, since another rank is at a breakpoint."""
    gate.park()


@service("stepping.unpark_here", "quick")
def unpark_here() -> None:
    """Service: resume a rank that is paused for that reason only."""
    gate.unpark()


@service("stepping.forget_here", "quick")
def forget_here() -> bool:
    """Service: let go of the frames of the last error; return whether there were any."""
    return failed.forget()
