"""Write lines of ranks to the streams of the program."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from monarch._core.text.folding.blocks import Block, OutputLine


def in_units(count: int) -> str:
    """Return a byte count with a unit, in brackets; empty for small counts."""
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f" ({count / size:.1f} {unit})"
    return ""


def show(line: OutputLine) -> None:
    """Write a line to stdout or stderr of this process."""
    show_blocks([Block(line.source, line.ranks, line.stream, line.text + "\n")])


def show_blocks(blocks: Sequence[Block]) -> None:
    """Write lines to stdout or stderr of this process."""
    for block in blocks:
        file = sys.stderr if block.stream == "stderr" else sys.stdout
        if file is not None:
            try:
                file.write(block.prefixed())
                file.flush()
            except (OSError, ValueError):
                # The program has closed the stream.
                pass
