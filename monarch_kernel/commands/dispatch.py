"""How a ``%mesh`` line becomes a call of the command that it names."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from monarch_kernel.compat import display
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.help import bundle_of, unknown
from monarch_kernel.grammar.line_words import without_comment
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.grammar.short_forms import asks_for_help, help_words

Action = Callable[[list[str]], Any]
"""The action of a command. It gets the words after the command."""


class CommandTable:
    """The actions behind ``%mesh COMMAND``."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {"help": self.help}
        self.raw: dict[str, Callable[[str], Any]] = {}
        """Commands that take the text after them as it is typed, since it is code."""

    def names(self) -> list[str]:
        """Return all commands."""
        return sorted({*self.actions, *self.raw})

    def run(self, line: str) -> Any:
        """Run one ``%mesh`` line."""
        command, _, text = line.strip().partition(" ")
        if command in self.raw and text.strip() not in ("--help", "-h"):
            return self.raw[command](text)
        line = without_comment(line)
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise Usage(f"cannot parse {line.strip()!r}: {error}") from None
        if asks_for_help(words):
            words = ["help", *help_words(words)]
        command = words.pop(0) if words else "table"
        action = self.actions.get(command)
        if action is None:
            raise Usage(unknown(command, line))
        return action(words)

    def help(self, words: list[str]) -> None:
        """Show all commands, or the arguments of one."""
        display(bundle_of(parse("help", words).command))
