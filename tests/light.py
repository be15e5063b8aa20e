"""The start of programs whose ranks need no torch: on hosts that share no fork server, each zygote would import it."""

from __future__ import annotations

LIGHT = """
import monarch._session.local_agent as _client
for _name in ("torch", "monarch._tensors.collectives.waiting", "monarch._tensors.collectives.world"):
    _client.PRELOAD.remove(_name)
_client.LATER.clear()
"""
