"""``%mesh?``, ``%%mesh?`` and ``%mesh VERB?``: help by IPython's question mark."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from monarch_kernel.magics.help import bundle_of, bundle_of_cells
from monarch_kernel.magics.verbs import PARSERS

_ASKED = re.compile(rf"(\s*%mesh[ \t]+(?:{'|'.join(PARSERS)})\b.*?)[ \t]*\?+(\s*)")


def separate(lines: list[str]) -> list[str]:
    """Put a space before the question mark of ``%mesh VERB?``, which IPython would take for that of a variable."""
    if lines and lines[0].startswith("%%"):
        return lines
    return [_ASKED.sub(r"\1 ?\2", line) if _ASKED.fullmatch(line) else line for line in lines]


def explain(line: Callable[..., Any], cell: Callable[..., Any]) -> None:
    """Let IPython show the verbs for the line magic, and the options for the cell magic."""
    line.__doc__ = f"{line.__doc__}\n\n{bundle_of(None)['text/plain']}"
    cell.__doc__ = f"{cell.__doc__}\n\n{bundle_of_cells()['text/plain']}"
