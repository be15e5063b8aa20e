"""Processes that user code spawns, such as workers of pools and data loaders: they get what cells define by value.

A spawned process imports the main module of its parent from a file. A rank that runs cells has none, so that functions
and classes of cells could not be found there by name.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import sys
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import cloudpickle

from monarch._procs.os import child_stacks
from monarch._wire.codes import DISPATCH_TABLE


def spawn_by_value() -> None:
    """Let multiprocessing pickle functions and classes of a main module without a file by value."""
    # Looked up at each dump; other objects are pickled as before, tensors by torch's own reductions.
    ForkingPickler.reducer_override = _reduce  # type: ignore[attr-defined]


def load(data: bytes, pid: int) -> Any:
    """Return a function or class in a spawned process, which sends such back in the same way."""
    spawn_by_value()
    if os.getpid() != pid:
        child_stacks.serve()
    return pickle.loads(data)


def _reduce(_: ForkingPickler, obj: Any) -> Any:
    if isinstance(obj, BaseProcess):
        return _reduce_process(obj)
    if not isinstance(obj, (FunctionType, type)):
        return NotImplemented
    if getattr(obj, "__module__", None) != "__main__" or hasattr(sys.modules["__main__"], "__file__"):
        return NotImplemented
    file = io.BytesIO()
    _ByValue(file).dump(obj)
    return load, (file.getvalue(), os.getpid())


def _reduce_process(process: BaseProcess) -> Any:
    """Let the process that is spawned of it serve its stack, whatever file its function is in."""
    reduced: Any = process.__reduce_ex__(2)
    # One with a reduction of its own knows better.
    return (child_stacks.made, *reduced[1:]) if reduced[0] is copyreg.__newobj__ else reduced  # type: ignore[attr-defined]


class _ByValue(cloudpickle.Pickler):
    """Keeps the names of cells, which tracebacks show."""

    dispatch_table = DISPATCH_TABLE
