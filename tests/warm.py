"""A fork server for the whole run, so that torch is imported once for the programs and kernels of the tests."""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from pathlib import Path

from leaks import pids_named, wait_until

SERVER = "monarch-server"
_IMAGE = "monarch-image"
OWN = ("pytest", "hypothesis", "leaks")
"""What the test modules import, and with it each rank that gets a class of theirs."""
_IMPORT = 120.0
"""Seconds after which something is taken to hang: torch is imported."""


def usual_preload() -> list[str]:
    """Return what the zygote of a program imports that asks for nothing else."""
    from monarch._session.local_agent import PRELOAD

    return [name for name in PRELOAD if name not in OWN]


def own_preload() -> list[str]:
    """Return what the zygotes of this process import: what the test modules do, too, which each rank would import."""
    from monarch._session.local_agent import PRELOAD

    PRELOAD.extend(name for name in OWN if name not in PRELOAD)
    return PRELOAD


def _await_successor(image: int) -> None:
    """Wait until the process that is forked for sessions has done the imports that it does when idle.

    A session from before repeats them, and its ranks do what they need of them themselves. Who runs a single test
    does not wait for that.
    """
    with suppress(ProcessLookupError), open(os.pidfd_open(image)) as ended:
        select.select([ended], [], [], _IMPORT)


def hold_server(preload: list[str]) -> socket.socket:
    """Return a connection to the fork server of sessions with these imports; it ends when that is closed.

    To the server it is a session that asks for no agent.
    """
    from monarch._procs.agent.main import AgentConfig
    from monarch._procs.launch.fork_client import _connect, _start_server
    from monarch._procs.session_folder import base_folder
    from monarch._procs.zygote.fork_server import READY
    from monarch._procs.zygote.identity import session_key
    from monarch._session.local_agent import LATER

    base = str(base_folder())
    key = session_key(preload, LATER)
    found, starter = _connect(base, key), None
    images = pids_named(_IMAGE)
    if found is None:
        found, starter = _start_server(base, key, AgentConfig("", "", "", os.getpid(), 0, preload, later=LATER))
    connection, folder = found
    if not wait_until(Path(folder, READY).exists, _IMPORT):
        connection.close()
        raise TimeoutError("the fork server of the tests is not ready")
    if starter is not None:
        # It has ended when its child, the server, became a process of nobody.
        starter.wait()
        if "PYTEST_XDIST_WORKER" in os.environ:
            for image in pids_named(_IMAGE, before=images):
                _await_successor(image)
    return connection
