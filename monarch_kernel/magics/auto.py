"""Automatic mode, ``%mesh auto on``: plain cells run on ranks, as if they began with ``%%mesh``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch_kernel.magics.verbs import Usage, parse

HERE = "%%here"
"""First line of a cell that runs in the notebook, in either mode."""
_LOCAL = ("%%", "%mesh", "%load_ext", "%reload_ext", "%unload_ext")
"""Beginnings of cells that run in the notebook."""
_BADGE = "font-size:85%;color:#fff;background:#5b6ea8;border-radius:3px;padding:0 5px"


class Auto:
    """Sends plain cells to ranks while it is on.

    Args:
        shell: of the notebook; cells pass through its ``transform_cell``.
        find: returns which ranks a header names, in words.

    Raises:
        HeaderError: by ``find``, if the mesh does not exist.
    """

    def __init__(self, shell: Any, find: Callable[[str], str]) -> None:
        self._shell = shell
        self._find = find
        self._before = shell.transform_cell
        # All of these: the thread that runs cells.
        self._header: str | None = None
        """The first line that plain cells get; None while it is off."""
        self._marks = False
        """Whether the next ``%%mesh`` cell was a plain one."""
        shell.transform_cell = self._transform

    def close(self) -> None:
        """Let cells pass as before."""
        self._shell.transform_cell = self._before

    def verb(self, words: list[str]) -> None:
        """Switch the mode, or say which it is."""
        arguments = parse("auto", words)
        if arguments.mode not in (None, "on", "off"):
            raise Usage(f"%mesh auto: expected on or off, got {arguments.mode!r}; see %mesh help auto")
        if arguments.mode != "on" and arguments.place:
            raise Usage("%mesh auto: a mesh belongs to `on`, as in %mesh auto on trainers[0:2]")
        if arguments.mode == "on":
            header = " ".join(arguments.place)
            where = self._find(header)
            self._header = header
            print(
                f"plain cells run on {where} now; a cell that begins with {HERE} runs in the notebook, and "
                f"%mesh auto off ends this"
            )
        elif arguments.mode == "off":
            self._header = None
            print("plain cells run in the notebook")
        elif self._header is None:
            print("plain cells run in the notebook; %mesh auto on sends them to the ranks")
        else:
            print(f"plain cells run on {self._find(self._header)}; %mesh auto off ends this")

    def mark(self) -> None:
        """Show that a plain cell runs on ranks; nothing for other cells."""
        if self._marks:
            self._marks = False
            where = self._find(self._header or "")
            html = f"<span style='{_BADGE}'>auto: {where}</span>"
            self._shell.display_pub.publish({"text/plain": f"auto: {where}", "text/html": html})

    def _transform(self, raw_cell: str) -> str:
        """Return the code of a cell, as IPython's ``transform_cell`` does."""
        self._marks = False
        first, _, rest = raw_cell.lstrip().partition("\n")
        if first.strip() == HERE:
            return self._before(rest)
        if self._header is not None and _is_for_ranks(raw_cell) and not self._is_silent():
            self._marks = True
            return self._before(f"%%mesh {self._header}\n{raw_cell}")
        return self._before(raw_cell)

    def _is_silent(self) -> bool:
        """Return whether the front end runs code of its own, such as that of a list of variables."""
        kernel: Any = getattr(self._shell, "kernel", None)
        parent: Any = kernel.get_parent("shell") if kernel is not None else None
        return bool(parent and parent.get("content", {}).get("silent"))


def _is_for_ranks(cell: str) -> bool:
    lines = [line.strip() for line in cell.splitlines()]
    code = [line for line in lines if line and not line.startswith("#")]
    return bool(code) and not code[0].startswith(_LOCAL)
