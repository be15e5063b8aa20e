"""The recipe of a mesh from the words after ``%mesh up``."""

from __future__ import annotations

import argparse
import builtins
import re
from keyword import iskeyword
from typing import Any

from monarch._kernel_api import parse_options
from monarch.actor import Restart
from monarch.config import CHECK_COLLECTIVES, ISOLATE_GPUS
from monarch.exceptions import ArgumentError
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.detached import detached_recipe
from monarch_kernel.meshes.recipe import Recipe, roles_of, usual_axes

RULES = re.compile(r"checkpoint:.+|[^\W\d]\w*")
"""The rules of ``--on-preempt``."""
AXES = ("procs", "gpus")
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
"""Numbers from 1 on."""


def recipe_of(words: list[str]) -> Recipe:
    """Return the recipe that the words describe.

    Raises:
        HeaderError: they are wrong.
    """
    arguments = parse("up", words)
    has_size = arguments.procs is not None or arguments.gpus is not None or arguments.roles
    if arguments.count is not None:
        if has_size:
            raise Usage(f"%mesh up: {arguments.count} after the name is the same as --procs; give only one of them")
        arguments.procs = arguments.count
    elif arguments.name.isdecimal() and not has_size:
        arguments.name, arguments.procs = "mesh", int(arguments.name)
    _check_name(arguments.name, not has_size and arguments.count is None)
    if arguments.spares < 0:
        raise Usage(f"%mesh up: --spares: expected at least 0, got {arguments.spares}")
    axes, roles = _axes(arguments), roles_of(arguments.roles)
    if roles and axes:
        raise Usage("%mesh up: --roles sets the number of ranks; omit --procs and --gpus")
    if arguments.on:
        _check_launcher(arguments, bool(axes or roles))
    axes = axes or ({} if roles else usual_axes(arguments.device))
    recipe = Recipe(arguments.name, axes, _env(arguments), arguments.hosts, arguments.key, arguments.device)
    recipe.restart, recipe.spares, recipe.roles = _restarts(arguments), arguments.spares, roles
    recipe.silence = arguments.silence
    recipe.on, recipe.at_least, recipe.options = arguments.on, arguments.at_least, _options(arguments)
    recipe.spare_hosts, recipe.on_preempt = arguments.spare_hosts, arguments.on_preempt or recipe.on_preempt
    return detached_recipe(recipe, arguments.keep) if arguments.keep else recipe


def _check_name(name: str, is_alone: bool) -> None:
    """Refuse names that no variable can have, and a word that stands alone where a number was meant."""
    if is_alone and name.lower() in _WORDS:
        count = _WORDS.index(name.lower()) + 1
        raise Usage(
            f"%mesh up {name}: a word is the name of the mesh; for {count} rank{'s' if count > 1 else ''} write "
            f"%mesh up {count}, for a mesh of that name %mesh up {name} {count}"
        )
    if not name.isidentifier():
        digits = re.match(r"[1-9]\d*", name)
        count = f"; for {digits[0]} ranks write %mesh up {digits[0]}" if digits else ""
        raise Usage(f"%mesh up: invalid mesh name {name!r}: must be a Python identifier{count}")
    if iskeyword(name) or hasattr(builtins, name):
        # The mesh is in a variable of its name.
        raise Usage(f"%mesh up: invalid mesh name {name!r}: must not be a Python keyword or builtin")


def _check_launcher(arguments: argparse.Namespace, has_size: bool) -> None:
    if not has_size:
        raise Usage("%mesh up --on: the number of ranks per host is unknown; give it with --gpus N or --procs N")
    if arguments.key:
        raise Usage("%mesh up --on: omit --key, which is for the workers of --hosts; a launcher generates its own key")
    if arguments.hosts and not arguments.hosts.isdecimal():
        raise Usage(f"%mesh up --on: --hosts: expected the number of hosts, got {arguments.hosts!r}")
    if arguments.at_least is not None and arguments.at_least < 1:
        raise Usage(f"%mesh up: --at-least: expected at least 1, got {arguments.at_least}")


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the launcher."""
    some = arguments.packages or arguments.opt or arguments.reverse or arguments.on_preempt or arguments.spare_hosts
    if not arguments.on and (some or arguments.at_least is not None):
        raise Usage(
            "%mesh up: --opt, --reverse, --packages, --at-least, --spare-hosts and --on-preempt need hosts of a "
            "launcher; add --on WHERE"
        )
    if arguments.spare_hosts < 0:
        raise Usage(f"%mesh up: --spare-hosts: expected at least 0, got {arguments.spare_hosts}")
    if arguments.on_preempt and not RULES.fullmatch(arguments.on_preempt):
        raise Usage(
            f"%mesh up: --on-preempt: expected heal, shrink, checkpoint, checkpoint:PATH or the name of a function, "
            f"got {arguments.on_preempt!r}"
        )
    try:
        options = parse_options(arguments.opt)
    except ArgumentError as error:
        raise Usage(f"%mesh up: --opt: {error}") from None
    more = {"reverse": True} if arguments.reverse else {}
    return {**options, **more, **({"packages": arguments.packages} if arguments.packages else {})}


def _axes(arguments: argparse.Namespace) -> dict[str, int]:
    axes: dict[str, int] = {each: getattr(arguments, each) for each in AXES if getattr(arguments, each) is not None}
    if len(axes) > 1:
        raise Usage("%mesh up: give either --procs or --gpus, not both")
    for axis, size in axes.items():
        if size < 1:
            raise Usage(f"%mesh up: --{axis}: expected at least 1, got {size}")
    return axes


def _env(arguments: argparse.Namespace) -> dict[str, str]:
    env: dict[str, str] = {}
    for pair in arguments.env:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise Usage(f"%mesh up: --env: expected K=V, got {pair!r}")
        env[key] = value
    if arguments.check_collectives:
        env[CHECK_COLLECTIVES.variable] = "1"
    if arguments.isolate_gpus:
        env[ISOLATE_GPUS.variable] = "1"
    return env


def _restarts(arguments: argparse.Namespace) -> int:
    """Return how many ranks may be restarted per minute."""
    restart = arguments.restart if arguments.restart != "on-failure" else str(Restart().most)
    if restart is not None and not restart.isdecimal():
        raise Usage(f"%mesh up: --restart: expected restarts per minute, or on-failure, got {restart!r}")
    return int(restart or 0)
