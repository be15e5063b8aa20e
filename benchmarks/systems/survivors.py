"""Leftovers of a program after its controller was killed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
import time

_MARK = "BENCH_SURVIVORS"
_PATIENCE = 2.0
"""Seconds after the kill at which the processes are counted."""


def survivors(python: str, program: str) -> int:
    """Count the processes of a program two seconds after the kill of its first one, then end them.

    Args:
        python: the interpreter.
        program: its text. It prints a line when all that it starts is there.
    """
    mark = secrets.token_hex(8)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        started = subprocess.Popen(
            [python, file.name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, _MARK: mark}
        )
        assert started.stdout is not None
        try:
            while b"ready" not in (line := started.stdout.readline()):
                if not line:
                    raise ValueError("the program ended before it was ready")
        finally:
            started.kill()
            started.wait()
            started.stdout.close()
        time.sleep(_PATIENCE)
        left = _marked(mark)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return len(left)


def _marked(mark: str) -> list[int]:
    needle = f"{_MARK}={mark}".encode()
    found: list[int] = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if name.isdigit() and needle in file.read():
                    found.append(int(name))
        except OSError:
            continue
    return found
