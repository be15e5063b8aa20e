"""The host agent of a launcher, in the process that the launcher started on that host."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from signal import SIGKILL
from typing import Any

import msgspec

from monarch._procs.agent.main import serve
from monarch._procs.agent.request import AgentConfig
from monarch._procs.os.posix import set_pdeathsig
from monarch._procs.rank.ending import GRACE
from monarch._procs.zygote.own_folders import OWN_FOLDERS
from monarch._wire.messages import Listening


def serve_launched(order: Mapping[str, Any], address: str, say: Callable[..., None]) -> None:
    """Run the agent of an order until the controller or the launcher's connection ends.

    Args:
        order: its ``agent`` is the configuration, ``port`` the port to listen on, or 0, ``grace`` and ``notice`` as
            in ``payload.LaunchOrder``.
        address: the address of this host.
        say: reports to the launcher.
    """
    config = msgspec.convert(order["agent"], AgentConfig)
    config.listen = f"tcp://{address}:{order['port']}" if order["port"] else f"tcp://{address}"
    # Standard input is the connection to the launcher, which sends nothing more.
    config.lifeline = 0
    config.grace = order["grace"]
    # SIGTERM of a scheduler goes to all processes of a host; ranks leave it to the agent.
    os.environ[GRACE] = str(config.grace)
    os.environ[OWN_FOLDERS] = "first" if order.get("installed") else "last"
    if order["notice"]:
        null = subprocess.DEVNULL
        command = ["/bin/sh", "-c", order["notice"]]
        # The command ends with this process.
        die = partial(set_pdeathsig, SIGKILL)
        notice = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, preexec_fn=die)
        config.notice_pid = notice.pid

    def announce(outcome: Listening | str) -> None:
        if isinstance(outcome, str):
            say("failed", reason=f"{outcome} (at {config.listen})")
            return
        say("listening", listening=msgspec.to_builtins(outcome))
        # Nothing that a rank leaves behind may hold the connection open.
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 1)
        os.close(null)

    serve(config, announce=announce)
