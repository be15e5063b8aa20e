"""``%mesh heal``, ``%mesh resize`` and ``%mesh definitions``: notebook meshes whose ranks change."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from monarch._kernel_api import Copied, Steps, axes_text, current_node, describe_ranks, state_of
from monarch.exceptions import MonarchError
from monarch_kernel.commands.heal_lines import added_lines, copied_lines, new_lines, print_new, recreated_lines
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.grammar.short_forms import axis_of
from monarch_kernel.meshes.mesh import Mesh, Undefined
from monarch_kernel.meshes.moving import leave_lost
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.meshes.steps import copied_apart, random_alike
from monarch_kernel.meshes.variable_errors import lacking, one_line
from monarch_kernel.source.definitions import Defined, names_in

_STEPS_S = 5.0
"""Seconds for ranks to tell how far they are, before a copy."""
_TIMES = 5
"""Variables that the definitions of one cell may lack, one after the other."""


class Elastic:
    """The commands for ranks that change.

    Args:
        meshes: the meshes of the notebook.
        names: the variables of the notebook.
    """

    def __init__(self, meshes: NotebookMeshes, names: Mapping[str, Any]) -> None:
        self._meshes = meshes
        self._names = names

    def commands(self) -> dict[str, Callable[[list[str]], Any]]:
        """Return the action of each command."""
        return {"heal": self.heal, "resize": self.resize, "definitions": self.definitions}

    def definitions(self, words: list[str]) -> None:
        """List the cells that new ranks run, or drop some."""
        parse("definitions", words)
        name = words[0] if words and words[0] in self._meshes.by_name else None
        rest = words[1:] if name is not None else words
        mesh = self._meshes.get(name)
        cells = mesh.definitions.cells
        if not rest:
            for number, each in enumerate(cells):
                where = "all ranks" if each.everywhere else describe_ranks(sorted(each.ranks))
                names = ", ".join(names_in(each.text)) or each.text.strip().splitlines()[0][:60]
                print(f"{number:3}  {each.name}, {where}: {names}")
            if not cells:
                print(f"no cell of mesh {mesh.name!r} has defined anything yet")
        elif rest == ["clear"]:
            mesh.definitions.clear()
            print(f"new ranks of mesh {mesh.name!r} no longer run earlier cells")
        elif (
            rest[0] == "drop"
            and len(rest) > 1
            and all(each.isdecimal() and int(each) < len(cells) for each in rest[1:])
        ):
            for number in sorted({int(each) for each in rest[1:]}, reverse=True):
                print(f"new ranks of mesh {mesh.name!r} no longer run {mesh.definitions.drop(number).name}")
        else:
            raise Usage(
                f"%mesh definitions: expected nothing, clear, or drop N with N below {len(cells)}, "
                f"got {' '.join(rest)!r}"
            )

    def heal(self, words: list[str]) -> None:
        """Replace dead ranks."""
        arguments = parse("heal", words)
        mesh, variables = self._named(arguments.names, arguments.copy_from is not None)
        source = self._source(mesh, arguments.copy_from)
        if arguments.all and arguments.copy_from is None:
            raise Usage("%mesh heal: --all needs the rank to copy from, as in %mesh heal --copy-from 0 --all")
        mesh.moves.wait()
        if arguments.hosts:
            mesh.hosts.add(arguments.hosts, arguments.key, self._names)
        try:
            undefined: list[Undefined] = []
            new, again = _heal(mesh, not arguments.bare, undefined if arguments.copy_from is not None else None)
        except KeyboardInterrupt:
            copy = f" --copy-from {arguments.copy_from}" if arguments.copy_from is not None else ""
            raise KeyboardInterrupt(_heal_stopped(mesh, copy)) from None
        if again:
            print(again)
        made = [rank for rank, _ in new]
        bare = self._to_copy(mesh, made, source, arguments.all)
        copying = arguments.copy_from is not None and bool(bare)
        if copying and source is None:
            # Not from a rank that lacks the variables itself, since an earlier heal has replaced it.
            lacking = {*made, *mesh.replaced.after, *mesh.replaced.uncopied}
            source = next((rank for rank in range(len(mesh.cells)) if rank not in lacking), None)
            if arguments.all:
                source = source or 0
                bare = [rank for rank in bare if rank != source]
        if not new and not copying:
            if not again:
                print(f"all ranks of mesh {mesh.name!r} are alive; nothing to heal")
            return
        actors: dict[str, str] | None = None
        before: dict[int, Steps] = {}
        if copying:
            asked = [rank for rank in range(len(mesh.cells)) if arguments.all or rank not in bare]
            before = mesh.steps(asked, _STEPS_S)
        try:
            copied = None
            if copying:
                alike = [] if variables or arguments.all else random_alike(before)
                copied = self._copy(mesh, bare, source, variables, undefined, arguments.all, alike)
            if copying and not variables:
                actors = self._copy_actors(mesh, bare, source)
        except BaseException:
            if not variables:
                mesh.replaced.uncopied.update(bare)
            print_new(mesh, new, True)
            for each in undefined:
                print(each.why)
            raise
        if copying and not variables:
            mesh.replaced.uncopied.difference_update(bare)
        print_new(mesh, new, not copying)
        if copied is not None:
            names, left, unwrapped, *_ = copied
            if not variables and not left:
                mesh.replaced.filled(bare)
            whose = "a live rank" if source is None else f"rank {source}"
            if names or not actors:
                print(f"copied from {whose} to {describe_ranks(bare)}: {', '.join(names) or 'nothing'}")
            for name, why in left.items():
                print(f"not copied: {name} ({why})")
            for name in unwrapped:
                print(
                    f"{name}: copied without DistributedDataParallel; before the next step, wrap it again on all "
                    f"ranks, with its group and hooks:\n    {name} = DDP(getattr({name}, 'module', {name}))"
                )
            for line in copied_apart(mesh, before, names, bare):
                print(line)
        for line in recreated_lines(mesh, made) if actors is None else copied_lines(mesh, made, bare, actors):
            print(line)
        if undefined:
            raise MonarchError("\n".join(each.why for each in undefined))

    def _to_copy(self, mesh: Mesh, new: list[int], source: int | None, to_all: bool) -> list[int]:
        """Return the ranks to copy variables and the state of actors to.

        Args:
            mesh: the mesh of the ranks.
            new: the ranks that this heal has replaced.
            source: the rank to copy from; None for any other.
            to_all: whether to copy to all ranks.
        """
        # Without a death, the ranks that a restart, a kill or an earlier heal has replaced.
        known = new or list(mesh.replaced.after)
        size = len(mesh.cells)
        left = {rank for rank in (*known, *mesh.replaced.uncopied) if rank < size and (rank in new or rank != source)}
        return [rank for rank in range(size) if rank != source] if to_all else sorted(left)

    def _copy(
        self,
        mesh: Mesh,
        ranks: list[int],
        source: int | None,
        variables: list[str],
        undefined: list[Undefined],
        to_living: bool,
        alike: list[str],
    ) -> Copied:
        """Copy variables to new ranks, and run definitions again that failed for lack of them; see ``Mesh.copy``.

        Args:
            mesh: the mesh of the ranks.
            ranks: the ranks.
            source: the rank to copy from; None for any other.
            variables: the names of the variables; empty for all.
            undefined: the definitions that failed; those that fail again stay.
            to_living: whether the ranks have variables of their own.
            alike: the generators of random numbers to copy.
        """
        try:
            with one_line(mesh, "%mesh heal --copy-from"):
                left = undefined
                for _ in range(_TIMES):
                    # Such as a default argument: without its class, a model could not be copied.
                    lacked = sorted({each.missing for each in left if each.missing})
                    if not lacked:
                        break
                    for name in lacked:
                        # One may need the class of another definition first.
                        with suppress(MonarchError):
                            mesh.copy(ranks, source, [name])
                    left = mesh.define_again(left)
                copied = mesh.copy(ranks, source, variables, to_living, alike)
                # Those of functions may have kept a variable, which was copied again with the others.
                again = [each for each in undefined if each in left or not _has_class(each.defined)]
                undefined[:] = mesh.define_again(again)
            return copied
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"the copy to {describe_ranks(ranks)} of mesh {mesh.name!r} was stopped, and their variables may be "
                f"incomplete; %mesh heal --copy-from {'peer' if source is None else source} copies them"
            ) from None

    def _copy_actors(self, mesh: Mesh, ranks: list[int], source: int | None) -> dict[str, str]:
        """Copy the state of actors to new ranks; see ``Mesh.copy_actors``."""
        with one_line(mesh, "%mesh heal --copy-from"):
            return mesh.copy_actors(ranks, source)

    def _named(self, names: list[str], copying: bool) -> tuple[Mesh, list[str]]:
        """Return the mesh, and the variables to copy."""
        if names and all(re.fullmatch(r"[\d,:-]+", each) for each in names):
            raise Usage(f"%mesh heal replaces all dead ranks of a mesh: expected its name, got {' '.join(names)!r}")
        if names and names[0] in self._meshes.by_name:
            mesh, variables = self._meshes.get(names[0]), names[1:]
        elif copying:
            mesh, variables = self._meshes.get(None), names
        else:
            mesh, variables = self._meshes.get(names[0] if names else None), names[1:]
        if variables and not copying:
            raise Usage(f"%mesh heal: expected the name of one mesh, got {' '.join(names)!r}")
        return mesh, variables

    def _source(self, mesh: Mesh, text: str | None) -> int | None:
        if text in (None, "peer"):
            return None
        if not text.isdecimal() or int(text) >= len(mesh.cells):
            raise Usage(
                f"%mesh heal: --copy-from: expected a rank from 0 to {len(mesh.cells) - 1}, or peer, got {text!r}"
            )
        if int(text) in mesh.dead():
            raise Usage(f"%mesh heal: --copy-from: expected a live rank, or peer, got {text}, which is dead")
        return int(text)

    def resize(self, words: list[str]) -> None:
        """Change the size of a mesh."""
        sizes: dict[str, int] = {}
        name: str | None = None
        plain = ""
        arguments = parse("resize", words)
        for word in arguments.words:
            axis, equals, size = word.partition("=")
            if equals and size.isdecimal():
                sizes[axis] = int(size)
            elif word.isdecimal() and not plain and not sizes:
                plain = word
            elif not equals and name is None and not sizes:
                name = word
            else:
                known = self._meshes.by_name.get(name or self._meshes.used or "")
                axis = next(iter(known.procs.sizes), "gpus") if known is not None else "gpus"
                raise Usage(
                    f"%mesh resize: cannot parse {word!r}; write %mesh resize {axis}=6, or %mesh resize NAME {axis}=6"
                )
        mesh = self._meshes.get(name)
        if plain:
            sizes[axis_of(mesh.procs.sizes, state_of(mesh.procs).procs.host_axes, plain)] = int(plain)
        if not sizes:
            raise Usage(f"%mesh resize needs the new size, as in %mesh resize {next(iter(mesh.procs.sizes), 'gpus')}=6")
        for axis, number in sizes.items():
            if not number:
                raise Usage(f"%mesh resize: {axis}: expected at least 1, got 0; %mesh down ends a mesh")
        mesh.moves.wait()
        if arguments.hosts:
            mesh.hosts.add(arguments.hosts, arguments.key, self._names)
        try:
            with mesh.moves.planned(None):
                leave_lost(mesh, sizes)
                before = len(mesh.procs)
                defined = mesh.resize(sizes)
        except KeyboardInterrupt:
            if mesh.moves.any:
                raise KeyboardInterrupt(
                    f"the resize of mesh {mesh.name!r} was stopped; the next cell waits for ranks that are already "
                    f"moving"
                ) from None
            wanted = " ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise KeyboardInterrupt(
                f"the resize of mesh {mesh.name!r} was stopped, and it has {axes_text(mesh.procs.extent)} now; "
                f"%mesh resize {mesh.name} {wanted} continues it"
            ) from None
        text = f"mesh {mesh.name!r} now has {axes_text(mesh.procs.extent)}"
        new = range(before, len(mesh.procs))
        mesh.replaced.uncopied.update(new)
        if new:
            text += f"; new: {describe_ranks(new)}, with the definitions of {defined} cell{'s' if defined != 1 else ''}"
        print(text)
        lack = lacking(mesh, new)
        if lack:
            print(lack)
        for line in added_lines(mesh, list(new)):
            print(line)
        if resampled := mesh.resample(before):
            names, size = ", ".join(resampled), len(mesh.procs)
            print(f"{names}: from the next epoch on, a DistributedSampler divides the data among {size} ranks")


def _has_class(defined: Defined) -> bool:
    """Return whether a cell defines a class, whose objects would be of another one if it did so again."""
    return any(isinstance(each, ast.ClassDef) for each in ast.walk(ast.parse(defined.text)))


def _heal(mesh: Mesh, define: bool, undefined: list[Undefined] | None = None) -> tuple[list[tuple[int, int]], str]:
    """Replace dead ranks; return what ``Mesh.heal`` returns, and lines about what runs again; empty for none."""
    failed = {state_of(actors).name: sorted(state_of(actors).failed) for actors in mesh.actors()}
    ended = sorted(state_of(mesh.cells).failed)
    new = mesh.heal(define, undefined)
    revived = [rank for rank in ended if rank not in {each for each, _ in new}]
    lines: list[str] = []
    if revived:
        lines.append(f"{describe_ranks(revived)} of mesh {mesh.name!r}: cells run again; their variables are kept")
    again = [f"{name} on {describe_ranks(ranks)}" for name, ranks in failed.items() if ranks]
    if again:
        lines.append(f"recreated failed actors: {', '.join(again)}; their state is lost")
    return new, "\n".join(lines)


def _heal_stopped(mesh: Mesh, copy: str) -> str:
    dead = sorted(mesh.dead())
    peers, procs = current_node().peers, state_of(mesh.procs).procs
    starting = [rank for rank in range(len(mesh.procs)) if rank not in dead and peers.get(procs.proc(rank)).starting]
    states = [f"{describe_ranks(dead)} {'is' if len(dead) == 1 else 'are'} dead"] if dead else []
    if starting:
        states.append(f"{describe_ranks(starting)} {'has' if len(starting) == 1 else 'have'} not started")
    what = " and ".join(states) or "all ranks are alive"
    return f"the heal of mesh {mesh.name!r} was stopped: {what}; %mesh heal {mesh.name}{copy} completes it"


def healed(mesh: Mesh) -> list[str]:
    """Replace dead ranks, with the definitions of cells, and describe it in lines."""
    new, again = _heal(mesh, True)
    lines = [*filter(None, [again]), *new_lines(mesh, new, True), *recreated_lines(mesh, [rank for rank, _ in new])]
    return lines or [f"all ranks of mesh {mesh.name!r} are alive; nothing to heal"]
