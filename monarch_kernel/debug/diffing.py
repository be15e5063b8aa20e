"""``%mesh diff``: the value of an expression, compared across ranks."""

from __future__ import annotations

from collections.abc import Callable

from monarch._kernel_api import compared, state_of
from monarch.exceptions import ArgumentError
from monarch_kernel.debug.pausing import Pausing
from monarch_kernel.debug.printing import option_words
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse


class Diffing:
    """The command that compares a value across ranks.

    Args:
        pausing: the commands beside it, which find the ranks that are meant.
    """

    def __init__(self, pausing: Pausing) -> None:
        self._pausing = pausing

    def commands(self) -> dict[str, Callable[[str], None]]:
        """Return the command by name; it takes its text as it is typed."""
        return {"diff": self.diff}

    def diff(self, text: str) -> None:
        """Show which ranks agree on a value, and where others differ."""
        options, source = option_words(text)
        parsed = parse("diff", options)
        mesh, ranks = self._pausing.named("diff", [parsed.on] if parsed.on else [])
        if not source:
            raise Usage("%mesh diff: expected an expression, as in %mesh diff model.state_dict()")
        try:
            print(compared(state_of(mesh.procs).procs, ranks, source, mesh.frame + parsed.up, parsed.force))
        except ArgumentError as error:
            raise Usage(f"%mesh diff: {error}") from None
