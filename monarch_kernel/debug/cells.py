"""The code of cells, for breakpoints in them."""

from __future__ import annotations

import linecache
from typing import Any

from monarch_kernel.compat import cell_file
from monarch_kernel.grammar.typed_lines import header_at


def source_of(shell: Any, number: int) -> tuple[str, str]:
    """Return the file name and the source of a cell by its number; both empty for an unknown number.

    Code that runs on ranks has the name ``cell [3]``, and classes of actors have that of the notebook's own code.
    """
    typed: list[str] = shell.history_manager.input_hist_raw
    text = typed[number] if 0 < number < len(typed) else ""
    lines = text.splitlines(keepends=True)
    above = header_at(lines)
    file = cell_file(shell, number)
    if file and (above is None or lines[above].split()[1:2] == ["spawn"]):
        return file, "".join(linecache.getlines(file))
    # Comments and the header are lines of the cell, as in the gutter.
    return (f"cell [{number}]", "\n" * (above + 1) + "".join(lines[above + 1 :])) if above is not None else ("", "")
