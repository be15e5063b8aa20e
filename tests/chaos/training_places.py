"""Where the chaos training loop runs: on this host, on several, and on several with a network between them."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from chaos.training_actor import RANKS
from chaos.training_faults import Undo, cut_connection
from monarch._node.current import current_node
from monarch._session.workers import WorkerHosts
from monarch.actor import this_host

ALWAYS = [*["rank"] * 4, "rank twice", "rank stopped", "rank stopped", "zygote", "agent", "zygote stopped"]


class OneHost:
    """All ranks on the host of the program."""

    deck = [*ALWAYS, "agent stopped"]

    def __init__(self) -> None:
        self.own: dict[str, Callable[[random.Random], tuple[float, Undo] | None]] = {}

    def hosts(self, chance: random.Random) -> tuple[Any, dict[str, int]]:
        """Hosts for a new mesh, and the processes of each."""
        return this_host(), {"gpus": RANKS}

    def renew(self) -> None:
        """The previous ones are useless."""

    def close(self) -> None:
        """The program ends."""


class SeveralHosts(OneHost):
    """Two hosts, over tcp and CURVE. If one is lost, the other may have all ranks."""

    deck = [*ALWAYS, "agent stopped", "agent stopped long", "connection", "connection"]

    def __init__(self) -> None:
        self.own = {"connection": cut_connection}
        self._workers: WorkerHosts | None = None

    def make(self) -> WorkerHosts:
        return WorkerHosts(2)

    def hosts(self, chance: random.Random) -> tuple[Any, dict[str, int]]:
        if self._workers is not None:
            living = [rank for rank, host in enumerate(self._workers.hosts) if host in current_node().hosts.known]
            if len(living) == 2:
                return self._workers.mesh, {"gpus": RANKS // 2}
            if living and chance.random() < 0.4:
                return self._workers.mesh.slice(hosts=living[0]), {"gpus": RANKS}
        self.renew()
        self._workers = self.make()
        return self._workers.mesh, {"gpus": RANKS // 2}

    def renew(self) -> None:
        if self._workers is not None:
            self._workers.mesh.shutdown().get()
            self._workers = None

    def close(self) -> None:
        self.renew()


class Namespaces(SeveralHosts):
    """Two hosts, each in a network namespace of its own, with a link to a bridge in that of the program.

    The program must already be in a namespace of its own: ``unshare -Urn``.

    Args:
        silence: seconds without a heartbeat after which a host counts as lost; None for the default.
    """

    deck = [*ALWAYS, "connection", "link", "link", "link", "way", "way", "agent stopped"]

    def __init__(self, silence: float | None = None) -> None:
        super().__init__()
        self._silence = silence
        # UCX looks for devices in /sys, which shows those of the machine and not those of the namespace.
        os.environ["MONARCH_RDMA_TRANSPORTS"] = "local,attach,stream"
        self.own.update(link=self._cut_link, way=self._cut_way)
        self._stack = ExitStack()
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "br0", "type", "bridge")
        _run("ip", "address", "add", "10.77.0.1/24", "dev", "br0")
        _run("ip", "link", "set", "br0", "up")
        self._inside = [self._namespace(index) for index in range(2)]

    def make(self) -> WorkerHosts:
        addresses = ["10.77.0.2", "10.77.0.3"]
        return WorkerHosts(2, addresses, self._inside, controller="10.77.0.1", silence=self._silence)

    def close(self) -> None:
        super().close()
        self._stack.close()

    def _namespace(self, index: int) -> list[str]:
        # It ends with its standard input, so with this process.
        holder = self._stack.enter_context(subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE))
        while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.002)
        inside = ["nsenter", "-t", str(holder.pid), "-n"]
        _run("ip", "link", "add", f"v{index}", "type", "veth", "peer", "name", f"w{index}")
        _run("ip", "link", "set", f"v{index}", "master", "br0")
        _run("ip", "link", "set", f"v{index}", "up")
        _run("ip", "link", "set", f"w{index}", "netns", str(holder.pid))
        _run(*inside, "ip", "address", "add", f"10.77.0.{index + 2}/24", "dev", f"w{index}")
        _run(*inside, "ip", "link", "set", f"w{index}", "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        return inside

    def _cut_link(self, chance: random.Random) -> tuple[float, Undo]:
        """One host is cut off from all others."""
        link = f"v{chance.randrange(2)}"
        _run("ip", "link", "set", link, "down")
        return _duration(chance), lambda: _run("ip", "link", "set", link, "up")

    def _cut_way(self, chance: random.Random) -> tuple[float, Undo]:
        """The hosts are cut off from each other, and not from the program."""
        here = chance.randrange(2)
        other = [f"10.77.0.{3 - here}", "dev", f"w{here}"]
        # Packets go to a machine that does not exist, so they are lost silently.
        _run(*self._inside[here], "ip", "neigh", "replace", *other, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        return _duration(chance), lambda: _run(*self._inside[here], "ip", "neigh", "del", *other, check=False)


def _duration(chance: random.Random) -> float:
    """Seconds of a cut: some end before a host counts as lost, some do not."""
    lease = current_node().hosts.lease
    return lease + 1.5 if chance.random() < 0.3 else chance.random() * lease * 0.6


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)


PLACES = {"one": OneHost, "several": SeveralHosts, "namespaces": Namespaces}
