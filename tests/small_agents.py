"""A small agent in a process of its own, as tests of zygotes see it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from leaks import processes
from monarch._procs.os import posix

HERE = Path(__file__).parent / "procs"
SOON = 2.0


def gone_soon(pids: list[int], within: float = SOON) -> bool:
    """Whether all of these end in time."""
    deadline = time.monotonic() + within
    # Of a pid that is not there any more, the start time is that of nobody.
    starts = {pid: posix.proc_start_time(pid) for pid in pids}
    return not any(
        start is not None and posix.outlives(pid, start, max(0.0, deadline - time.monotonic()))
        for pid, start in starts.items()
    )


class Agent:
    """The small agent, seen from a test."""

    def __init__(self, session: Path, **setup: Any) -> None:
        self.session = session
        self.seen: list[dict[str, Any]] = []
        self.rest = b""
        setup = {
            "preload": [],
            "session_dir": str(session),
            "controller": [os.getpid(), posix.proc_start_time(os.getpid())],
            **setup,
        }
        setup["env"] = {"PYTHONPATH": str(HERE), **setup.get("env", {})}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "small_agent.py"), json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.zygote: int = self.hear("started")["pid"]
        self.pids = [self.zygote, self.process.pid]

    def hear(self, event: str, within: float = 20.0, **about: Any) -> dict[str, Any]:
        """The first event that is like this, of the past or to come; each is heard once."""
        stream = self.process.stdout
        assert stream is not None
        deadline = time.monotonic() + within
        while True:
            for heard in self.seen:
                if heard["event"] == event and all(heard[key] == value for key, value in about.items()):
                    self.seen.remove(heard)
                    return heard
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            text = os.read(stream.fileno(), 1 << 16) if ready else b""
            assert text, f"no {event} {about}; heard {self.seen}"
            *lines, self.rest = (self.rest + text).split(b"\n")
            self.seen += [json.loads(line) for line in lines]

    def ask(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def fork(self, function: str, configs: list[str], token: int = 1, **spec: Any) -> None:
        base = {"env": {}, "affinity": None, "threads": None, "title": "rank", "path": [], "cwd": "/", **spec}
        entry = function if ":" in function else f"rank_entries:{function}"
        self.ask(ask="fork", token=token, entry=entry, ranks=[{**base, "config": text} for text in configs])

    def forked(self, token: int = 1) -> list[int]:
        pids = self.hear("forked", token=token)["pids"]
        self.pids += pids
        return pids

    def run(self, function: str, configs: list[str], token: int = 1, **spec: Any) -> list[dict[str, Any]]:
        """Forks ranks and waits for their ends, in order of rank."""
        self.fork(function, configs, token, **spec)
        return [self.hear("exited", pid=pid) for pid in self.forked(token)]

    def wait_for_output(self, pids: list[int], text: bytes = b"waits") -> None:
        """Until each of these has printed this."""
        deadline = time.monotonic() + 20
        for pid in pids:
            # Opened anew each time: a fork that has just begun still has the zygote's files.
            while text not in Path(f"/proc/{pid}/fd/1").read_bytes():
                assert time.monotonic() < deadline, f"{pid} has not printed {text!r}"
                os.sched_yield()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        left = [] if gone_soon(self.pids) else [pid for pid in self.pids if posix.proc_start_time(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        makers = [pid for pid, name in processes().items() if name == f"zombie of {os.getpid()}"]
        for pid in (*self.pids, *makers):
            # Those whose agent was killed have come to this process, and who has forked them for a killed zygote.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        assert not left, f"of {self.pids} there are left {left}"
