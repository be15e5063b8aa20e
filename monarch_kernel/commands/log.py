"""``%mesh log``: the output of ranks, kept after its cells."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from monarch._kernel_api import describe_ranks, parse_ranks, state_of
from monarch.exceptions import MonarchError
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.output.log import ending
from monarch_kernel.output.streams import Streams

_SHOWN = 256 << 10
"""Characters of the log that are shown if no --tail asks for more."""
_MOST = 16 << 20
"""Characters of the log that are shown at most."""


def _nothing(ranks: Collection[int], cell: int | None, mesh: str) -> str:
    """Return why a log is empty."""
    of = f" of mesh {mesh!r}" if mesh else ""
    whose = f"{describe_ranks(ranks) if ranks else 'ranks'}{of} {'has' if len(ranks) == 1 else 'have'}"
    return f"{whose} printed nothing{'' if cell is None else f' in cell [{cell}]'}\n"


class Log:
    """The command that shows the output of ranks.

    Args:
        meshes: the meshes of the notebook.
        streams: returns the streams that show the output of ranks.
    """

    def __init__(self, meshes: NotebookMeshes, streams: Callable[[], Streams]) -> None:
        self._meshes = meshes
        self._streams = streams

    def log(self, words: list[str]) -> None:
        """Show the output of the ranks, or its end if it is very long."""
        options = parse("log", words)
        if options.tail is not None and options.tail < 1:
            raise Usage(f"%mesh log: --tail: expected at least 1, got {options.tail}")
        try:
            ranks = frozenset(parse_ranks(options.rank))
        except MonarchError as error:
            raise Usage(f"%mesh log: --rank: {error}") from None
        mesh = self._meshes.get(options.name) if options.name else None
        log = self._streams().log
        lines: Iterator[str] = log.lines(ranks, options.cell, state_of(mesh.procs).procs.uid if mesh else "")
        if options.tail is not None:
            lines = iter(deque(lines, options.tail))
        if options.save:
            with open(options.save, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.writelines(lines)
            return
        first = next(lines, None)
        if first is None:
            most = max((len(each.cells) for each in ([mesh] if mesh else self._meshes.in_order())), default=0)
            absent = [rank for rank in sorted(ranks) if rank >= most]
            if most and absent:
                whose = f"mesh {mesh.name!r} has no" if mesh else "no mesh has"
                raise Usage(f"%mesh log: --rank: {whose} {describe_ranks(absent)}; the last rank is {most - 1}")
            sys.stdout.write(_nothing(ranks, options.cell, options.name or ""))
            return
        lines = chain([first], lines)
        for piece in ending(lines, _SHOWN if options.tail is None else _MOST):
            sys.stdout.write(piece)
