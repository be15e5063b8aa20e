"""C++ frames in what torch writes to stderr: its warnings about connections come with some thirty lines of them."""

from __future__ import annotations

import re

_SOME = 3
"""Frames from which they are left out."""
_FRAMES = re.compile(
    r"^(?:Exception raised from .* \(most recent call first\):\n)?"
    rf"(?:(?:frame #\d+: .*|<omitting python frames>)\n){{{_SOME},}}\n?",
    re.MULTILINE,
)


def without_cpp_frames(text: str) -> str:
    """Return output with the C++ frames of torch's warnings replaced by a line with their number."""
    if "frame #" not in text:
        return text
    return _FRAMES.sub(_replaced, text)


def _replaced(match: re.Match[str]) -> str:
    count = match[0].count("frame #")
    return f"  ({count} C++ frames omitted; TORCH_SHOW_CPP_STACKTRACES=1 shows them)\n"
