"""Expressions evaluated on a rank while it is paused or runs, in a frame of its code."""

from __future__ import annotations

from collections.abc import Iterable

from monarch._core.kinds import is_tuple
from monarch._core.roster import Procs
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._debug.collectives_in import collective_in
from monarch._debug.pausing import ask_ranks, values_of
from monarch._meshes.inside import region_of, state_of
from monarch._meshes.mesh_like import ProcMeshLike
from monarch._node.services.registry import request, service
from monarch._notebook.looking.at_frame import MOST_CALLERS, PATIENCE, look
from monarch._notebook.showing.show import bundle_of
from monarch.exceptions import ArgumentError


@service("evaluate.evaluate_here", "probe")
def evaluate_here(source: str, level: int) -> tuple[bool, str]:
    """Service: evaluate an expression, and return whether it has a value, and this as a cell shows it or the error.

    Args:
        source: the expression.
        level: the level of the frame: 0 for the innermost one of the user's code, 1 for its caller. An idle rank has
            only its variables.
    """
    return look(level, lambda scope: str(bundle_of(scope.value_of(source))["text/plain"]))


@service("evaluate.evaluate", "local")
def evaluate(mesh: ProcMeshLike, expression: str, up: int, force: bool) -> ValueMesh[str]:
    """Return the value of an expression on each rank of a mesh, or the error; see ``ProcMesh.evaluate``."""
    values = evaluated(state_of(mesh).procs, region_of(mesh).base_ranks(), expression, up, force).values()
    return values_of(mesh, list(values))


def evaluated(procs: Procs, ranks: Iterable[int], expression: str, up: int = 0, force: bool = False) -> dict[int, str]:
    """Return the value of an expression on ranks, as a cell shows it, or the error.

    Args:
        procs: the processes of the ranks.
        ranks: the ranks of the mesh.
        expression: in Python.
        up: callers to go outward from the innermost frame of the user's code.
        force: whether to call functions that wait for other ranks.

    Raises:
        ArgumentError: it is not an expression, or would wait for other ranks.
    """
    check_expression(expression, up, force)
    answers = ask_ranks(procs, ranks, request(evaluate_here, expression, up), PATIENCE + 1.0)
    return {rank: str(answer[1]) if is_tuple(answer) else str(answer) for rank, answer in answers.items()}


def check_expression(expression: str, up: int, force: bool) -> None:
    """Check the arguments of ``evaluated``.

    Raises:
        ArgumentError: they are wrong, or the expression would wait for other ranks.
    """
    if not 0 <= up <= MOST_CALLERS:
        raise ArgumentError(
            f"up: expected a number from 0 to {MOST_CALLERS}, got {up}; 0 is the innermost function, 1 its caller"
        )
    try:
        name = "" if force else collective_in(expression)
    except SyntaxError as error:
        raise ArgumentError(f"{expression!r} is not an expression: {error.msg}") from None
    except ValueError as error:
        raise ArgumentError(f"{expression!r} is not an expression: {error}") from None
    if name:
        raise ArgumentError(
            f"{name} would wait for other ranks, which are running other code; to call it anyway, pass "
            f"force=True, or --force to %mesh"
        )
