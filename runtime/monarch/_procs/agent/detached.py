"""The agent of a detached mesh on this machine: a host agent that outlives its controller, until its lease ends.

It is a fork of the fork server, or runs as ``python -m monarch._procs.agent.detached``. Nobody waits for its end, and
its record tells other programs of it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import msgspec

from monarch._procs.agent.detached_records import Record, RecordedHost, publish, write
from monarch._procs.agent.leased import LeasedAgent
from monarch._procs.agent.main import run_agent
from monarch._procs.agent.request import AgentConfig
from monarch._procs.agent.zygotes import Zygote
from monarch._procs.os.orphans import unmark
from monarch._wire import messages as m
from monarch.exceptions import DetachedMeshInUseError, MonarchError

_CLAIM = 10.0
"""Seconds in which the program that started it must connect."""


class DetachedAgent(LeasedAgent):
    """An agent with a record."""

    def __init__(self, config: AgentConfig, zygote: Zygote | None = None) -> None:
        super().__init__(config, zygote)
        assert config.keys is not None
        self.record = Record(
            config.name,
            [],
            *config.keys,
            os.getpid(),
            int(self.folder.rpartition("-")[2]),
            time.time(),
            config.seconds,
        )

    def begin(self) -> m.Listening:
        """Listen, and write the record; a MonarchError or OSError says why it cannot."""
        listening = self.listen(self.config.listen, self.config.owner_public.encode(), [])
        self.record.hosts = [RecordedHost(self.host, "", listening.owner_address)]
        publish(self.folder, self.record)
        # Not before: that may have waited.
        self._lease(min(self.record.seconds, _CLAIM))
        self._write()
        return listening

    def _lease(self, seconds: float) -> None:
        super()._lease(seconds)
        self.record.user, self.record.until = 0, time.time() + seconds

    def _owner_died(self) -> None:
        owner = self.owner
        super()._owner_died()
        if owner:
            self._write()

    def _claim(self, ask: m.Ask, what: tuple[int, list[str]]) -> dict[str, Any]:
        known = super()._claim(ask, what)
        self.record.user, self.record.until = self.user, 0.0
        self._write()
        return known

    def _write(self) -> None:
        try:
            write(self.folder, self.record)
        except OSError as error:
            # If there is no room, the old record still has the key.
            print(
                f"cannot update the record of detached mesh {self.record.name!r}: {error}", file=sys.stderr, flush=True
            )


def main() -> None:
    """Entry point of the agent's process: it continues in an orphaned child, so that nobody has to reap it."""
    config = sys.stdin.buffer.read()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    serve_fork(config)


def serve_fork(config: bytes, zygote: Zygote | None = None) -> None:
    """Run the agent in this process, with the zygote that it has forked; None to start one."""
    # A program that a rank has started may detach a mesh, too.
    unmark()
    known = msgspec.msgpack.decode(config, type=AgentConfig)
    run_agent(lambda: DetachedAgent(known, zygote), _greet)


def _greet(agent: Any) -> None:
    try:
        listening = agent.begin()
    except (MonarchError, OSError) as error:
        refusal = (isinstance(error, DetachedMeshInUseError), str(error))
        sys.stdout.buffer.write(msgspec.json.encode(refusal) + b"\n")
        sys.stdout.flush()
        agent.closing = True
        return
    sys.stdout.buffer.write(msgspec.json.encode(listening) + b"\n")
    sys.stdout.flush()
    # The reader of this ends some day; nothing here may fail for it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nowhere, fd)
    os.close(nowhere)


if __name__ == "__main__":
    main()
