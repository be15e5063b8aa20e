"""The start of a process, and a Stop at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from leaks import Kit
from monarch._procs.launch.reports import HostTask
from monarch._procs.launch.streams import HostStream
from monarch._procs.os import starting
from monarch._procs.os.posix import proc_start_time

SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those of processes during whose start an interrupt comes."""
    found: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            found.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(starting.subprocess, "Popen", Interrupted)
    return found


def test_interrupt_of_a_start_leaves_no_process(pids: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        starting.start_process(SLEEP, stdin=subprocess.PIPE)
    (pid,) = pids
    # Ended and reaped.
    assert proc_start_time(pid) is None and not os.path.exists(f"/proc/{pid}")


def test_interrupt_of_a_connection_leaves_nothing(pids: list[int], leaks: Kit) -> None:
    with pytest.raises(KeyboardInterrupt):
        HostStream(SLEEP, None, [HostTask("node", 0)], {})
    assert not os.path.exists(f"/proc/{pids[0]}") and not leaks.left(2.0)


def test_program_that_does_not_exist_is_an_error_of_its_start() -> None:
    with pytest.raises(FileNotFoundError):
        starting.start_process(["/no/such/program"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
