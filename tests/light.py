"""Hosts whose ranks need no torch: where hosts share no fork server, each zygote would import it, in 2 s of CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

TORCH = (
    "torch",
    "monarch._tensors.collectives.waiting",
    "monarch._tensors.collectives.world",
    "monarch._tensors.own_gpu",
    "monarch._tensors.collectives.recorded",
    "monarch._tensors.collectives.timeouts",
)
LIGHT = f"""
import monarch._session.local_agent as _client
for _name in {TORCH}:
    _client.PRELOAD.remove(_name)
_client.LATER.clear()
"""
"""The start of a program."""
BRIEF = """
import monarch._session.local_agent as _client
_client.LATER.clear()
"""
"""The start of a program whose zygotes import torch, but none of what a successor imports when they are idle."""


def leave_out_torch() -> None:
    """Have the zygotes of this process import no torch, which has started none yet."""
    from monarch._session import local_agent

    for name in TORCH:
        local_agent.PRELOAD.remove(name)
    local_agent.LATER.clear()


def light_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the zygotes of hosts that this process gets from launchers import no torch."""
    from monarch._session.launching import launching

    monkeypatch.setattr(launching, "PRELOAD", [name for name in launching.PRELOAD if name not in TORCH])
    monkeypatch.setattr(launching, "LATER", [])


IDLE = "from monarch._session.launching import launching\nlaunching.LATER = []"
"""A cell after which the zygotes of hosts import nothing more when they are idle, for which no test waits."""
