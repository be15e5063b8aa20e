"""Where the last call of a rank has failed: the frames that its error has left."""

from __future__ import annotations

from monarch._actors.pausing.failed import failed
from monarch._core.places import is_ours, is_users
from monarch._core.position import FAILED, Position
from monarch._debug.frames import described


def failed_position() -> Position | None:
    """Return where the last call has failed; None if it has not, or its frames are gone."""
    frames = failed.frames()
    users = [at for at, (frame, _) in enumerate(frames) if is_users(frame)]
    if not users:
        return None
    shown = [described(frame, line) for frame, line in frames[users[0] : users[-1] + 1] if not is_ours(frame)]
    return Position(FAILED, shown, failed.text())
