"""A host agent forked by the fork server: it becomes what it would be if the requesting process had started it."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import suppress

import msgspec

from monarch._procs.agent.request import AgentConfig, LaunchAgent
from monarch._procs.agent.zygotes import Zygote
from monarch._procs.os import posix
from monarch._procs.os.orphans import unmark
from monarch._procs.session_folder import make_folder
from monarch._procs.zygote.environment import environment

ENTRY = "monarch._procs.agent.launched:main"


def main(config: bytes) -> int:
    """Entry point of the process."""
    wanted = msgspec.msgpack.decode(config, type=LaunchAgent)
    # The agent outlives the fork server.
    posix.set_pdeathsig(0)
    try:
        # The requesting process withdraws the ticket after too long a wait, and starts an agent itself.
        os.rename(wanted.ticket, f"{wanted.claim}{os.getpid()}-{posix.proc_start_time(os.getpid())}")
    except OSError:
        return 0
    _become(wanted)
    known = msgspec.msgpack.decode(wanted.config, type=AgentConfig)
    environ, restore = environment({})
    # Do this before there are threads or a ZeroMQ context.
    zygote = Zygote.forked(
        preload=known.preload,
        session_dir=known.folder or make_folder(),
        # The controller does not know a folder that the agent has made itself.
        controller=(known.owner_pid, known.owner_start) if known.folder else (0, 0),
        later=[name for name in known.later if name not in sys.modules],
        environ=environ,
        restore=restore,
    )
    # None from the agent of a detached mesh, which continues in a child.
    return importlib.import_module(wanted.module).serve_fork(bytes(wanted.config), zygote) or 0


def _become(wanted: LaunchAgent) -> None:
    unmark()
    for number, soft in wanted.limits:
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(number)[1]
            resource.setrlimit(number, (soft, hard))
    if wanted.stays:
        # The request may come from a program that a rank has started.
        unmark()
        os.chdir("/")
    for number in wanted.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.umask(wanted.umask)
    os.environ.clear()
    os.environ.update(wanted.env)
    time.tzset()
    tempfile.tempdir = None
