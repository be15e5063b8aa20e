"""Ranks that should be in the same step of a training, and what to do if they are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from monarch._kernel_api import Steps, describe_ranks
from monarch_kernel.meshes.mesh import AFTER_STOP_S, Mesh

_MOST = 8
"""Most variables that a line names."""


def apart(mesh: Mesh, steps: Mapping[int, Steps] | None, among: Collection[str] | None = None) -> str:
    """Say in which models living ranks differ after a stop or an error; empty for none, or if that is not known.

    Args:
        mesh: the mesh of the ranks.
        steps: how far they are; None if they have not been asked.
        among: the variables and actors to look at; None for all.
    """
    if steps is None:
        dead = mesh.dead()
        living = [rank for rank in range(len(mesh.cells)) if rank not in dead]
        steps = mesh.steps(living, AFTER_STOP_S, False)
    models = _apart([each.models for each in steps.values()], among)
    if not models:
        return ""
    return f"{_differ(models, steps)}; if they should be equal, {_repair(mesh, steps)}"


def copied_apart(mesh: Mesh, before: Mapping[int, Steps], names: Collection[str], new: Sequence[int]) -> list[str]:
    """Say, in lines, in which of the copied variables the ranks differed that had them before.

    Args:
        mesh: the mesh of the ranks.
        before: how far the ranks were that had the variables.
        names: the variables that were copied.
        new: the ranks that got them.
    """
    lines: list[str] = []
    models = _apart([each.models for rank, each in before.items() if rank not in new], names)
    if models:
        lines.append(f"{_differ(models, before)}; if they should be equal, {_repair(mesh, before)}")
    values = _apart([each.values for each in before.values()], names)
    if values:
        own = f"{'a value' if len(values) == 1 else 'values'} of {'its' if len(new) == 1 else 'their'} own"
        verb = "differed" if set(new) & set(before) else "differ"
        lines.append(f"{_differ(values, before, verb)}: {describe_ranks(list(new))} may need {own}")
    return lines


def random_alike(steps: Mapping[int, Steps]) -> list[str]:
    """Return the generators of random numbers that are in the same state on several ranks, as after a common seed."""
    if len(steps) < 2:
        return []
    first, *others = [each.generators for each in steps.values()]
    return [name for name in first if all(each.get(name) == first[name] for each in others)]


def _apart(prints: Sequence[Mapping[str, str]], among: Collection[str] | None = None) -> list[str]:
    """Return the variables of which ranks have told different things."""
    names = sorted({name for each in prints for name in each if among is None or name in among})
    return [name for name in names if len({each[name] for each in prints if name in each}) > 1]


def _differ(names: Sequence[str], ranks: Mapping[int, object], verb: str = "differ") -> str:
    more = ", ..." if len(names) > _MOST else ""
    return f"{describe_ranks(sorted(ranks))} {verb} in {', '.join(names[:_MOST])}{more}"


def _repair(mesh: Mesh, ranks: Mapping[int, object]) -> str:
    first = min(ranks)
    return f"%mesh heal {mesh.name} --copy-from {first} --all copies the state of rank {first} to the others"
