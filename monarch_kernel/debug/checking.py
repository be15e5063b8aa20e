"""``%mesh check``: ranks compare their collectives before these begin."""

from __future__ import annotations

from collections.abc import Callable

from monarch._kernel_api import ask_ranks, describe_ranks, is_checked_here, request, state_of
from monarch_kernel.debug.pausing import Pausing
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse


class Checking:
    """The command that turns the check of collectives on and off, and shows it.

    Args:
        pausing: the commands beside it, which find the mesh that is meant.
    """

    def __init__(self, pausing: Pausing) -> None:
        self._pausing = pausing

    def commands(self) -> dict[str, Callable[[list[str]], None]]:
        """Return the command by name."""
        return {"check": self.check}

    def check(self, words: list[str]) -> None:
        """Turn the check on or off, or tell whether it is on."""
        given: list[str] = list(parse("check", words).words)
        wanted = [each for each in given if each in ("on", "off")]
        names = [each for each in given if each not in ("on", "off")]
        if len(wanted) > 1 or len(names) > 1 or not all(each.isidentifier() for each in names):
            raise Usage(f"%mesh check: expected on or off, and optionally a mesh, got {' '.join(given)!r}")
        mesh, ranks = self._pausing.named("check", names)
        if wanted:
            mesh.procs.check_collectives(wanted == ["on"])
            mesh.checked = wanted == ["on"]
            now = "compares each collective before it begins" if wanted == ["on"] else "no longer compares collectives"
            print(f"mesh {mesh.name!r} {now}")
            return
        answers = ask_ranks(state_of(mesh.procs).procs, ranks, request(is_checked_here))
        mesh.checked = True in answers.values()
        for state, text in ((True, "checked"), (False, "not checked")):
            those = [rank for rank, answer in answers.items() if answer is state]
            if those:
                print(f"collectives are {text} on {describe_ranks(those, len(ranks))} of mesh {mesh.name!r}")
