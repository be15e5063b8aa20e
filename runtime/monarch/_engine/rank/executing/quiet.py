"""Advice that torch's DTensor logs about its collectives: in ops of the engine, the program can do nothing about it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager

_LOGGERS = ("torch.distributed.tensor._redistribute", "torch.distributed.tensor._collective_utils")
_here = threading.local()
"""``here.quiet``: whether this thread runs ops of the engine."""


def _is_of_the_program(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING or not getattr(_here, "quiet", False)


def hide_advice() -> None:
    """Drop warnings of these loggers in the blocks of ``quiet``; other DTensors of the process keep theirs."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_of_the_program)


@contextmanager
def quiet() -> Generator[None]:
    """Hide the advice in a block, in this thread."""
    _here.quiet = True
    try:
        yield
    finally:
        _here.quiet = False
