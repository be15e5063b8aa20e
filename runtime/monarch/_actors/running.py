"""Which actor's code runs here."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch._actors.mailbox import Cell
    from monarch._wire.messages import Call

current: ContextVar[tuple[Cell, Call] | None] = ContextVar("monarch_call", default=None)
"""The actor whose code runs here, and the message that it handles."""
