"""``%mesh run``: a program that was written for torchrun runs on the ranks, as a cell does."""

from __future__ import annotations

from dataclasses import dataclass

from monarch._kernel_api import ActorMesh, Script, arrange, ask, new_token, run_order, script_of, take_order
from monarch_kernel.magics.header import HeaderError

_USAGE = "write %mesh run [--on MESH[SLICE]] script.py ARGS, or -m module ARGS"


@dataclass
class Program:
    """What a line orders."""

    place: str
    """As in the first line of a cell: mesh, slice, options."""
    script: Script

    def title(self) -> str:
        """As it was typed."""
        return " ".join([self.script.path, *self.script.arguments])


def parse_run(words: list[str]) -> Program:
    """Understands what follows ``%mesh run``.

    Raises:
        HeaderError: it cannot be understood.
        ArgumentError: there is no such script.
    """
    place = ""
    if words and words[0].startswith("--on"):
        option, equals, place = words.pop(0).partition("=")
        if option != "--on" or (not equals and not words):
            raise HeaderError(f"%mesh run: there is no option {option!r}; {_USAGE}")
        place = place if equals else words.pop(0)
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        raise HeaderError(f"%mesh run needs a script; {_USAGE}")
    return Program(place, script_of(words, read=True))


def hand_out(program: Program, actors: ActorMesh, views: list[ActorMesh]) -> str:
    """Gives the program to the ranks that are to run it; the text of the cell that runs it there."""
    ranks = [view._region.base_rank(position) for view in views for position in range(len(view))]
    meeting = arrange(actors._state.procs, ranks)
    token = new_token()
    for answer in [ask(view, take_order, token, program.script, meeting) for view in views]:
        answer.get()
    return f"__import__({run_order.__module__!r}, fromlist=['run_order']).run_order({token!r})  # {program.title()}"
