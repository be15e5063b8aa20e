"""Automatic mode, ``%mesh auto on``: plain cells run on ranks, as if they began with ``%%mesh``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import currentframe
from typing import Any

from monarch.exceptions import MonarchError
from monarch_kernel.compat import runs_cell
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.header import HERE, HeaderError
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.kernel_like import kernel_of, request_of
from monarch_kernel.output.frontend import has_cells

_LOCAL = ("%%", "%mesh", "%load_ext", "%reload_ext", "%unload_ext")
"""Beginnings of cells that run in the notebook."""
_BADGE = "font-size:85%;color:#fff;background:#5b6ea8;border-radius:3px;padding:0 5px"


class Auto:
    """Sends plain cells to ranks while it is on.

    Args:
        shell: the shell of the notebook; cells pass through its ``transform_cell``.
        find: returns which ranks a header names, in words.

    Raises:
        HeaderError: by ``find``, if the mesh does not exist.
    """

    def __init__(self, shell: Any, find: Callable[[str], str]) -> None:
        self._shell = shell
        self._find = find
        self._before = shell.transform_cell
        # All of these: the thread that runs cells.
        self.header: str | None = None
        """The first line that plain cells get; None while it is off."""
        self._marks = False
        """Whether the next ``%%mesh`` cell was a plain one."""
        self._transformed: tuple[object, str, str] | None = None
        """Request, text and code of the last cell: IPython transforms most cells twice."""
        shell.transform_cell = self._transform

    def close(self) -> None:
        """Let cells pass as before; a function that was put around this one since then stays."""
        self.header = None
        if self._shell.transform_cell == self._transform:
            self._shell.transform_cell = self._before

    def command(self, words: list[str]) -> None:
        """Switch the mode, or say which it is."""
        arguments = parse("auto", words)
        if arguments.mode not in (None, "on", "off"):
            raise Usage(f"%mesh auto: expected on or off, got {arguments.mode!r}; see %mesh help auto")
        if arguments.mode != "on" and arguments.place:
            raise Usage("%mesh auto: name a mesh only after on, as in %mesh auto on trainers[0:2]")
        if arguments.mode == "on":
            header = " ".join(arguments.place)
            where = self._find(header)
            self.header = header
            print(
                f"plain cells now run on {where}; a cell that begins with {HERE} runs in the notebook; "
                f"%mesh auto off turns this off"
            )
        elif arguments.mode == "off":
            self.header = None
            print("plain cells run in the notebook")
        elif self.header is None:
            print("plain cells run in the notebook; %mesh auto on sends them to the ranks")
        else:
            print(f"{self._describe(self.header)}; %mesh auto off turns this off")

    def _describe(self, header: str) -> str:
        """Say where plain cells run."""
        try:
            return f"plain cells run on {self._find(header)}"
        except (HeaderError, MonarchError) as error:
            return f"automatic mode is on, but plain cells fail: {error}"

    def header_of(self, cell: str) -> str | None:
        """Return the header that a cell would get, as it is typed so far; None for cells of the notebook."""
        return self.header if self.header is not None and _is_for_ranks(cell) else None

    def mark(self) -> None:
        """Show that a plain cell runs on ranks; nothing for other cells.

        Raises:
            HeaderError: the ranks do not exist.
            MonarchError: the mesh does not exist.
        """
        if self._marks:
            self._marks = False
            try:
                where = self._find(self.header or "")
            except (HeaderError, MonarchError) as error:
                raise type(error)(f"{error}; automatic mode is on; %mesh auto off turns it off") from None
            html = f"<span style='{_BADGE}'>auto: {where}</span>"
            self._shell.display_pub.publish({"text/plain": f"auto: {where}", "text/html": html})

    def _transform(self, raw_cell: str) -> str:
        """Return the code of a cell, as IPython's ``transform_cell`` does."""
        local = _without_here(raw_cell)
        if runs_cell(currentframe()):
            # Code that a running cell runs, such as the body of %%time, goes where the cell does.
            return self._before(raw_cell if local is None else local)
        request, before = request_of(kernel_of(self._shell)), self._transformed
        self._transformed = None
        if before is not None and before[0] is request and before[1] == raw_cell:
            return before[2]
        self._marks = False
        code = self._before(self._with_header(raw_cell) if local is None else local)
        self._transformed = request, raw_cell, code
        return code

    def _with_header(self, raw_cell: str) -> str:
        """Return a cell with the header, if it is a plain one in automatic mode."""
        header = self.header_of(raw_cell)
        self._marks = header is not None and not self._is_hidden()
        return f"%%mesh {header}\n{raw_cell}" if self._marks else raw_cell

    def _is_hidden(self) -> bool:
        """Return whether the front end runs code of its own, such as that of a list of variables.

        In VS Code, that code is not silent, since the output is wanted: it has no cell and no place in the history.
        """
        parent = request_of(kernel_of(self._shell))
        content: dict[str, Any] = parent.get("content") or {}
        in_history = content.get("store_history", True) or has_cells(parent)
        return bool(content.get("silent")) or not in_history


def _is_for_ranks(cell: str) -> bool:
    first = next((line.strip() for line in cell.splitlines() if _is_code(line)), None)
    return first is not None and not first.startswith(_LOCAL)


def _without_here(cell: str) -> str | None:
    """Return a cell without the ``%%here`` at its top, below comments; None for other cells."""
    lines = cell.splitlines(keepends=True)
    above = next((number for number, line in enumerate(lines) if _is_code(line)), len(lines))
    words = "".join(lines[above : above + 1]).split(None, 1)
    if words[:1] != [HERE]:
        return None
    rest = "".join([*words[1:], *lines[above + 1 :]])
    return rest if (more := _without_here(rest)) is None else more


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")
