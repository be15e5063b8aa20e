"""Hosts of other machines: agents that listen on tcp, and how a program attaches them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

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
"""What other packages take in place of a key file."""
_ADDRESS = re.compile(r"tcp://[^\s/]+:([0-9]{1,5})")


def parent() -> tuple[int, int]:
    """Pid and start time of this process, which an agent that it starts is to end with."""
    return os.getpid(), proc_start_time(os.getpid()) or 0


def start_agent(
    config: AgentConfig,
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    module: str = "monarch._procs.agent.main",
) -> subprocess.Popen[bytes]:
    """Start a host agent as a process of its own."""
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
    """Host agents that this program has started as processes of its own, over tcp and CURVE.

    Args:
        count: how many.
        prefixes: for each, a command to start it under, such as one that enters a network namespace.
        addresses: for each, the address that it listens on.
        controller: the address that this program listens on, for them.
        env: more of their environment.
        silence: seconds after which one that is not heard of counts as lost; None for what is usual.
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
            raise MonarchError("only the program itself attaches hosts, not one of its ranks")
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
                why = line.decode().strip() or f"ended as it was started, with code {process.returncode}"
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
    """Hosts by the name of a configuration. There are none yet: always two hosts on this machine, along ``hosts``."""
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
    """Attache hosts on which ``run_worker_loop_forever`` runs, along the axis ``hosts``.

    Args:
        ca: the key file that the workers were given too; see ``new_key_file``.
        workers: the address of each, as in ``tcp://node1:22222``; or a Future of it.
        name: of the mesh, for people: tables and errors have it.
        private_key: None; the key file has both keys.
        interface: the address of this machine at which the workers reach it; the one that leads to the first worker
            if there is none.
        timeout: seconds to wait for each.
        silence: seconds after which a host that is not heard of counts as lost, with all that runs there; None for
            what is usual, 5. It holds for hosts that are attached from now on. A host ends its ranks after a time of
            its own: see ``run_worker_loop_forever``.

    Raises:
        SpawnError: a worker does not answer.
        ArgumentError: an address is none, or ``ca`` is not the path of a key file.
        MonarchError: the key file cannot be used, or this is not the program itself but one of its ranks.
    """
    if not workers or isinstance(workers, str):
        raise ArgumentError(f"workers is a list of at least one address, and not {workers!r}")
    keys = read_key_file(ca)
    node = open_node()
    session = session_of(node)
    if session is None:
        raise MonarchError("only the program itself attaches hosts, not one of its ranks")
    addresses = [_address(each.get(timeout) if isinstance(each, Future) else each) for each in workers]
    if len({*addresses}) < len(addresses):
        raise ArgumentError(f"workers names {max(addresses, key=addresses.count)!r} twice")
    _lease(silence)
    # All of them, so that a name that leads nowhere is told at once.
    ways = [_way_to(address) for address in addresses]
    here = interface or ways[0]
    session.listen(keys, here, [keys.public.decode()])
    listening = [session.greet(address, keys, timeout) for address in addresses]
    hosts = tuple(host_of(each.src) for each in listening)
    session.attach(listening, keys, here)
    return attached(hosts, node, lambda: session.release(hosts), name or "")


def run_worker_loop_forever(
    *, address: str, ca: str, private_key: str | None = None, silence: float | None = None
) -> None:
    """Serve this machine as a host: each program that attaches it, one after the other. It does not return.

    Args:
        address: where to listen, as in ``tcp://0.0.0.0:22222``.
        ca: a key file; only programs that have the same one are served.
        private_key: None; the key file has both keys.
        silence: seconds after which a program that is not heard of counts as lost, so that its ranks are ended here;
            None for what is usual, 5.

    Raises:
        SpawnError: it cannot listen there, or the agent of this host has ended.
        ArgumentError: the address is none.
        MonarchError: the key file cannot be used.
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
            raise SpawnError(f"a worker {line.replace(':', f' at {address}:', 1)}; name another address or port")
        if status != 0:
            raise SpawnError(f"the host agent at {address} ended with code {status}")


def _address(address: str) -> str:
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 0 < int(found[1]) < 65536:
        raise ArgumentError(f"a worker has an address like tcp://node1:22222, with a port of its own, not {address!r}")
    return address


def _checked(silence: float | None) -> float:
    if silence is None:
        return LEASE_S
    if not 0.1 <= silence <= _LONGEST:
        raise ArgumentError(f"silence is a number of seconds from 0.1 to {_LONGEST:g}, and not {silence!r}")
    return float(silence)


def _lease(silence: float | None) -> float:
    """Have this program hear of hosts at least so often, if that was said; the seconds that hold."""
    node = current_node()
    if silence is not None:
        node.hosts.lease = _checked(silence)
    return node.hosts.lease


def new_key_file(path: str) -> None:
    """Make a key file, which the workers and the program that attaches them both need; only its owner can read it.

    Raises:
        FileExistsError: there is one already.
    """
    keys = KeyPair.new()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(f"{keys.public.decode()}\n{keys.secret.decode()}\n")


def read_key_file(path: str) -> KeyPair:
    """Return the key pair of a key file.

    Raises:
        ArgumentError: this is not a path.
        MonarchError: there is none, it is no key file, or others can read it.
    """
    if not isinstance(path, (str, os.PathLike)) or path == _TRUST_ALL:
        raise ArgumentError(
            f"ca: expected the path of a key file that new_key_file() made, got {path!r}; connections between hosts "
            f"are always encrypted, so workers and program share a key file"
        )
    try:
        if os.stat(path).st_mode & 0o077:
            raise MonarchError(f"others can read the key file {path}; take that away by chmod 600")
        with open(path) as file:
            public, secret = file.read().split()
    except (OSError, ValueError) as error:
        raise MonarchError(f"{path!r} is no key file ({error}); new_key_file makes one") from error
    if len(public) != 40 or len(secret) != 40:
        raise MonarchError(f"{path!r} is no key file; new_key_file makes one")
    return KeyPair(public.encode(), secret.encode())


def _way_to(address: str) -> str:
    """Return the address of this machine from which another one is reached."""
    machine, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only chooses the way.
            probe.connect((machine, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise SpawnError(f"the worker address {address!r} leads nowhere: {error}") from error
