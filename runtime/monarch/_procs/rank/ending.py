"""SIGTERM at a rank of a launcher's host: a scheduler sends it to all processes when it takes the host back."""

from __future__ import annotations

import os
import signal

GRACE = "MONARCH_GRACE_S"
"""The environment variable of ranks whose agent tells the program of SIGTERM."""


def leave_term_to_agent() -> None:
    """Ignore SIGTERM in this process if its agent handles it; processes that it forks end as usual."""
    if not os.environ.get(GRACE):
        return
    pid = os.getpid()

    def on_term(*_: object) -> None:
        if os.getpid() != pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_term)
