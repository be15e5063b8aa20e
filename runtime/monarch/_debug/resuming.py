"""The service that resumes a rank; apart from the others, so that it does not queue behind one that waits."""

from __future__ import annotations

from monarch._actors.pausing.gate import gate
from monarch._node.services.registry import service


@service("resuming.resume_here", "quick")
def resume_here() -> bool:
    """Service: resume the main thread, and end its step; return whether it was paused, or about to be."""
    asked, stepped = gate.resume(), gate.cancel_step()
    return asked or stepped
