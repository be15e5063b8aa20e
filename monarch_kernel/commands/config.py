"""``%mesh config``: defaults of this notebook for the options of cells and of ``%mesh up``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monarch._kernel_api import html_table, text_table
from monarch_kernel.commands.up_options import AXES, recipe_of
from monarch_kernel.compat import display
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.header import OPTIONS, VALUED, Defaults, HeaderError, check_option, parse_where
from monarch_kernel.grammar.mesh_commands import CELL_SETTINGS, UP_SETTINGS
from monarch_kernel.grammar.parsers import PARSERS, parse
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.meshes.registry import NotebookMeshes

_TRUE, _FALSE = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
_NONE = ("", "none")
"""Values that remove a default."""
_MESH = "default mesh of cells, as %mesh use sets it"
_RANKS = "default ranks of cells that name no mesh or ranks, such as 0:2 or gpus=0:2"


class ConfigRow(NamedTuple):
    """A line of the table."""

    key: str
    value: str
    scope: str
    meaning: str


class Config:
    """The command that shows and sets defaults.

    Args:
        meshes: the meshes of the notebook, which hold the defaults.
    """

    def __init__(self, meshes: NotebookMeshes) -> None:
        self._meshes = meshes

    def command(self, words: list[str]) -> None:
        """Show all defaults, or change some."""
        arguments = parse("config", words)
        pairs = [_pair(word) for word in arguments.pairs]
        if arguments.reset:
            self._reset([key for key, _ in pairs])
        elif any(value is None for _, value in pairs) or not pairs:
            self._show([key for key, _ in pairs])
        else:
            self._set([(key, value or "") for key, value in pairs])

    def _set(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Check all, then set all."""
        after = dict(self._meshes.settings)
        for key, value in pairs:
            after.pop(key, None)
            text = "" if value.lower() in _NONE else _checked(key, value)
            if text and key != "mesh":
                after[key] = text
        recipe_of(up_words(after, []))
        for name in [value for key, value in pairs if key == "mesh"]:
            self._meshes.use(name)
        self._meshes.settings.clear()
        self._meshes.settings.update(after)
        self._show([key for key, _ in pairs])

    def _reset(self, keys: list[str]) -> None:
        for key in keys or list(self._meshes.settings):
            self._meshes.settings.pop(key, None)
        print(f"removed defaults: {', '.join(keys)}" if keys else "removed all defaults; the built-in ones apply")

    def _show(self, keys: list[str]) -> None:
        rows = [row for row in self._rows() if not keys or row.key in keys]
        cells = [list(row) for row in rows]
        headers = ("key", "value", "for", "meaning")
        title = "defaults of this notebook; %mesh config KEY=VALUE sets one"
        display(
            {
                "text/plain": "\n".join([title, text_table(headers, cells, len(cells))]),
                "text/html": html_table(headers, cells, len(cells), title=title),
            }
        )

    def _rows(self) -> list[ConfigRow]:
        value = {**self._meshes.settings, "mesh": self._meshes.used or ""}
        rows = [
            ConfigRow("mesh", value["mesh"], "cells", _MESH),
            ConfigRow("ranks", value.get("ranks", ""), "cells", _RANKS),
        ]
        rows += [ConfigRow(key, value.get(key, ""), "cells", OPTIONS[f"--{key}"]) for key in CELL_SETTINGS[2:]]
        return rows + [ConfigRow(key, value.get(key, ""), "%mesh up", _help_of(key)) for key in UP_SETTINGS]


def header_defaults(settings: Mapping[str, str]) -> Defaults:
    """Return the defaults of the first line of cells."""
    keys = [key for key in CELL_SETTINGS[2:] if settings.get(key, "off") != "off"]
    options = {f"--{key}": None if _is_flag(key) else settings[key] for key in keys}
    return Defaults(settings.get("ranks", ""), options)


def up_words(settings: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the default options of ``%mesh up``, without those that contradict what a line says."""
    sized = any(word.partition("=")[0] in ("--procs", "--gpus", "--roles") or word.isdecimal() for word in words)
    keys = [key for key in UP_SETTINGS if settings.get(key, "off") != "off" and not (sized and key in AXES)]
    return [f"--{key}" if _is_flag(key) else f"--{key}={settings[key]}" for key in keys]


def _pair(word: str) -> tuple[str, str | None]:
    """Return key and value of a word; None without a value.

    Raises:
        Usage: the key does not exist.
    """
    key, equals, value = word.partition("=")
    known = [*CELL_SETTINGS, *UP_SETTINGS]
    if key not in known:
        expected = f": expected one of {', '.join(known)}"
        raise Usage(f"%mesh config: unknown key {key!r}{did_you_mean(key, known) or expected}")
    return key, value if equals else None


def _checked(key: str, value: str) -> str:
    """Return a value as it is kept.

    Raises:
        Usage: it is invalid.
    """
    if _is_flag(key):
        if value.lower() not in _TRUE + _FALSE:
            raise Usage(f"%mesh config {key}: expected on or off, got {value!r}")
        return "on" if value.lower() in _TRUE else "off"
    try:
        if key == "ranks":
            ranks = value.strip("[]")
            if not ranks.isidentifier():
                parse_where(ranks)
            return ranks
        if key in CELL_SETTINGS and key != "mesh":
            check_option(f"--{key}", value)
    except HeaderError as error:
        raise Usage(f"%mesh config {key}: {str(error).removeprefix(f'--{key}: ')}") from None
    return value


def _is_flag(key: str) -> bool:
    if key in CELL_SETTINGS:
        return key not in ("mesh", "ranks") and f"--{key}" not in VALUED
    action = PARSERS["up"].option(f"--{key}")
    return action is not None and action.nargs == 0


def _help_of(key: str) -> str:
    action = PARSERS["up"].option(f"--{key}")
    return str(action.help) if action is not None else ""
