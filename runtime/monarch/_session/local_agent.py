"""The agent of the program's own host: its start, and what remains to do after its death."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from monarch._core.causes import AgentEnded
from monarch._node.node import Node
from monarch._procs.agent.children import cause_of
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.local import HostAgent
from monarch._procs.os.orphans import end_orphans
from monarch._procs.os.posix import memfd, proc_start_time
from monarch._procs.rank.output import read_tail
from monarch._procs.session_folder import remove_socket, restore_folder
from monarch._python.threads import spawn_thread
from monarch._wire import messages as m

_SWEEPS = (0.0, 0.05, 0.2, 1.0)
"""Seconds between searches for processes left by the ranks of a killed agent."""
PRELOAD = [
    "torch",
    "numpy",
    "multiprocessing.resource_tracker",
    "monarch.actor",
    "monarch._session.rank.rank_process",
    "monarch._state.checkpoint.api",
    "monarch._state.heal",
    "monarch._telemetry.collector",
    "monarch._telemetry.reporter",
    "monarch.distributed",
    "monarch._tensors.collectives.waiting",
    "monarch._tensors.collectives.world",
    "monarch._tensors.own_gpu",
    # Of the first process group: imported once here, not for some ms in each rank.
    "encodings.idna",
    "monarch._tensors.collectives.recorded",
    "monarch._tensors.collectives.timeouts",
]
"""Modules that the zygote imports before it forks."""
LATER = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "monarch._state.rdma.plane",
]
"""Additional modules of its successor: the first optimizer of a process imports torch._dynamo, about a second, and a
rank that replaces another one needs that of transfers at once."""


class LocalAgent:
    """The agent of this host, which is started when it is needed. Any thread may use it.

    Args:
        node: the node of this program.
        folder: the folder of the session.
        lost: called when the agent has died, before another one can be started; in the receiving thread.
    """

    def __init__(self, node: Node, folder: str, lost: Callable[[], None]) -> None:
        self._node = node
        self._folder = folder
        self._tell_lost = lost
        self._lock = threading.RLock()
        # These: written under _lock; single reads need none.
        self._agent: HostAgent | None = None
        self._former: HostAgent | None = None
        """The previous agent, which has died."""
        self._dismissed: HostAgent | None = None
        self._env: dict[str, str] = {}
        """The environment of this program when the agent was started."""

    @property
    def runs(self) -> bool:
        """Whether it was started, and has not died."""
        return self._agent is not None

    @property
    def pid(self) -> int:
        """Its pid; 0 if none runs."""
        agent = self._agent
        return agent.pid if agent is not None else 0

    def start(self) -> bool:
        """Start the agent and return True, or return False if it runs."""
        with self._lock:
            if self._agent is not None:
                return False
            node = self._node
            # A new agent has the name of a dead one, so forget the dead one's state; ranks have new names.
            start = proc_start_time(os.getpid()) or 0
            config = AgentConfig(node.host, self._folder, node.proc, os.getpid(), start, PRELOAD, later=LATER)
            node.peers.known.pop(node.agent, None)
            node.peers.get(node.agent, starting=True)
            # An agent ended by a signal has removed it.
            restore_folder(self._folder)
            errors = memfd("agent-stderr")
            self._env = dict(os.environ)
            self._agent = agent = HostAgent(config, errors)
            if self._former is not None:
                self._former.release()
                self._former = None
            spawn_thread("monarch-agent-watch", self._watch, agent, errors)
            return True

    def _watch(self, agent: HostAgent, errors: int) -> None:
        agent.wait()
        tail = read_tail(errors, 4096).data.decode(errors="replace").strip()
        os.close(errors)
        node = self._node
        if node.closed or self._agent is not agent:
            return
        self._remove_sockets()
        how = cause_of(agent.status) if agent.status is not None else None
        cause = AgentEnded(how, tail.splitlines()[-1] if tail else "")

        def lost() -> None:
            # Starting another agent of the same name waits for this.
            with self._lock:
                node.peers.lose_host(node.host, cause)
                self._agent, self._former = None, agent
                self._tell_lost()

        node.receive_loop.post(lost)
        # The zygote does this too, unless it was killed as well. Ranks end a moment after their agent.
        for pause in _SWEEPS:
            time.sleep(pause)
            end_orphans()

    def _remove_sockets(self) -> None:
        """Remove the sockets of ranks that died with their agent."""
        own = self._node.proc.partition("/")[2]
        # An agent that was told to end has also removed the folder.
        with suppress(OSError):
            for name in os.listdir(self._folder):
                if not name.startswith(own):
                    remove_socket(self._folder, f"{self._node.host}/{name}")

    def changed_env(self) -> dict[str, str | None]:
        """Return changes of this program's environment since the agent was started; None for a removed variable."""
        now, then = os.environ, self._env
        changed: dict[str, str | None] = {key: now[key] for key in now if then.get(key) != now[key]}
        changed.update({key: None for key in then if key not in now})
        return changed

    def dismiss(self) -> None:
        """Tell the agent to end, with all ranks; ``close`` waits for it."""
        self._dismissed, self._agent = self._agent, None
        if self._dismissed is not None:
            self._node.peers.to_agent(self._node.host, m.Bye(self._node.proc))

    def close(self, timeout: float) -> None:
        """Wait for the end of a dismissed agent, and kill it after some seconds."""
        if self._dismissed is not None:
            self._dismissed.close(timeout)
        if self._former is not None:
            self._former.release()
