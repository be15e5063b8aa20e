"""The start of a process that an interrupt cannot cut in two."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from monarch._wire.deferred_signals import DeferredSignals


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process. An exception of a signal handler comes before that or after it, and then the process is ended.

    ``Popen`` alone may be interrupted when the process exists, which nobody knows then.

    Args:
        command: the program and its arguments.
        options: those of ``Popen``.

    Raises:
        OSError: the program cannot be run.
    """
    if threading.current_thread() is not threading.main_thread():
        return _start(command, options)
    held = DeferredSignals(_nothing)
    handlers = held.begin()
    try:
        process = _start(command, options)
    except BaseException:
        held.end_and_run(handlers)
        raise
    try:
        held.end_and_run(handlers)
    except BaseException:
        _end(process)
        raise
    return process


def _start(command: Sequence[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
    start: Any = subprocess.Popen
    return start(command, **options)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _nothing() -> None:
    pass
