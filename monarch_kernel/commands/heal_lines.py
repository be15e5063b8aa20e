"""The lines of a heal about new ranks, and about the actors on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from monarch._kernel_api import copied_by, describe_ranks, state_of
from monarch_kernel.meshes.mesh import Mesh


def print_new(mesh: Mesh, new: list[tuple[int, int]], are_lost: bool) -> None:
    """Print which ranks are new."""
    for line in new_lines(mesh, new, are_lost):
        print(line)


def new_lines(mesh: Mesh, new: list[tuple[int, int]], are_lost: bool) -> list[str]:
    """Describe which ranks are new, in lines.

    Args:
        mesh: the mesh of the ranks.
        new: the ranks, each with the number of cells whose definitions it ran.
        are_lost: whether to say that the other variables are lost.
    """
    lines: list[str] = []
    for count in sorted({count for _, count in new}):
        ranks = [rank for rank, each in new if each == count]
        alone = len(ranks) == 1
        what = f"with the definitions of {count} cell{'s' if count > 1 else ''}" if count else "with an empty namespace"
        whose = "other" if count else "its" if alone else "their"
        left = f"; {whose} variables are lost" if are_lost else ""
        process = "a new process" if alone else "new processes"
        lines.append(f"{describe_ranks(ranks)} of mesh {mesh.name!r}: {process}, {what}{left}")
    return lines


def recreated_lines(mesh: Mesh, ranks: list[int]) -> list[str]:
    """Describe the actors on new ranks, whose state is lost, in lines."""
    return _lines(mesh, ranks, "recreated on", "their state is lost")


def added_lines(mesh: Mesh, ranks: list[int]) -> list[str]:
    """Describe the actors on added ranks, in lines."""
    return _lines(mesh, ranks, "created on", "they have the state of their constructor")


def _lines(mesh: Mesh, ranks: list[int], what: str, state: str) -> list[str]:
    lines: list[str] = []
    for actors in mesh.users_actors_on(ranks):
        copy = f"; %mesh heal {mesh.name} --copy-from peer copies that of another rank"
        hint = copy if copied_by(state_of(actors).cls) is not None else ""
        lines.append(f"actors {state_of(actors).name}: {what} {describe_ranks(ranks)}; {state}{hint}")
    return lines


def copied_lines(mesh: Mesh, new: Collection[int], ranks: list[int], copied: Mapping[str, str]) -> list[str]:
    """Describe the actors on ranks after a copy of their state, in lines.

    Args:
        mesh: the mesh of the ranks.
        new: the ranks on which actors were made again.
        ranks: the ranks.
        copied: by name of the actors, why their state was not copied; empty if it was.
    """
    lines: list[str] = []
    for actors in mesh.users_actors_on(ranks):
        name, where = state_of(actors).name, describe_ranks(ranks)
        why = copied.get(name)
        if new and set(ranks) <= set(new):
            state = ", with the copied state" if why == "" else f"; their state is lost{f' ({why})' if why else ''}"
            lines.append(f"actors {name}: recreated on {where}{state}")
        elif why == "":
            lines.append(f"actors {name}: state copied to {where}")
        else:
            lines.append(f"actors {name}: state not copied to {where}{f' ({why})' if why else ''}")
    return lines
