"""``%mesh run``: a torchrun script runs on the ranks, as a cell does."""

from __future__ import annotations

from dataclasses import dataclass

from monarch._kernel_api import (
    ActorMesh,
    Script,
    arrange,
    ask,
    new_token,
    region_of,
    run_order,
    script_of,
    state_of,
    take_order,
)
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.source.cell import made_for

_USAGE = "write %mesh run [--on MESH[SLICE]] script.py ARGS, or -m module ARGS"


@dataclass
class RunCommand:
    """A parsed ``%mesh run`` line."""

    place: str
    """Mesh, slice and options, as in the first line of a cell."""
    script: Script

    def title(self) -> str:
        """Return the program as it was typed."""
        return " ".join([self.script.path, *self.script.arguments])


def parse_run(words: list[str]) -> RunCommand:
    """Parse what follows ``%mesh run``.

    Raises:
        HeaderError: the line is invalid.
        ArgumentError: the script does not exist.
    """
    place = ""
    if words and words[0].startswith("--on"):
        option, equals, place = words.pop(0).partition("=")
        if option != "--on" or (not equals and not words):
            raise HeaderError(f"%mesh run: unknown option {option!r}; {_USAGE}")
        place = place if equals else words.pop(0)
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        raise HeaderError(f"%mesh run needs a script; {_USAGE}")
    return RunCommand(place, script_of(words, read=True))


def hand_out(program: RunCommand, actors: ActorMesh, views: list[ActorMesh]) -> str:
    """Send the program to its ranks; return the text of the cell that runs it there."""
    ranks = [region_of(view).base_rank(position) for view in views for position in range(len(view))]
    meeting = arrange(state_of(actors).procs, ranks)
    token = new_token()
    for answer in [ask(view, take_order, token, program.script, meeting) for view in views]:
        answer.get()
    code = f"__import__({run_order.__module__!r}, fromlist=['run_order']).run_order({token!r})"
    return made_for(code, f"%mesh run {program.title()}")
