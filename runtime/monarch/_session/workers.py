"""Hosts of other machines: agents that listen on TCP, and their attachment to a program."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from monarch._core.kinds import is_a
from monarch._meshes.host_mesh import HostMesh, attached
from monarch._node.current import current_node, open_node
from monarch._node.future import Future
from monarch._procs.agent.main import UNABLE
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.local import hand_over
from monarch._procs.os.posix import proc_start_time
from monarch._procs.session_folder import host_of
from monarch._session.session import LATER, PRELOAD, session_of
from monarch._wire.keys import KeyPair
from monarch._wire.messages import Listening
from monarch._wire.tcp import LEASE_S
from monarch.exceptions import ArgumentError, MonarchError, SpawnError

_LONGEST = 3600.0
_TRUST_ALL = "trust_all_connections"
"""Values that other packages accept in place of a key file."""
_ADDRESS = re.compile(r"tcp://[^\s/]+:([0-9]{1,5})")


def parent() -> tuple[int, int]:
    """Return the pid and start time of this process, for agents that must end with it."""
    return os.getpid(), proc_start_time(os.getpid()) or 0


def start_agent(
    config: AgentConfig,
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    module: str = "monarch._procs.agent.main",
) -> subprocess.Popen[bytes]:
    """Start a host agent as a separate process."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        env={**os.environ, **(env or {})},
    )
    hand_over(process, msgspec.msgpack.encode(config))
    return process


class WorkerHosts:
    """Host agents that this program has started as separate processes, over TCP and CURVE.

    Args:
        count: the number of agents.
        prefixes: for each agent, a command to start it under, such as one that enters a network namespace.
        addresses: for each agent, the address to listen on.
        controller: the address at which this program listens for them.
        env: additional environment variables.
        silence: seconds without a heartbeat after which an agent counts as lost; None for the default.
    """

    def __init__(
        self,
        count: int,
        addresses: Sequence[str] | None = None,
        prefixes: Sequence[Sequence[str]] | None = None,
        controller: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        silence: float | None = None,
    ) -> None:
        node = open_node()
        session = session_of(node)
        if session is None:
            raise MonarchError("only the program can attach hosts, not a rank")
        self._session = session
        lease = _lease(silence)
        self.keys = node.hosts.keys or KeyPair.new()
        self.processes: list[subprocess.Popen[bytes]] = []
        for index in range(count):
            address = addresses[index] if addresses else "127.0.0.1"
            config = AgentConfig(
                "",
                "",
                node.proc,
                *parent(),
                PRELOAD,
                f"tcp://{address}",
                self.keys.public.decode(),
                lease=lease,
                later=LATER,
            )
            prefix = list(prefixes[index]) if prefixes else []
            self.processes.append(start_agent(config, prefix, env, subprocess.PIPE))
        listening: list[Listening] = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line or line.startswith(UNABLE.encode()):
                for other in self.processes:
                    other.kill()
                    other.wait()
                address = addresses[len(listening)] if addresses else "127.0.0.1"
                why = line.decode().strip() or f"exited during startup with code {process.returncode}"
                raise SpawnError(f"a host agent at {address} {why}")
            listening.append(msgspec.json.decode(line, type=Listening))
        self.hosts = tuple(host_of(each.src) for each in listening)
        session.attach(listening, self.keys, controller)
        self.mesh = attached(self.hosts, node, self.release)

    def release(self) -> None:
        """End the agents."""
        self._session.release(self.hosts)
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def hosts_from_config(name: str) -> HostMesh:
    """Return the hosts of a configuration. Not implemented: always two hosts on this machine, along ``hosts``."""
    return WorkerHosts(2).mesh


def attach_to_workers(
    *,
    ca: str,
    workers: Sequence[str | Future[str]],
    name: str | None = None,
    private_key: str | None = None,
    interface: str | None = None,
    timeout: float = 30.0,
    silence: float | None = None,
) -> HostMesh:
    """Attach hosts that run ``run_worker_loop_forever``, along the axis ``hosts``.

    Args:
        ca: the key file of the workers; see ``new_key_file``.
        workers: the address of each worker, such as ``tcp://node1:22222``, or a Future of it.
        name: the name of the mesh for messages and tables.
        private_key: None; the key file has both keys.
        interface: the address of this machine at which the workers reach it; by default the one on the route to the
            first worker.
        timeout: seconds to wait for each worker.
        silence: seconds without a heartbeat after which a host counts as lost, with everything that runs there;
            None for 5. Applies to hosts attached from now on. A worker has its own timeout for its ranks: see
            ``run_worker_loop_forever``.

    Raises:
        SpawnError: a worker does not answer.
        ArgumentError: an address is invalid, or ``ca`` is not the path of a key file.
        MonarchError: the key file is unusable, or this process is a rank.
    """
    if not workers or isinstance(workers, str):
        raise ArgumentError(f"workers: expected a list of at least one address, got {workers!r}")
    keys = read_key_file(ca)
    node = open_node()
    session = session_of(node)
    if session is None:
        raise MonarchError("only the program can attach hosts, not a rank")
    addresses = [_address(each.get(timeout) if isinstance(each, Future) else each) for each in workers]
    if len({*addresses}) < len(addresses):
        raise ArgumentError(f"workers names {max(addresses, key=addresses.count)!r} twice")
    _lease(silence)
    # Check all of them first, so that an unknown name fails at once.
    local_addresses = [_local_address(address) for address in addresses]
    here = interface or local_addresses[0]
    session.listen(keys, here, [keys.public.decode()])
    listening = [session.greet(address, keys, timeout) for address in addresses]
    hosts = tuple(host_of(each.src) for each in listening)
    session.attach(listening, keys, here)
    return attached(hosts, node, lambda: session.release(hosts), name or "")


def run_worker_loop_forever(
    *, address: str, ca: str, private_key: str | None = None, silence: float | None = None
) -> None:
    """Serve this machine as a host to programs that attach it, one at a time. Does not return.

    Args:
        address: the address to listen on, such as ``tcp://0.0.0.0:22222``.
        ca: a key file; only programs with the same key are served.
        private_key: None; the key file has both keys.
        silence: seconds without a heartbeat after which a program counts as lost and its ranks here are ended; None
            for 5.

    Raises:
        SpawnError: the address is not available, or the agent of this host has ended.
        ArgumentError: the address is invalid.
        MonarchError: the key file is unusable.
    """
    keys = read_key_file(ca)
    lease = _checked(silence)
    _address(address)
    public, secret = keys.public.decode(), keys.secret.decode()
    while True:
        config = AgentConfig("", "", "", *parent(), PRELOAD, address, public, (public, secret), lease, LATER)
        process = start_agent(config, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode().strip()
            if line and not line.startswith(UNABLE):
                print(f"monarch: worker at {address} waits for a controller", flush=True)
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if line.startswith(UNABLE):
            raise SpawnError(f"a worker {line.replace(':', f' at {address}:', 1)}; use another address or port")
        if status != 0:
            raise SpawnError(f"the host agent at {address} ended with code {status}")


def _address(address: str) -> str:
    found = _ADDRESS.fullmatch(address) if is_a(address, str) else None
    if found is None or not 0 < int(found[1]) < 65536:
        raise ArgumentError(f"expected a worker address with a port, such as tcp://node1:22222, got {address!r}")
    return address


def _checked(silence: float | None) -> float:
    if silence is None:
        return LEASE_S
    if not 0.1 <= silence <= _LONGEST:
        raise ArgumentError(f"silence: expected a number of seconds from 0.1 to {_LONGEST:g}, got {silence!r}")
    return float(silence)


def _lease(silence: float | None) -> float:
    """Set the heartbeat timeout of hosts, if given, and return the one in force."""
    node = current_node()
    if silence is not None:
        node.hosts.lease = _checked(silence)
    return node.hosts.lease


def new_key_file(path: str) -> None:
    """Make a key file for workers and the program that attaches them; only its owner can read it.

    Raises:
        FileExistsError: the file exists.
    """
    keys = KeyPair.new()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(f"{keys.public.decode()}\n{keys.secret.decode()}\n")


def read_key_file(path: str) -> KeyPair:
    """Return the key pair of a key file.

    Raises:
        ArgumentError: this is not a path.
        MonarchError: the file does not exist, is not a key file, or is readable by others.
    """
    if not is_a(path, str, os.PathLike) or path == _TRUST_ALL:
        raise ArgumentError(
            f"ca: expected the path of a key file that new_key_file() made, got {path!r}; connections between hosts "
            f"are always encrypted, so workers and program share a key file"
        )
    try:
        if os.stat(path).st_mode & 0o077:
            raise MonarchError(f"key file {path} is readable by other users; run 'chmod 600 {path}'")
        with open(path) as file:
            public, secret = file.read().split()
    except (OSError, ValueError) as error:
        raise MonarchError(f"{path!r} is not a key file ({error}); make one with new_key_file()") from error
    if len(public) != 40 or len(secret) != 40:
        raise MonarchError(f"{path!r} is not a key file; make one with new_key_file()")
    return KeyPair(public.encode(), secret.encode())


def _local_address(address: str) -> str:
    """Return this machine's address on the route to another one."""
    machine, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only selects the route.
            probe.connect((machine, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise SpawnError(f"cannot resolve or reach the worker address {address!r}: {error}") from error
