"""A process that takes back what was asked of a scheduler when this program ends, also by SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from monarch._procs.os.posix import memfd
from monarch._procs.rank.output import read_tail

_TAIL = 4096


class Watchdog:
    """A shell that waits for the end of this program, and then runs a command.

    Args:
        script: the command, in shell syntax. ``$word`` is that of ``end``, and empty if the program has been killed.
        what: what it takes back, as in ``job 7``, for the report of a failure.
    """

    def __init__(self, script: str, what: str) -> None:
        self._what = what
        self._errors = memfd("watchdog-stderr")
        try:
            self._process = subprocess.Popen(
                # Without a line, it waits for the end of all processes that hold the pipe: this program's forks too.
                ["/bin/sh", "-c", f"read -r word; {script}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._errors)
            raise

    def end(self, timeout: float, word: str = "", report: bool = True) -> None:
        """Run the command now; the second time, do nothing. A failure is reported on standard error.

        Args:
            timeout: the most seconds to wait for it.
            word: for the command.
            report: whether its failure matters.
        """
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        # The shell may have been killed.
        with suppress(OSError):
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()
        with suppress(OSError):
            self._process.stdin.close()
        try:
            code = self._process.wait(timeout)
            why = self._said() or f"code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"no answer in {timeout:g} s"
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        finally:
            os.close(self._errors)
        if why and report:
            print(f"monarch: {self._what} may still be running; the command to end it failed: {why}", file=sys.stderr)

    def _said(self) -> str:
        lines = read_tail(self._errors, _TAIL).data.decode(errors="replace").strip().splitlines()
        return "; ".join(line.strip() for line in lines[-2:])
