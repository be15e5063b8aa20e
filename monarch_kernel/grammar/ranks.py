"""Ranks as commands and headers write them."""

from __future__ import annotations

from collections.abc import Sequence

from monarch._kernel_api import parse_ranks
from monarch.exceptions import MonarchError
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.header import parse_where, ranks_of


def ranks_in_words(command: str, text: str, total: int) -> list[int]:
    """Parse ranks as messages write them, such as ``0-3,7``, or as headers do, such as ``[0:4]``.

    Args:
        command: that they follow, for errors.
        text: as typed.
        total: number of ranks of the mesh.

    Raises:
        Usage: they are wrong.
    """
    text = text.strip()
    try:
        if text.startswith("[") or ":" in text:
            _, chosen = parse_where(text.strip("[]"))
            if chosen is None:
                raise Usage(f"%mesh {command}: expected ranks such as 0,2 or [0:2], got {text!r}")
            return sorted(ranks_of(chosen, total))
        return parse_ranks(text.replace(" ", ","), total)
    except MonarchError as error:
        raise Usage(f"%mesh {command}: {error}") from None


def slice_text(ranks: Sequence[int]) -> str:
    """Return ranks as the brackets of a header have them, such as ``0:2,3``."""
    parts: list[str] = []
    for rank in sorted(ranks):
        first, _, end = parts[-1].partition(":") if parts else ("", "", "")
        if parts and rank == int(end or int(first) + 1):
            parts[-1] = f"{first}:{rank + 1}"
        else:
            parts.append(str(rank))
    return ",".join(parts)
