"""Hosts of other machines: agents that listen on TCP, and their attachment to a program."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence

from monarch._core.kinds import is_a
from monarch._core.text.causes import signal_text
from monarch._meshes.host_mesh import HostMesh
from monarch._node.future import Future
from monarch._procs.agent.main import DISMISSED, UNABLE
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.local import HostAgent
from monarch._procs.launch.process import ProcessLaunch, ProcessLauncher, parent
from monarch._procs.launch.tcp import WorkerLauncher
from monarch._session.launching.attachment import local_address
from monarch._session.launching.launching import launch_hosts
from monarch._session.launching.waiting import Tell
from monarch._session.local_agent import LATER, PRELOAD
from monarch._wire.keys import KeyPair
from monarch._wire.tcp import LEASE_S
from monarch.exceptions import ArgumentError, MonarchError, SpawnError

_MAKE = "make one with 'python -m monarch.worker --new-key FILE'"
_LONGEST = 3600.0
_TRUST_ALL = "trust_all_connections"
"""Values that other packages accept in place of a key file."""
_ADDRESS = re.compile(r"tcp://[^\s/]+:([0-9]{1,5})")


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
        launcher = ProcessLauncher(tuple(addresses or ()), tuple(prefixes or ()), dict(env or {}))
        hosts = launch_hosts(
            launcher, count, interface=controller, silence=_checked(silence) if silence is not None else None
        )
        assert isinstance(hosts.launch, ProcessLaunch)
        self.agents: list[HostAgent] = hosts.launch.agents
        self.keys, self.hosts, self.mesh = hosts.keys, hosts.ids, hosts.mesh


def attach_to_workers(
    *,
    ca: str,
    workers: Sequence[str | Future[str]],
    name: str | None = None,
    private_key: str | None = None,
    interface: str | None = None,
    timeout: float = 30.0,
    silence: float | None = None,
    tell: Tell | None = None,
) -> HostMesh:
    """Attach hosts that run ``run_worker_loop_forever``, along the axis ``hosts``.

    Args:
        ca: the key file of the workers; see ``new_key_file``.
        workers: the address of each worker, such as ``tcp://node1:22222``, or a Future of it. The part after an ``@``
            is for the worker.
        name: the name of the mesh for messages and tables.
        private_key: None; the key file has both keys.
        interface: the address of this machine at which the workers reach it; by default the one on the route to the
            first worker.
        timeout: seconds for all workers to answer. One that refuses ends the wait.
        silence: seconds without a heartbeat after which a host counts as lost, with everything that runs there;
            None for 5. Applies to hosts attached from now on. A worker has its own timeout for its ranks: see
            ``run_worker_loop_forever``.
        tell: called with a line at each step of the wait, and whether it matters after it.

    Raises:
        SpawnError: a worker does not answer.
        ArgumentError: an address is invalid, or ``ca`` is not the path of a key file.
        MonarchError: the key file is unusable, or this process is a rank.
    """
    if not workers or isinstance(workers, str):
        raise ArgumentError(f"workers: expected a list of at least one address, got {workers!r}")
    keys = read_key_file(ca)
    addresses = [_address(each.get(timeout) if isinstance(each, Future) else each)[0] for each in workers]
    if len({*addresses}) < len(addresses):
        raise ArgumentError(f"workers: {max(addresses, key=addresses.count)!r} appears twice")
    # Check all of them first, so that an unknown name fails at once.
    local_addresses = [local_address(address) for address in addresses]
    launched = launch_hosts(
        WorkerLauncher(addresses, keys.public.decode()),
        keys=keys,
        interface=interface or local_addresses[0],
        name=name or "",
        timeout=timeout,
        silence=_checked(silence) if silence is not None else None,
        tell=tell,
    )
    return launched.mesh


def run_worker_loop_forever(
    *, address: str, ca: str, private_key: str | None = None, silence: float | None = None
) -> None:
    """Serve this machine as a host to programs that attach it, one at a time. Does not return.

    Args:
        address: the address to listen on, such as ``tcp://0.0.0.0:22222``. After the address that programs use, as in
            ``tcp://node1:22222@tcp://0.0.0.0:22222``, if that is another one.
        ca: a key file; only programs with the same key are served.
        private_key: None; the key file has both keys.
        silence: seconds without a heartbeat after which a program counts as lost and its ranks here are ended; None
            for 5.

    Raises:
        SpawnError: the address is not available, or the agent of this host has ended.
        ArgumentError: the address is invalid.
        MonarchError: the key file is unusable.
    """
    _serve(address, ca, silence, once=False)


def run_worker_loop_until_shutdown(
    *, address: str, ca: str, private_key: str | None = None, silence: float | None = None
) -> None:
    """Serve this machine as a host until a program that has attached it shuts it down or ends.

    A program that is killed or loses its connection does not count: then the next one is served.

    Args:
        address: as for ``run_worker_loop_forever``.
        ca: likewise.
        private_key: likewise.
        silence: likewise.

    Raises:
        SpawnError: the address is not available, or the agent of this host has ended.
        ArgumentError: the address is invalid.
        MonarchError: the key file is unusable.
    """
    _serve(address, ca, silence, once=True)


def _serve(address: str, ca: str, silence: float | None, once: bool) -> None:
    keys = read_key_file(ca)
    lease = _checked(silence)
    _, bound = _address(address)
    public, secret = keys.public.decode(), keys.secret.decode()
    former: HostAgent | None = None
    while True:
        config = AgentConfig("", "", "", *parent(), PRELOAD, bound, public, (public, secret), lease, LATER)
        agent = HostAgent(config, announces=True)
        try:
            line = (agent.first_line() or b"").decode().strip()
            if line and not line.startswith(UNABLE):
                print(f"monarch: worker at {address} waits for a controller", flush=True)
            if former is not None:
                # Not before there is another: the fork server ends with the last that needs it.
                former.release()
            agent.wait()
        except BaseException:
            agent.signal(signal.SIGTERM)
            agent.wait()
            raise
        if line.startswith(UNABLE):
            raise SpawnError(f"a worker {line.replace(':', f' at {bound}:', 1)}; use another address or port")
        # Unknown if the fork server was killed.
        if agent.code not in (0, None, DISMISSED) or not line:
            code = agent.code or 0
            how = f"was killed by {signal_text(-code)}" if code < 0 else f"exited with code {code}"
            raise SpawnError(f"the host agent at {bound} {how}; start the worker again")
        if once and agent.code == DISMISSED:
            agent.release()
            return
        former = agent


def _address(address: str) -> tuple[str, str]:
    """Return the address that programs use, and the one to listen on: as ``USED@LISTENED``, or the same."""
    parts = address.split("@") if is_a(address, str) else []
    found = [_ADDRESS.fullmatch(part) for part in parts]
    if len(parts) not in (1, 2) or not all(each is not None and 0 < int(each[1]) < 65536 for each in found):
        raise ArgumentError(f"expected a worker address with a port, such as tcp://node1:22222, got {address!r}")
    return parts[0], parts[-1]


def _checked(silence: float | None) -> float:
    if silence is None:
        return LEASE_S
    if not 0.1 <= silence <= _LONGEST:
        raise ArgumentError(f"silence: expected a number of seconds from 0.1 to {_LONGEST:g}, got {silence!r}")
    return float(silence)


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
            f"ca: expected the path of a key file that new_key_file() created, got {path!r}; connections between hosts "
            f"are always encrypted, so workers and program share a key file"
        )
    try:
        if os.stat(path).st_mode & 0o077:
            raise MonarchError(f"key file {path} is readable by other users; run 'chmod 600 {path}'")
        with open(path) as file:
            public, secret = file.read().split()
    except (OSError, ValueError) as error:
        raise MonarchError(f"{path!r} is not a key file ({error}); {_MAKE}") from error
    if len(public) != 40 or len(secret) != 40:
        raise MonarchError(f"{path!r} is not a key file; {_MAKE}")
    return KeyPair(public.encode(), secret.encode())
