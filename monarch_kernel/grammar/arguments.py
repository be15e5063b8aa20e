"""The arguments of a command: a parser whose words completion and help know too."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.offers import Offer, Offers

WIDTH = 80
"""Columns of help in a terminal."""


class Usage(HeaderError):
    """A ``%mesh`` line with wrong arguments."""


class Parser(argparse.ArgumentParser):
    """The arguments of one command. Wrong ones raise Usage.

    Args:
        command: the word after ``%mesh``.
        summary: what the command does, in at most 50 characters.
        details: a paragraph below the arguments.
    """

    def __init__(self, command: str, summary: str, details: str = "") -> None:
        self.command = command
        self.summary = summary
        self.arguments: list[argparse.Action] = []
        self._offers: dict[str, tuple[Offers, Offers]] = {}
        """Words that completion offers for arguments, by destination: for the first word, and for later ones."""
        layout = partial(argparse.HelpFormatter, width=WIDTH, max_help_position=26)
        super().__init__(
            f"%mesh {command}", add_help=False, allow_abbrev=False, description=summary, formatter_class=layout,
            epilog=details or None,
        )  # fmt: skip

    def add_argument(
        self, *names: Any, offers: Offers = (), then: Offers | None = None, **options: Any
    ) -> argparse.Action:
        """Add an argument, and remember it for help and completion.

        Args:
            names: the names of the argument, as for ``ArgumentParser``, with its options.
            offers: words that completion offers for it.
            then: words that completion offers after the first one; the same if omitted.
        """
        action = super().add_argument(*names, **options)
        if action.nargs == "*":
            # argparse names it among those that are missing, though it may be empty.
            action.required = False
        self.arguments.append(action)
        self._offers[action.dest] = (offers, offers if then is None else then)
        return action

    def offers_of(self, action: argparse.Action, later: bool = False) -> Offers:
        """Return the words that completion offers for the first word of an argument, or for a later one."""
        return (*self._offers[action.dest][later], *(each for each in action.choices or () if each))

    def option(self, name: str) -> argparse.Action | None:
        """Return the option of a name, such as ``--procs``, or None."""
        return next((each for each in self.arguments if name in each.option_strings), None)

    def synopsis(self) -> str:
        """Return the command with its positional arguments."""
        return " ".join([self.command, *(label(each) for each in self.arguments if not each.option_strings)])

    def error(self, message: str) -> Any:
        raise Usage(f"{self.prog}: {message}; see %mesh help {self.command}")


def whole(text: str) -> int:
    """Return the whole number of a word."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def number(text: str) -> float:
    """Return the number of a word."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def label(action: argparse.Action) -> str:
    """Return how an argument is written, such as ``--procs N`` or ``[NAME ...]``."""
    value = str(action.metavar or action.dest)
    shapes = {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ...", 0: ""}
    shape = shapes[action.nargs] if action.nargs is not None else value
    return " ".join([*action.option_strings, shape]).strip()


def one_mesh(command: str, summary: str) -> Parser:
    """Return the parser of a command that takes the name of a mesh."""
    parser = Parser(command, summary)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the mesh; the one in use if omitted", offers=(Offer.MESH,)
    )
    return parser


def named(command: str, summary: str, metavar: str, help: str, offer: Offer) -> Parser:
    """Return the parser of a command that takes one name."""
    parser = Parser(command, summary)
    parser.add_argument("name", metavar=metavar, help=help, offers=(offer,))
    return parser


def on_ranks(command: str, summary: str) -> Parser:
    """Return the parser of a command that takes a mesh and ranks."""
    parser = Parser(command, summary)
    parser.usage = f"%%mesh {command} [MESH] [RANKS]"
    parser.add_argument(
        "words", nargs="*", metavar="RANKS",
        help="such as 0,2 or [0:2]; all ranks if omitted. The name of a mesh may precede them",
        offers=(Offer.MESH,), then=(Offer.RANK,),
    )  # fmt: skip
    return parser
