"""Code that a magic of a cell runs in it, at its own lines."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from monarch._notebook.running.execute import StoppedIteration, execute_code, run
from monarch._notebook.running.running_cell import RunningCell, running_cell
from monarch._notebook.showing.display import Display


def this_cell() -> RunningCell:
    """Return the running cell; one without a name if a magic is called elsewhere, as in a thread."""
    cell = running_cell.get()
    return cell if cell is not None else RunningCell("<magic>", sys.modules["__main__"].__dict__, Display())


def run_nested(source: str, above: int) -> Any:
    """Run code of the running cell; return the value of its last expression, None after a semicolon.

    Args:
        source: the code.
        above: how many lines of the cell are above it.
    """
    cell = this_cell()
    try:
        value, shown = run(execute_code("\n" * above + source, cell.name, cell.variables, cell.change))
    except StoppedIteration as stopped:
        raise stopped.error from None
    return value if shown else None


def names_of(cell: RunningCell) -> dict[str, Any]:
    """Return the namespace of a cell; inside an actor, with its ``self``."""
    hidden = getattr(cell.change, "name", None)
    return cell.variables if hidden is None else {**cell.variables, "self": cell.variables[hidden]}


def caller(depth: int = 1) -> FrameType:
    """Return the frame that has called the function that calls this, or one further out."""
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = frame.f_back if frame is not None else None
    assert frame is not None
    return frame
