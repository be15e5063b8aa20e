"""Warnings of torch's C++ code on stderr: those about connections come with some thirty lines of frames.

A warning about a connection that this package has cut itself only repeats what its error says, so it is not shown. The
rank knows which ones it has cut: it marks the line, without a change of its length, and the program leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_SOME = 3
"""Frames from which they are left out."""
_BEGIN = r"(?:Exception raised from .* \(most recent call first\):\n)?"
_FRAME = r"(?:(?:frame #\d+: .* \(0x[0-9a-f]+ in .*\)|<omitting python frames>)\n)"
_FRAMES = re.compile(rf"^{_BEGIN}{_FRAME}{{{_SOME},}}\n?", re.MULTILINE)
_WARNING = r"^(?:\[rank\d+\]:)?\[W\d+ [\d:.]+ TCPStore\.cpp:\d+\] \[c10d\] \w+ failed on SocketImpl\("
_OF_STORE = re.compile(rf"({_WARNING})fd=(\d+)(?=, )".encode(), re.MULTILINE)
_OF_CUT = re.compile(rf"{_WARNING}cut\d+, .*\n{_BEGIN}{_FRAME}*\n?", re.MULTILINE)


def mark_cut(data: bytes, was_cut: Callable[[int], bool]) -> bytes:
    """Mark torch's warnings about connections of a store that this process has cut.

    Args:
        data: output to stderr.
        was_cut: returns whether this process has cut the connection with a descriptor.

    Returns:
        As many bytes.
    """
    if b" failed on SocketImpl(fd=" not in data:
        return data
    return _OF_STORE.sub(lambda match: match[1] + b"cut" + match[2] if was_cut(int(match[2])) else match[0], data)


def without_cpp_frames(text: str) -> str:
    """Return output without marked warnings; of others, the C++ frames are replaced by a line with their number."""
    if " failed on SocketImpl(cut" in text:
        text = _OF_CUT.sub("", text)
    if "frame #" not in text:
        return text
    return _FRAMES.sub(_replaced, text)


def _replaced(match: re.Match[str]) -> str:
    count = match[0].count("frame #")
    return f"  ({count} C++ frames omitted; TORCH_SHOW_CPP_STACKTRACES=1 shows them)\n"
