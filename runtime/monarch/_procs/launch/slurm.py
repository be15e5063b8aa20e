"""The slurm launcher: hosts of an allocation, from a login node or inside one.

From a login node, one ``salloc`` asks for the hosts and runs one ``srun``, whose standard input carries all that the
hosts need. The agents end when that connection does, and with them the allocation. Hosts that may come later are
jobs of their own.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

import msgspec

from monarch._procs.launch.interface import HostRequest, HostRoute, Joined, News, Queued, count_of
from monarch._procs.launch.payload import BOOT, CONNECTED, GRACE_S, SAFE_PATH, order_of
from monarch._procs.launch.reports import HostTask
from monarch._procs.launch.streams import HostStream, end_streams, poll_streams
from monarch._procs.launch.watchdog import Watchdog
from monarch.exceptions import ArgumentError, SpawnError

_PYTHON_S = 120.0
"""Seconds for the Pythons of all hosts to start from a file system that they share."""
_AGENT_S = 60.0
_ASK_S = 2.0
"""Seconds between questions to the scheduler while a job is queued."""
_REFRESH_S = 60.0
"""Seconds for which the end of the allocation is not asked again."""
_TOOL_S = 10.0
"""Seconds for a command of Slurm to answer."""
_ALLOCATION = re.compile(r"job allocation (\d+)")
_INSIDE = "SLURM_JOB_ID"
_CANCEL = "exec scancel --quiet --user=$(id -un) --name="
_STEP = ("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none")


@dataclass(frozen=True)
class SlurmLauncher:
    """Hosts that Slurm grants.

    Attributes:
        count: the number of hosts if the request names none.
        python: the Python of the hosts; this program's path if empty.
        args: further arguments of ``salloc``, as they are.
        port: the port of each host's agent; 0 for a free one.
        job_name: its name in the queue, before a number.
        time, partition, account, qos, gres, constraint, gpus_per_node, cpus_per_task, mem, exclusive: as ``salloc``
            takes them.
        env: environment variables of the hosts.
        grace: seconds that a host still has after SIGTERM.
        notice: a command that succeeds when the host is about to be taken back; empty for none.
        packages: a lock file to install on each host, or a packed environment there; empty for none.
    """

    count: int = 0
    python: str = ""
    args: Sequence[str] = ()
    port: int = 0
    job_name: str = "monarch"
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gres: str | None = None
    constraint: str | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    exclusive: bool = False
    env: Mapping[str, str] = default(default_factory=dict[str, str])
    grace: float = GRACE_S
    notice: str = ""
    packages: str = ""

    def __post_init__(self) -> None:
        if self.python and not SAFE_PATH.fullmatch(self.python):
            raise ArgumentError(f"python: expected a path of letters, digits and any of '_./~+-', got {self.python!r}")
        if not re.fullmatch(r"[\w.-]+", self.job_name):
            raise ArgumentError(f"job_name: expected letters, digits and any of '_.-', got {self.job_name!r}")

    def ask(self, request: HostRequest) -> SlurmLaunch:
        """Ask for an allocation; inside one, for its hosts.

        Raises:
            SpawnError: there is no Slurm here.
            ArgumentError: no number of hosts is given, or the allocation has fewer.
        """
        for tool in ("salloc", "srun", "squeue", "scancel"):
            if shutil.which(tool) is None:
                raise SpawnError(f"{tool!r} is not installed on this machine; run this on a login node of the cluster")
        count = count_of("slurm", request.count, self.count)
        there = int(os.environ.get("SLURM_JOB_NUM_NODES", "0") or 0)
        if _INSIDE in os.environ and there and count > there:
            raise ArgumentError(
                f"slurm: expected at most {there} hosts, the size of this allocation, got {count}; ask for {there}, or "
                f"start Jupyter outside the allocation"
            )
        return SlurmLaunch(self, count, request)

    def resources(self) -> list[str]:
        """Return the options for ``salloc``."""
        options = {
            name.replace("_", "-"): getattr(self, name)
            for name in ("time", "partition", "account", "qos", "gres", "constraint", "gpus_per_node", "cpus_per_task",
                         "mem")
        }  # fmt: skip
        chosen = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return [*chosen, *(["--exclusive"] if self.exclusive else []), *self.args]

    def command(self, count: int, name: str) -> list[str]:
        """Return the command that gets hosts and starts their agents."""
        script = f'echo {CONNECTED}; exec {self.python or sys.executable} -u -c "{BOOT}"'
        step = ["srun", f"--nodes={count}", *_STEP]
        task = ["/bin/sh", "-c", script]
        if _INSIDE in os.environ:
            return [*step, "--overlap", f"--jobid={os.environ[_INSIDE]}", *task]
        # A large file by a number of tasks: one for each host.
        asked = [f"--nodes={count}", "--ntasks-per-node=1", "--no-kill", f"--job-name={name}", *self.resources()]
        return ["salloc", *asked, *step, *task]


class SlurmLaunch:
    """Hosts of an allocation, or of one that is still queued.

    Args:
        launcher: its settings.
        count: the number of hosts.
        request: what was asked for.
    """

    forwarded = False
    agent_here = False

    def __init__(self, launcher: SlurmLauncher, count: int, request: HostRequest) -> None:
        self.expected = count
        inside = os.environ.get(_INSIDE, "")
        self._own = not inside
        self._name = f"{launcher.job_name}-{secrets.token_hex(3)}"
        self._end = (0.0, 0.0)
        """When the end of the allocation was asked for, and the end, in seconds since the epoch; 0 if unknown."""
        agent = msgspec.structs.replace(request.agent, one_port=True)
        order = order_of(agent, "$SLURM_LAUNCH_NODE_IPADDR", launcher)
        limits = {"python": _PYTHON_S, "agent": _AGENT_S}
        self._watchdog = Watchdog(_CANCEL + self._name, f"job {self._name}") if self._own else None
        self._grants: list[_Grant] = []
        try:
            first = 0
            for size in _sizes(count, request.at_least if self._own else 0):
                tasks = [HostTask("", index) for index in range(first, first + size)]
                stream = HostStream(launcher.command(size, self._name), order, tasks, limits)
                self._grants.append(_Grant(stream, inside, bool(inside)))
                first += size
        except BaseException:
            self._end_watchdog()
            end_streams([each.stream for each in self._grants])
            raise

    def watch(self, timeout: float) -> Sequence[News]:
        """Return what happened since the last call; wait up to ``timeout`` seconds for it."""
        news = poll_streams([each.stream for each in self._grants], timeout)
        return [*(queued for each in self._grants if not each.granted for queued in each.ask_queue()), *news]

    def connect(self, joined: Joined, here: Sequence[str]) -> HostRoute:
        """Return the address of an agent."""
        return HostRoute(joined.listening.owner_address)

    def settle(self) -> None:
        """Do nothing: without ``at_least``, the hosts share one connection."""

    def keep_trying(self) -> bool:
        """Return False: a job that Slurm has refused is not asked for again."""
        return False

    def left(self) -> float | None:
        """Return the seconds until the allocation ends; None if it has no end or Slurm does not say."""
        # The jobs for hosts that came later end later.
        first = self._grants[0]
        if not first.job or not first.granted:
            return None
        now, (asked, end) = time.time(), self._end
        if now > asked + _REFRESH_S:
            end = _epoch(_tool("squeue", "-h", "-j", first.job, "-o", "%e").strip())
            self._end = (now, end)
        return max(0.0, end - now) if end else None

    def end(self) -> None:
        """End the agents and the allocations; queued ones are cancelled."""
        if any(not each.granted for each in self._grants):
            # Its command has not started, so nothing reads its standard input.
            self._end_watchdog()
        end_streams([each.stream for each in self._grants])
        self._end_watchdog()

    def _end_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.end(_TOOL_S)


@dataclass
class _Grant:
    """A job that waits for its hosts or has them, or the allocation that the program runs in."""

    stream: HostStream
    job: str
    """Its number; empty until Slurm has said it."""
    granted: bool
    _asked: float = 0.0
    _queued: Queued | None = None

    def ask_queue(self) -> list[News]:
        """Return the state of the job in the queue, if that has changed."""
        text = self.stream.error_text()
        self.granted = "Granted job allocation" in text
        found = _ALLOCATION.search(text)
        if found is not None:
            self.job = found[1]
        if self.granted or not self.job or not self.stream.open or time.monotonic() < self._asked + _ASK_S:
            return []
        self._asked = time.monotonic()
        fields = _tool("squeue", "-h", "-j", self.job, "-o", "%T|%r|%S|%P").split("|")
        if len(fields) != 4 or fields[0] != "PENDING":
            return []
        pending = _tool("squeue", "-h", "-t", "PD", "-p", fields[3], "--sort=-p,i", "-o", "%i").split()
        ahead = pending.index(self.job) if self.job in pending else None
        queued = Queued(f"job {self.job}", "" if fields[1] == "None" else fields[1], ahead, _epoch(fields[2]))
        changed = queued != self._queued
        self._queued = queued
        return [queued] if changed else []


def _sizes(count: int, at_least: int) -> list[int]:
    """Return the number of hosts of each job: one for all, or one for the first and one for each that may be late."""
    return [at_least, *[1] * (count - at_least)] if 0 < at_least < count else [count]


def _tool(*command: str) -> str:
    """Return the output of a command of Slurm; empty if it fails."""
    with suppress(subprocess.TimeoutExpired, OSError):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_S, stdin=subprocess.DEVNULL, check=False
        )
        if not done.returncode:
            return done.stdout
    return ""


def _epoch(text: str) -> float:
    """Return a time of Slurm in seconds since the epoch; 0 if it has none."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return 0.0


def make(where: str, count: int, options: Mapping[str, Any]) -> SlurmLauncher:
    """Return the launcher of ``slurm`` or ``slurm:PARTITION``."""
    known = dict(options)
    if where:
        known["partition"] = where
    return SlurmLauncher(count=count, **known)
