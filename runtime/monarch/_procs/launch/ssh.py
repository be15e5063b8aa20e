"""The ssh launcher: hosts by name, through the system's OpenSSH client.

Each host is one ``ssh`` command, whose standard input carries all that the host needs. The agent there ends when that
connection does.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default
from typing import Any

import msgspec

from monarch._procs.launch.forwards import Forwards
from monarch._procs.launch.hostnames import HostEntry, check_hosts, expand_names, read_hostfile
from monarch._procs.launch.interface import Failed, HostRequest, HostRoute, Joined, News
from monarch._procs.launch.payload import BOOT, CONNECTED, GRACE_S, SAFE_PATH, order_of
from monarch._procs.launch.reports import HostTask
from monarch._procs.launch.streams import HostStream, end_streams, poll_streams
from monarch.exceptions import ArgumentError, SpawnError

_PYTHON_S = 60.0
"""Seconds for a Python on a slow file system to start."""
_AGENT_S = 60.0
_AGAIN_S = 10.0
"""Seconds until a host that has failed is asked again."""
_SETTINGS = {
    # Nobody is there to type a password, so ssh fails instead of asking.
    "BatchMode": "yes",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ClearAllForwardings": "yes",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
}
_ADVICE = {
    "Permission denied": "load your key with ssh-add, or set IdentityFile for this host in ~/.ssh/config",
    "Host key verification failed": "connect once by hand to accept its key: ssh {host}",
    "Could not resolve hostname": "check the name, or add a Host entry with a HostName to ~/.ssh/config",
    "Connection refused": "check that sshd runs there, and the Port in ~/.ssh/config",
    "timed out": "check that the host is up and reachable; a host behind a gateway needs ProxyJump in ~/.ssh/config",
}
"""Advice by phrases of OpenSSH."""


@dataclass(frozen=True)
class SSHLauncher:
    """Hosts that ssh can reach.

    Attributes:
        hosts: the hosts.
        python: the Python of all hosts that name none; empty for this program's path where it exists there, or else
            ``python3``.
        config: a configuration file for ssh; empty for the user's.
        options: additional options of ssh, such as ``("Port=2222",)``, as after ``-o``.
        port: the port of each host's agent; 0 for a free one.
        reverse: whether all connections between this program and the hosts go through ssh.
        env: environment variables of the hosts.
        grace: seconds that a host still has after SIGTERM.
        notice: a command that succeeds when the host is about to be taken back; empty for none.
        packages: a lock file to install on each host, or a packed environment there; empty for none.
        connect_timeout: seconds until a host that does not answer counts as failed.
        ssh: the OpenSSH client.
    """

    hosts: Sequence[HostEntry]
    python: str = ""
    config: str = ""
    options: Sequence[str] = ()
    port: int = 0
    reverse: bool = False
    env: Mapping[str, str] = default(default_factory=dict[str, str])
    grace: float = GRACE_S
    notice: str = ""
    packages: str = ""
    connect_timeout: float = 15.0
    ssh: str = "ssh"

    def __post_init__(self) -> None:
        check_hosts(self.hosts)
        for path in (self.python, *(entry.python for entry in self.hosts)):
            if path and not SAFE_PATH.fullmatch(path):
                raise ArgumentError(f"python: expected a path of letters, digits and any of '_./~+-', got {path!r}")
        if not 0 <= self.port < 65536:
            raise ArgumentError(f"port: expected a number from 0 to 65535, got {self.port!r}")
        if not 1 <= self.connect_timeout <= 3600:
            raise ArgumentError(f"connect_timeout: expected seconds from 1 to 3600, got {self.connect_timeout!r}")

    def ask(self, request: HostRequest) -> SSHLaunch:
        """Connect to the hosts, all at the same time.

        Raises:
            SpawnError: there is no ssh here.
            ArgumentError: there are fewer hosts than requested.
        """
        if shutil.which(self.ssh) is None:
            raise SpawnError(f"{self.ssh!r} is not installed on this machine; install the OpenSSH client")
        if request.count > len(self.hosts):
            raise ArgumentError(
                f"ssh: {request.count} hosts are requested, but only {len(self.hosts)} named; name {request.count}, or "
                f"request {len(self.hosts)} at most"
            )
        return SSHLaunch(self, self.hosts[: request.count or None], request)

    def client(self, more: Sequence[str] = ()) -> list[str]:
        """Return the command and its options, without the host."""
        settings = [f"{key}={value}" for key, value in _SETTINGS.items()]
        settings += [f"ConnectTimeout={int(self.connect_timeout * 2 / 3) or 1}"]
        pairs = [word for setting in [*self.options, *settings] for word in ("-o", setting)]
        return [self.ssh, "-T", *(("-F", self.config) if self.config else ()), *more, *pairs]

    def remote_command(self, entry: HostEntry) -> str:
        """Return the command for the shell of a host. It has no secret, because others there can read it."""
        python = entry.python or self.python
        candidates = [python] if python else [sys.executable, "python3"]
        names = " ".join(path for path in candidates if SAFE_PATH.fullmatch(path))
        script = (
            f'echo {CONNECTED}; for p in {names}; do command -v $p >/dev/null 2>&1 && exec $p -u -c "{BOOT}"; done; '
            f"echo found no {' or '.join(candidates)} >&2; exit 127"
        )
        return f"exec /bin/sh -c '{script}'"


class SSHLaunch:
    """Hosts that ssh connects to.

    Args:
        launcher: its settings.
        entries: the hosts.
        request: what was asked for.
    """

    def __init__(self, launcher: SSHLauncher, entries: Sequence[HostEntry], request: HostRequest) -> None:
        self.expected = len(entries)
        # A forwarded port of the agent of this host must be known to the other hosts from the start.
        self.forwarded = self.agent_here = launcher.reverse
        self._folder = tempfile.mkdtemp(prefix="monarch-ssh-") if launcher.reverse else ""
        self._forwards: dict[str, Forwards] = {}
        self._streams: list[HostStream] = []
        agent = msgspec.structs.replace(request.agent, one_port=True)
        self._launcher = launcher
        self._entries = entries
        self._order = order_of(agent, "ssh", launcher)
        self._trying = False
        self._next: dict[int, float] = {}
        """When hosts that have failed are asked again, in monotonic seconds, by index."""
        try:
            for index in range(len(entries)):
                self._streams.append(self._connect(index))
        except BaseException:
            self.end()
            raise

    def _connect(self, index: int) -> HostStream:
        """Begin the connection to a host."""
        launcher, entry = self._launcher, self._entries[index]
        more = ["-o", "ControlMaster=no"]
        if launcher.reverse:
            # A connection of its own, since forwards of a shared one would outlive it.
            path = f"{self._folder}/{index}"
            more = ["-M", "-S", path, "-o", "ControlPersist=no"]
            self._forwards[entry.name] = Forwards([launcher.ssh, "-S", path], entry.name)
        command = [*launcher.client(more), "--", entry.name, launcher.remote_command(entry)]
        limits = {"connecting": launcher.connect_timeout, "python": _PYTHON_S, "agent": _AGENT_S}
        return HostStream(command, self._order, [HostTask(entry.name, index)], limits)

    def watch(self, timeout: float) -> Sequence[News]:
        """Return what happened since the last call; wait up to ``timeout`` seconds for it."""
        if self._trying:
            self._try_again()
        return [_advised(each) if isinstance(each, Failed) else each for each in poll_streams(self._streams, timeout)]

    def keep_trying(self) -> bool:
        """Ask again for hosts that fail, every few seconds; return True."""
        self._trying = True
        return True

    def _try_again(self) -> None:
        now = time.monotonic()
        for index, stream in enumerate(self._streams):
            if stream.tasks[0].phase == "failed" and now >= self._next.setdefault(index, now + _AGAIN_S):
                del self._next[index]
                stream.end(now)
                self._streams[index] = self._connect(index)

    def connect(self, joined: Joined, here: Sequence[str]) -> HostRoute:
        """Return how this program and a host reach each other; forward ports if wanted.

        Raises:
            SpawnError: the server does not allow forwarding.
        """
        forwards = self._forwards.get(joined.host)
        if forwards is None:
            return HostRoute(joined.listening.owner_address)
        return HostRoute(
            forwards.to_host(joined.listening.owner_address), {address: forwards.to_here(address) for address in here}
        )

    def settle(self) -> None:
        """End the connections to hosts that have not joined."""
        for stream in self._streams:
            if any(task.phase != "joined" for task in stream.tasks):
                stream.hang_up()

    def left(self) -> float | None:
        """Return None: nobody takes the hosts back."""
        return None

    def end(self) -> None:
        """End the agents and the connections."""
        end_streams(self._streams)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _advised(failed: Failed) -> Failed:
    if failed.advice:
        return failed
    advice = next((text for phrase, text in _ADVICE.items() if phrase in failed.reason), "")
    if not advice and not failed.is_reached:
        advice = "try 'ssh -o BatchMode=yes {host} true' in a terminal"
    return replace(failed, advice=advice.format(host=failed.host))


def make(where: str, count: int, options: Mapping[str, Any]) -> SSHLauncher:
    """Return the launcher of ``ssh:node[1-4]``, or of ``ssh`` with the option ``hostfile``."""
    rest = dict(options)
    hostfile = rest.pop("hostfile", "")
    entries = [HostEntry(name) for name in expand_names(where)] or (read_hostfile(hostfile) if hostfile else [])
    if not entries:
        raise ArgumentError("ssh: expected hosts, such as ssh:node1,node2, or a hostfile")
    return SSHLauncher(entries[: count or None], **rest)
