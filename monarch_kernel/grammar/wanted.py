"""The argument of a command at the cursor: an option, the value of one, or a positional argument."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from monarch_kernel.grammar.arguments import Parser
from monarch_kernel.grammar.offers import Offer, Offers

_SEVERAL = ("*", "+")


class CompletionWords(NamedTuple):
    """The words that completion offers."""

    offers: Offers = ()
    options: list[str] = []
    """Options of the command, where nothing else is offered."""
    typed: str = ""
    """The part of the word that is completed: without ``--device=``."""


class _Line:
    """The finished words of a line, taken one by one."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.taken: set[str] = set()
        self.position = 0
        """How many positional arguments there are."""
        self.open: argparse.Action | None = None
        """The option that takes the next word."""

    def take(self, word: str) -> None:
        optional = self.open is not None and self.open.nargs == "?"
        if self.open is not None and not (optional and word.startswith("-")):
            self.open = None
        elif self.is_option(word):
            name, equals, _ = word.partition("=")
            self.taken.add(name)
            action = self.parser.option(name)
            self.open = action if action is not None and action.nargs != 0 and not equals else None
        else:
            self.open, self.position = None, self.position + 1

    def is_option(self, word: str) -> bool:
        # Options after the script of run belong to the script.
        return word.startswith("-") and not (self.parser.command == "run" and self.position)

    def more(self) -> Offers:
        """Return what an option adds to the first positional argument: the mesh may be omitted before variables."""
        return (Offer.REMOTE,) if "--copy-from" in self.taken and not self.position else ()

    def options(self) -> list[str]:
        """Return the options that may still be given."""
        if self.parser.command == "run" and self.position:
            return []
        actions = [each for each in self.parser.arguments if each.option_strings]
        left = [each for each in actions if not self.taken.intersection(each.option_strings) or _repeats(each)]
        return [name for each in left for name in each.option_strings]


def wanted(parser: Parser, before: list[str], word: str) -> CompletionWords:
    """Return the words that fit at the cursor.

    Args:
        parser: the parser of the command.
        before: the finished words after the command.
        word: the one at the cursor, so far.
    """
    line = _Line(parser)
    for each in before:
        line.take(each)
    if line.open is not None and line.open.nargs != "?":
        return CompletionWords(parser.offers_of(line.open), typed=word)
    if line.is_option(word):
        name, equals, value = word.partition("=")
        action = parser.option(name)
        if equals:
            return CompletionWords(parser.offers_of(action) if action is not None else (), typed=value)
        return CompletionWords(options=line.options(), typed=word)
    offers = (
        _positional(parser, line.position)
        + line.more()
        + (parser.offers_of(line.open) if line.open is not None else ())
    )
    return CompletionWords(offers, line.options(), word)


def _repeats(action: argparse.Action) -> bool:
    return isinstance(action.default, list)


def _positional(parser: Parser, position: int) -> Offers:
    """Return the words for the positional argument at a position, and for the next one if it may be omitted."""
    actions = [each for each in parser.arguments if not each.option_strings]
    found: Offers = ()
    for at, action in enumerate(actions):
        last = at == len(actions) - 1
        if at == position or (last and at < position and action.nargs in _SEVERAL):
            found = parser.offers_of(action, position > at)
            if action.nargs == "?" and not last:
                found += parser.offers_of(actions[at + 1])
            break
    return found
