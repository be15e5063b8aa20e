"""Entry points of ranks in the tests, and ways to disturb a zygote; imported by path."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path


def leave(config: bytes) -> int:
    """Exit with the status from config."""
    print(f"parent {os.getppid()} group {os.getpgrp()}")
    return int(config)


def describe(config: bytes) -> None:
    """Report everything about this process."""
    about = {
        "config": config.decode(),
        "env": {key: os.environ.get(key) for key in config.decode().split()},
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "path": sys.path,
        "main": sorted(vars(sys.modules["__main__"])),
        "comm": Path("/proc/self/comm").read_text().strip(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "group": os.getpgrp() == os.getpid(),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        # One belongs to the folder that is being listed.
        "fds": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
        "stdin": sys.stdin.read(),
        "random": [random.random(), _numpy_random()],
        "gc": gc.isenabled(),
        "tasks": len(os.listdir("/proc/self/task")),
        "threads": threading.active_count(),
    }
    print(json.dumps(about))


def _numpy_random() -> float:
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random.random() if numpy_random else 0.0


def compute(config: bytes) -> int:
    """Uses torch, which the zygote has imported."""
    if "torch" not in sys.modules:
        return 1
    import torch

    total = float((torch.ones(4) + 1).sum())
    print(total, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
    return 0


def wait(config: bytes) -> None:
    """Never ends by itself."""
    print("waits", flush=True)
    while True:
        signal.pause()


def fail(config: bytes) -> None:
    raise ValueError("this went wrong – ünd how")


def leave_with_text(config: bytes) -> None:
    sys.exit("no more")


def leave_with_number(config: bytes) -> None:
    sys.exit(7)


def say(config: bytes) -> None:
    """Print in every possible way; killed before the end flushes any buffer."""
    print("from print")
    os.write(1, b"from os.write\n")
    ctypes.CDLL(None).printf(b"from printf\n")
    subprocess.run(["sh", "-c", "echo from a subprocess; echo to stderr >&2"], check=True)
    print("\udc80 odd", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)


def has(config: bytes) -> int:
    """Whether a module is loaded without an import."""
    return int(config.decode() in sys.modules)


def collections(config: bytes) -> int:
    """Print how often all objects were collected in this process and those it is a fork of, and whether they may be."""
    print(gc.get_stats()[2]["collections"], gc.isenabled())
    return 0
