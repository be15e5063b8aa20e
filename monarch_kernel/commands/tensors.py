"""``%mesh``: the memory that distributed tensors hold, by the names of the notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch._kernel_api import html_table, tensors_held, text_table
from monarch_kernel.commands.who_lines import size_text

_MOST = 20
"""Rows of the table."""
_HEADERS = ["tensors of", "mesh", "count", "size", "most on a rank"]


def tensors_bundle(names: Mapping[str, Any]) -> dict[str, str] | None:
    """Return a table of tensors as a MIME bundle; None without tensors."""
    held = tensors_held(names)
    if not held:
        return None
    rows: list[list[object]] = [
        [each.name, each.mesh, each.tensors, size_text(each.size), size_text(each.most)] for each in held
    ]
    title = "distributed tensors"
    return {
        "text/plain": "\n".join([title, text_table(_HEADERS, rows, _MOST)]),
        "text/html": html_table(_HEADERS, rows, _MOST, title=title),
    }
