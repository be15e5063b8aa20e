"""Ops are not cut in the middle: ranks would differ in what they have computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from monarch._actors.running import current


def shield() -> AbstractContextManager[Any]:
    """Return a block that an interrupt of the running call does not cut."""
    here = current.get()
    executor: Any = here[0].executor if here is not None else None
    return executor.protected() if executor is not None else nullcontext()
