"""Which sessions can share a fork server: those for which its fork is as good as a process of their own.

Settings that a process can still change do not matter: environment, folder, cores, soft limits. Others, and those
that are read when Python or torch is loaded, have to match.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from monarch._procs.zygote.load_time import is_load_time

_PACKAGE = Path(__file__).resolve().parents[2]
_VARIABLES = {"CUDA_VISIBLE_DEVICES", "HOME", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV", "XDG_RUNTIME_DIR"}
_STATUS = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def session_key(preload: Sequence[str], later: Sequence[str]) -> str:
    """Return a name for all that sessions must have in common to share a fork server."""
    parts = [sys.executable, sys.version, *preload, "", *later, "", *_environment(), *_process(), *_files(preload)]
    return hashlib.blake2b("\0".join(parts).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def tells_apart(variable: str) -> bool:
    """Return whether sessions that differ in an environment variable cannot share a fork server."""
    return variable in _VARIABLES or variable.startswith("TRITON_") or is_load_time(variable)


def _environment() -> Iterable[str]:
    for key in sorted(os.environ):
        if tells_apart(key):
            yield f"{key}={os.environ[key]}"


def _process() -> Iterable[str]:
    for name in sorted(os.listdir("/proc/self/ns")):
        yield os.readlink(f"/proc/self/ns/{name}")
    with open("/proc/self/cgroup") as file:
        yield file.read()
    with open("/proc/self/status") as file:
        yield from (line for line in file if line.partition(":")[0] in _STATUS)
    yield f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)}"
    for path in ("/proc/self/oom_score_adj", "/proc/self/attr/current"):
        # There is no label without a security module.
        with suppress(OSError), open(path) as file:
            yield file.read()
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            yield f"{name} {resource.getrlimit(getattr(resource, name))[1]}"


def _files(preload: Sequence[str]) -> Iterable[str]:
    """Yield the files of this package, and the locations of the others: an update of either is another environment."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        yield f"{path} {path.stat().st_mtime_ns}"
    for name in sorted({name.partition(".")[0] for name in preload}):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and os.path.exists(spec.origin):
            yield f"{spec.origin} {os.stat(spec.origin).st_mtime_ns}"
