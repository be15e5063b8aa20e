"""A Stop of the notebook: ops on tensors end by themselves, a function of the user among them is interrupted."""

from __future__ import annotations

import time

from monarch._actors.interrupting import interrupt
from monarch._engine.rank.functions.shield import functions
from monarch._groups.breaking import generation_now
from monarch._node.services.registry import service
from monarch._supervision.freeing import free, running, thread_of

_PATIENCE = 0.3
"""Seconds for a function to take its interrupt; then the collective that it may wait in is aborted."""
_STEP = 0.005


@service("stopping.stop_function", "threaded")
def stop_function(key: str, src: str, port: int, reason: str) -> bool:
    """Interrupt the function of the user that a batch of ops runs.

    Args:
        key: the key of the executors.
        src: the calling proc.
        port: the port at which the caller waits for the batch.
        reason: for the error of a collective.

    Returns:
        Whether the batch was in such a function.
    """
    found = running(key, src, port)
    ident = thread_of(found[0]) if found is not None else 0
    number = functions.get(ident)
    if number is None:
        return False
    interrupt(key, src, port)
    until = time.monotonic() + _PATIENCE
    while functions.get(ident) == number:
        if time.monotonic() > until:
            free(key, src, port, reason, generation_now())
            break
        time.sleep(_STEP)
    return True
