"""``%mesh print``: an expression evaluated on ranks while they are paused, or run."""

from __future__ import annotations

from collections.abc import Callable

from monarch._kernel_api import evaluated, state_of
from monarch.exceptions import ArgumentError
from monarch_kernel.debug.grouped import grouped_lines
from monarch_kernel.debug.pausing import Pausing
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.mesh import Mesh

_WITH_VALUE = {"--on", "--up"}


class Printing:
    """The command that evaluates an expression in the line where each rank is.

    Args:
        pausing: the commands beside it, which find the ranks that are meant.
    """

    def __init__(self, pausing: Pausing) -> None:
        self._pausing = pausing

    def commands(self) -> dict[str, Callable[[str], None]]:
        """Return the command by name; it takes its text as it is typed."""
        return {"print": self.print}

    def print(self, text: str) -> None:
        """Show the value of an expression on ranks."""
        options, source = option_words(text)
        parsed = parse("print", options)
        mesh, ranks = self._pausing.named("print", [parsed.on] if parsed.on else [])
        if not source:
            raise Usage("%mesh print: expected an expression, as in %mesh print loss.item()")
        try:
            print(values(mesh, ranks, source, mesh.frame + parsed.up, parsed.force))
        except ArgumentError as error:
            raise Usage(f"%mesh print: {error}") from None


def option_words(text: str) -> tuple[list[str], str]:
    """Return the options at the beginning of the text, and the expression after them."""
    options: list[str] = []
    rest = text.strip()
    while rest.startswith("--"):
        word, _, rest = rest.partition(" ")
        options.append(word)
        rest = rest.strip()
        if word in _WITH_VALUE:
            value, _, rest = rest.partition(" ")
            options += [value] if value else []
    return options, rest.strip()


def values(mesh: Mesh, ranks: list[int], source: str, level: int = 0, force: bool = False) -> str:
    """Return the values of an expression on ranks; equal ones are shown once.

    Args:
        mesh: the mesh.
        ranks: the ranks of the mesh.
        source: the expression.
        level: callers to go outward from the innermost function of the user's code.
        force: whether to call functions that wait for other ranks.

    Raises:
        ArgumentError: it is not an expression, or would wait for other ranks.
    """
    return grouped_lines(sorted(evaluated(state_of(mesh.procs).procs, ranks, source, level, force).items()))
