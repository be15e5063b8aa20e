"""The commands of ``%mesh`` and their arguments: one parser each, which also generates ``%mesh help``."""

from __future__ import annotations

import argparse
import copy

from monarch_kernel.grammar.arguments import Parser, Usage
from monarch_kernel.grammar.debug_commands import DEBUGGING
from monarch_kernel.grammar.mesh_commands import MESHES
from monarch_kernel.grammar.program_commands import PROGRAMS
from monarch_kernel.grammar.rank_commands import RANKS, VARIABLES
from monarch_kernel.grammar.suggest import did_you_mean

SECTIONS = {
    "Meshes": MESHES,
    "Ranks": RANKS,
    "Debugging": DEBUGGING,
    "Variables": VARIABLES,
    "Programs and output": PROGRAMS,
}
_ELSEWHERE = {
    "-n": "--procs",
    "-np": "--procs",
    "--num-processes": "--procs",
    "--nproc_per_node": "--procs",
    "--nproc-per-node": "--procs",
    "--num-gpus": "--gpus",
    "-g": "--gpus",
    "--nnodes": "--hosts",
    "--local": "--here",
    "--noblock": "--nowait",
}
"""Options of launchers and of other notebook magics, with ours."""

PARSERS = {parser.command: parser for section in SECTIONS.values() for parser in section}


def parse(command: str, words: list[str]) -> argparse.Namespace:
    """Parse the words after a command; options may stand between the positional arguments.

    Raises:
        Usage: wrong arguments.
    """
    parser = PARSERS[command]
    try:
        # It changes the parser meanwhile, which an interrupt would leave so, and another thread would see.
        found, unknown = copy.deepcopy(parser).parse_known_intermixed_args(words)
    except (AttributeError, NameError) as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            # It came before argparse had changed the attribute that it restores.
            raise error.__context__ from None
        raise
    if unknown:
        raise Usage(f"{parser.prog}: {_unknown(parser, unknown[0])}; see %mesh help {command}")
    return found


def _unknown(parser: Parser, word: str) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    option = word.partition("=")[0]
    known = [name for each in parser.arguments for name in each.option_strings]
    if option == "--name" and "name" in [each.dest for each in parser.arguments]:
        return f"unknown option {option!r}; a name is a word, as in {parser.prog} {word.partition('=')[2] or 'NAME'}"
    if _ELSEWHERE.get(option) in known:
        return f"unknown option {option!r}; did you mean {_ELSEWHERE[option]!r}?"
    expected = f": expected one of {', '.join(known)}" if known else ": it takes no options"
    return f"unknown option {option!r}{did_you_mean(option, known) or expected}"
