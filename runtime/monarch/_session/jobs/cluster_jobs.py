"""Jobs whose hosts come from a launcher, and those on hosts that ssh can reach."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from monarch._core.shapes.extent import Extent
from monarch._core.shapes.region import Region
from monarch._meshes.host_mesh import HostMesh
from monarch._node.current import open_node
from monarch._procs.launch.hostnames import HostEntry, expand_names, read_hostfile
from monarch._procs.launch.interface import Launcher
from monarch._procs.launch.payload import GRACE_S
from monarch._procs.launch.ssh import SSHLauncher
from monarch._session.draining import HostNotice
from monarch._session.jobs.jobs import JobState, JobTrait
from monarch._session.launching.launching import LaunchedHosts, launch_hosts
from monarch._session.launching.waiting import Tell
from monarch.exceptions import ArgumentError, MonarchError


def show_line(line: str, keep: bool) -> None:
    """Show a line about the wait for hosts on stderr."""
    print(f"monarch: {line}", file=sys.stderr, flush=True)


_OF_PROGRAM = ("_tell", "_launched", "_on_preempt")
"""Attributes that are not part of a job."""


class LauncherJob(JobTrait):
    """A job whose hosts come from a launcher. Its hosts end at ``kill()``, or with the program.

    Args:
        meshes: the number of hosts of each mesh, by name. Their axis is ``hosts``.
        at_least: start with this many hosts, if the others fail or take longer, and see ``late_hosts()``; None for
            all. For one mesh only.
        timeout: the most seconds to wait for the hosts; None for the launcher's own limits.

    Raises:
        ArgumentError: no mesh is named, or a number of hosts is not positive.
    """

    def __init__(self, meshes: Mapping[str, int], *, at_least: int | None = None, timeout: float | None = None) -> None:
        super().__init__()
        wrong = [name for name, count in meshes.items() if type(count) is not int or count < 1]
        if not meshes or wrong:
            raise ArgumentError(f"meshes: expected a number of hosts for each name, got {dict(meshes)!r}")
        self.meshes = dict(meshes)
        self.at_least = at_least
        self.timeout = timeout
        # Not part of the job: a function of this program.
        self._tell: Tell = show_line
        self._launched: LaunchedHosts | None = None
        self._on_preempt: Callable[[Sequence[HostNotice]], object] | None = None

    def launcher(self) -> Launcher:
        """Return the launcher of the hosts."""
        raise NotImplementedError

    def told_by(self, tell: Callable[[str], None]) -> LauncherJob:
        """Show lines about the wait by a function, not on stderr; return the job."""
        self._tell = lambda line, keep: tell(line)
        return self

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the scheduler takes the hosts back; None if it does not, or while the job is not running."""
        return self._launched.launch.left() if self._launched is not None else None

    def on_preempt(self, function: Callable[[Sequence[HostNotice]], object] | None) -> LauncherJob:
        """Call a function, in a thread, when hosts are about to be taken back; return the job.

        A host is taken back when its agent gets SIGTERM, as from Slurm or Kubernetes, or when the command of the option
        ``notice`` succeeds there. The function gets a notice for each host. ``monarch.job.drain`` moves ranks off them.
        The hosts end when it returns, and at once if there is none.
        """
        self._on_preempt = function
        if self._launched is not None:
            self._launched.preemption.handler = function
        return self

    def hosts_of(self, notices: Sequence[HostNotice]) -> HostMesh:
        """Return the hosts of notices, as a mesh along ``hosts``."""
        region = Region.full(Extent(("hosts",), (len(notices),)))
        return HostMesh.of_hosts(tuple(each.host for each in notices), region, open_node())

    def late_hosts(self) -> HostMesh | None:
        """Return the hosts that have joined since ``state()`` or the last call; None if none has.

        With ``at_least``, a job keeps waiting for its other hosts. ``procs.resize(late, hosts=8)`` grows onto them.
        They end with the job.
        """
        return self._launched.late_hosts() if self._launched is not None else None

    def _start(self, client_script: str | None = None) -> JobState:
        only = len(self.meshes) == 1
        self._launched = launched = launch_hosts(
            self.launcher(),
            sum(self.meshes.values()),
            name=next(iter(self.meshes)) if only else "monarch",
            parts=self.meshes,
            at_least=self.at_least,
            timeout=self.timeout,
            tell=self._tell,
            advice="job.late_hosts() returns it",
        )
        launched.preemption.handler = self._on_preempt
        return JobState(launched.meshes)

    def _end(self, running: JobState) -> None:
        self._launched = None
        for name in self.meshes:
            # The program may have shut it down itself, or not have come to start it.
            with suppress(MonarchError, AttributeError):
                getattr(running, name).shutdown().get(30)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in _OF_PROGRAM}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_tell": show_line, "_launched": None, "_on_preempt": None})


class SSHJob(LauncherJob):
    """A job on hosts that ssh can reach. They need Python, torch and the runtime's other dependencies.

    Args:
        meshes: for each mesh of hosts, the names of its hosts as ssh takes them, such as ``["node1", "me@node2"]`` or
            ``"node[01-04]"``; with ``hostfile``, the number of its hosts.
        hostfile: a file with a host in each line, and ``python=PATH`` after it if wanted.
        python: the Python of the hosts; by default this program's path where it exists there, or else ``python3``. A
            mapping gives that of each host by name.
        config: a configuration file for ssh; by default the user's.
        options: additional options of ssh, as after its ``-o``, such as ``["Port=2222"]``.
        port: the port of each host's agent; 0 for a free one.
        reverse: whether all connections between this program and the hosts go through ssh.
        env: environment variables of the hosts.
        grace: seconds that a host still has after SIGTERM.
        notice: a command that succeeds when the host is about to be taken back, such as a loop that asks the cloud.
        packages: a lock file to install on each host: requirements.txt, pylock.toml or uv.lock; or a packed environment
            of the hosts, such as env.tar.gz.
        connect_timeout: seconds until a host that does not answer counts as failed.
        at_least: start with this many hosts, if the others fail or take longer, and see ``late_hosts()``; None for
            all. For one mesh only.
        timeout: the most seconds to wait for the hosts; None for the limits of each step.

    Raises:
        ArgumentError: an argument is invalid, or a host appears twice.
    """

    def __init__(
        self,
        meshes: Mapping[str, Sequence[str] | str | int],
        *,
        hostfile: str = "",
        python: str | Mapping[str, str] = "",
        config: str = "",
        options: Sequence[str] = (),
        port: int = 0,
        reverse: bool = False,
        env: Mapping[str, str] | None = None,
        grace: float = GRACE_S,
        notice: str = "",
        packages: str = "",
        connect_timeout: float = 15.0,
        at_least: int | None = None,
        timeout: float | None = None,
    ) -> None:
        entries, counts = _hosts_of(meshes, hostfile)
        super().__init__(counts, at_least=at_least, timeout=timeout)
        if not isinstance(python, str):
            entries = [HostEntry(each.name, python.get(each.name, each.python)) for each in entries]
        self._launcher = SSHLauncher(
            tuple(entries),
            python if isinstance(python, str) else "",
            config,
            tuple(options),
            port,
            reverse,
            dict(env or {}),
            grace,
            notice,
            packages,
            connect_timeout,
        )

    def launcher(self) -> Launcher:
        """Return the launcher of the hosts."""
        return self._launcher


def _hosts_of(meshes: Mapping[str, Sequence[str] | str | int], hostfile: str) -> tuple[list[HostEntry], dict[str, int]]:
    """Return the hosts of all meshes in turn, and the number of each mesh."""
    if hostfile:
        numbers = {name: hosts for name, hosts in meshes.items() if isinstance(hosts, int)}
        if len(numbers) < len(meshes):
            raise ArgumentError(
                f"meshes: with hostfile=, expected numbers of hosts such as {{'trainers': 4}}, got {dict(meshes)!r}"
            )
        return read_hostfile(hostfile), numbers
    entries: list[HostEntry] = []
    counts: dict[str, int] = {}
    for mesh, hosts in meshes.items():
        if isinstance(hosts, int):
            raise ArgumentError(f"meshes[{mesh!r}]: expected names of hosts, or a hostfile, got {hosts!r}")
        names = expand_names(hosts if isinstance(hosts, str) else ",".join(hosts))
        entries += [HostEntry(name) for name in names]
        counts[mesh] = len(names)
    return entries, counts
