"""A host agent forked by the fork server: it becomes what it would be if its controller had started it."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from contextlib import suppress

import msgspec

from monarch._procs.agent.main import serve
from monarch._procs.agent.request import Launch
from monarch._procs.agent.zygotes import Zygote
from monarch._procs.os import posix
from monarch._procs.os.orphans import unmark
from monarch._procs.zygote.environment import environment

ENTRY = "monarch._procs.agent.launched:main"


def main(config: bytes) -> int:
    """Entry point of the process."""
    wanted = msgspec.msgpack.decode(config, type=Launch)
    # The agent outlives the fork server.
    posix.set_pdeathsig(0)
    folder = wanted.config.folder
    try:
        # The controller withdraws the ticket after too long a wait, and starts an agent itself.
        os.rename(wanted.ticket, f"{folder}/pid-{os.getpid()}-{posix.proc_start_time(os.getpid())}")
    except OSError:
        return 0
    _become(wanted)
    known = wanted.config
    # Do this before there are threads or a ZeroMQ context.
    zygote = Zygote.forked(
        preload=known.preload,
        session_dir=folder,
        controller=(known.owner_pid, known.owner_start),
        later=[name for name in known.later if name not in sys.modules],
        environ=environment({})[0],
    )
    serve(known, zygote)
    return 0


def _become(wanted: Launch) -> None:
    unmark()
    for number, soft in wanted.limits:
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(number)[1]
            resource.setrlimit(number, (soft, hard))
    os.umask(wanted.umask)
    os.environ.clear()
    os.environ.update(wanted.env)
    time.tzset()
    tempfile.tempdir = None
