"""Hosts of other machines: agents that listen on tcp, and how a program attaches them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from monarch._actors.client import PRELOAD, _agent_environment, _hand_over
from monarch._actors.hostmesh import HostMesh, attached
from monarch._actors.process import get_runtime
from monarch._procs.agent import AgentConfig
from monarch._procs.session import host_of
from monarch._wire.keys import KeyPair
from monarch._wire.messages import Listening
from monarch.exceptions import MonarchError, SpawnError


class WorkerHosts:
    """Host agents that this program has started as processes of its own, over tcp and CURVE.

    Args:
        count: how many.
        prefixes: for each, a command to start it under, such as one that enters a network namespace.
        addresses: for each, the address that it listens on.
        controller: the address that this program listens on, for them.
    """

    def __init__(
        self,
        count: int,
        addresses: Sequence[str] | None = None,
        prefixes: Sequence[Sequence[str]] | None = None,
        controller: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
    ) -> None:
        runtime = get_runtime()
        session = runtime.session
        if session is None:
            raise MonarchError("only the program itself attaches hosts, not one of its ranks")
        self.keys = runtime.keys or KeyPair.new()
        self.processes: list[subprocess.Popen[bytes]] = []
        for index in range(count):
            address = addresses[index] if addresses else "127.0.0.1"
            config = AgentConfig("", "", runtime.proc, 0, 0, PRELOAD, f"tcp://{address}", self.keys.public.decode())
            prefix = list(prefixes[index]) if prefixes else []
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "monarch._procs.agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env={**_agent_environment(), **(env or {})},
            )
            self.processes.append(process)
            _hand_over(process.stdin, msgspec.msgpack.encode(config))
        listening: list[Listening] = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                for other in self.processes:
                    other.kill()
                raise SpawnError(f"a host agent ended as it was started, with code {process.wait()}")
            listening.append(msgspec.json.decode(line, type=Listening))
        self.hosts = tuple(host_of(each.src) for each in listening)
        session.attach(listening, self.keys, controller)
        self.mesh = attached(self.hosts, runtime, self.release)

    def release(self) -> None:
        """Ends the agents."""
        session = get_runtime().session
        if session is not None:
            session.release(self.hosts)
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def hosts_from_config(name: str) -> HostMesh:
    """Hosts by the name of a configuration; without one, two hosts on this machine, along the axis ``hosts``."""
    return WorkerHosts(2).mesh


def attach_to_workers(
    *, ca: str, workers: Sequence[str], name: str | None = None, private_key: str | None = None
) -> HostMesh:
    """Attaches hosts whose agents run already, along the axis ``hosts``.

    Args:
        ca: file with the key pair that the workers know, as ``run_worker_loop_forever`` was given.
        workers: for each, ``tcp://address:port?public-key`` as it prints it when it starts.
        name: for people.
        private_key: not used; the key pair is in ``ca``.
    """
    raise MonarchError("attaching workers that were started elsewhere is not here yet; see monarch.testing.local_hosts")


def run_worker_loop_forever(*, address: str, ca: str, private_key: str | None = None) -> None:
    """Runs a host agent for programs that attach it."""
    raise MonarchError("workers that are started by hand are not here yet; see monarch.testing.local_hosts")
