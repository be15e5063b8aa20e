"""The outcomes of a cell on its ranks: which errors only follow from those of other ranks, or from their deaths."""

from __future__ import annotations

from dataclasses import replace

from monarch._kernel_api import CellError, CellResult, describe_ranks
from monarch.exceptions import GroupError


def has_waited(error: CellError) -> bool:
    """Return whether an error only says that others left a collective."""
    return error.freed or error.broken


def ended_from_outside(error: CellError) -> bool:
    """Return whether an error only says that a rank was ended from outside, or that others left a collective."""
    return error.interrupted or error.cut_off or has_waited(error)


def freed(result: CellResult, dead: list[int]) -> CellResult:
    """Return the same error for all ranks that waited for dead ones in a collective, with the reason."""
    error = result.error
    if error is None:
        return result
    if not has_waited(error):
        # A rank that entered a collective after the death names the dead rank itself.
        late = error.kind == GroupError.__name__
        return replace(result, error=replace(error, freed=True)) if late else result
    return _instead(result, f"a collective was aborted because {describe_ranks(dead)} died")


def followed(outcomes: dict[int, CellResult]) -> dict[int, CellResult]:
    """Return outcomes in which the broken collectives of some ranks follow from the failures of others.

    Connections that a failing rank closes may be noticed before the news of its failure.
    """
    causes = sorted(
        rank
        for rank, result in outcomes.items()
        if result.error is not None and not (has_waited(result.error) or result.error.cut_off)
    )
    if not causes:
        return outcomes
    have = "has" if len(causes) == 1 else "have"
    text = f"a connection of the collective was closed because {describe_ranks(causes)} {have} failed"
    return {rank: _instead(result, text) if _only_broke(result) else result for rank, result in outcomes.items()}


def _only_broke(result: CellResult) -> bool:
    return result.error is not None and result.error.broken and not result.error.freed


def _instead(result: CellResult, text: str) -> CellResult:
    """Return the result of a rank that was freed from a collective, with a reason in place of torch's error."""
    assert result.error is not None
    kind = GroupError.__name__
    trace = result.error.trace.rpartition(f"{result.error.kind}: ")[0]
    error = replace(result.error, kind=kind, text=text, trace=f"{trace}{kind}: {text}", freed=True)
    return replace(result, error=error)
