"""``%mesh why``: what ranks wait for, and why, at any time."""

from __future__ import annotations

from monarch._kernel_api import advice, explain, node_of, state_of
from monarch_kernel.debug.pausing import Pausing
from monarch_kernel.grammar.parsers import parse


class Reasons:
    """The command that explains what ranks wait for.

    Args:
        pausing: the commands beside it, which find the ranks that are meant.
    """

    def __init__(self, pausing: Pausing) -> None:
        self._pausing = pausing

    def why(self, words: list[str]) -> None:
        """Explain what ranks wait for."""
        named: list[str] = list(parse("why", words).words)
        mesh, ranks = self._pausing.named("why", named)
        procs = state_of(mesh.procs).procs
        print(advice().placed(explain(node_of(mesh.procs), [procs.proc(rank) for rank in ranks]).text))
