"""The process of a host agent.

It runs as ``python -m monarch._procs.agent.main``. Its configuration comes on standard input, because keys must not
appear in a process list.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from monarch._procs.agent.agent import Agent
from monarch._procs.agent.leased import LeasedAgent
from monarch._procs.agent.request import AgentConfig
from monarch._procs.agent.routes.router import Frames
from monarch._procs.agent.zygotes import Zygote
from monarch._procs.os.posix import set_child_subreaper, set_comm
from monarch._wire import messages as m
from monarch._wire.descriptors import raise_limit

UNABLE = "cannot listen: "
"""Printed in place of its address, before the reason."""
DISMISSED = 10
"""The exit code of a worker's agent after the goodbye of its controller."""

A = TypeVar("A", bound=Agent)


def run_agent(make: Callable[[], A], begin: Callable[[A], None]) -> A:
    """Run an agent in this process, until its end; return it.

    Args:
        make: makes the agent.
        begin: called with it once, before it runs.
    """
    raise_limit()
    set_child_subreaper()
    set_comm("monarch-agent")
    agent = make()
    try:
        agent.take_signals()
        begin(agent)
        agent.run()
    finally:
        agent.close()
    return agent


def main() -> None:
    """Entry point of the agent's process."""
    sys.exit(serve(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=AgentConfig)))


def serve_fork(config: bytes, zygote: Zygote) -> int:
    """Run an agent in this fork of the fork server, with the zygote that it has forked; return its exit code."""
    return serve(msgspec.msgpack.decode(config, type=AgentConfig), zygote)


def _print(outcome: m.Listening | str) -> None:
    """Write where an agent listens, or why it cannot, to standard output."""
    line = outcome.encode() if isinstance(outcome, str) else msgspec.json.encode(outcome)
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.flush()


def serve(
    config: AgentConfig, zygote: Zygote | None = None, announce: Callable[[m.Listening | str], None] = _print
) -> int:
    """Run until the controller ends or says so; return the exit code.

    Args:
        config: its configuration.
        zygote: an existing one.
        announce: called once with where an agent for another host listens, or with why it cannot.
    """

    def begin(agent: Agent) -> None:
        hello: Frames = [m.encode(m.Ready(agent.proc, os.getpid()))]
        if config.listen:
            try:
                listening = agent.listen(config.listen, config.owner_public.encode(), [])
            except zmq.ZMQError as error:
                announce(f"{UNABLE}{zmq.strerror(error.errno or 0)}")
                agent.closing = True
                return
            announce(listening)
        if config.owner_pid and agent.router.is_here(config.owner):
            agent.router.send(config.owner, hello)

    kind = LeasedAgent if config.seconds else Agent
    agent = run_agent(lambda: kind(config, zygote), begin)
    return DISMISSED if agent.dismissed and not config.owner else 0


if __name__ == "__main__":
    main()
