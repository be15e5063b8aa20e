"""The cell that runs in this thread or task, for the magics in it."""

from __future__ import annotations

import ast
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from monarch._notebook.showing.display import Display


@dataclass
class RunningCell:
    """A cell while it runs."""

    name: str
    """Its name in tracebacks."""
    variables: dict[str, Any]
    """The namespace."""
    display: Display
    change: ast.NodeTransformer | None = None
    """Changes the code before it runs."""
    begun: float = field(default_factory=time.time)
    """Start, by the clock of the host, which its ranks share."""
    installs: int = 0
    """The number of ``%pip`` lines so far."""


running_cell: ContextVar[RunningCell | None] = ContextVar("monarch_cell", default=None)
