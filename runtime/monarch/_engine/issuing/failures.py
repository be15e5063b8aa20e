"""Why the value of a tensor is missing: typed on the ranks, made a sentence in the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from monarch._core.shapes.ranks import describe_ranks
from monarch._engine.issuing.lines import lines
from monarch._node.remote_errors import trace
from monarch.exceptions import ActorError, DeviceMeshError, TensorError

MOST_TEXT = 20_000
"""Characters of a traceback that travel."""


class OpFailure(NamedTuple):
    """An op that failed on some ranks; its results, and all that depends on them, have no value.

    Attributes:
        op: its name.
        line: number of the line of the program that issued it.
        ranks: base ranks on which it failed.
        kind: class of the error, "lost" for values that died with a rank.
        text: the text of the error.
        traceback: the traceback of the rank, formatted.
    """

    op: str
    line: int
    ranks: tuple[int, ...]
    kind: str
    text: str
    traceback: str


LOST = "lost"
"""Kind of a failure: the values were on ranks that have died."""
_MOST_NAMES = 5


class Unreported(NamedTuple):
    """Something that has failed, which no look has raised yet.

    Attributes:
        mesh: its name.
        failure: why.
        numbers: references of tensors that have no value; negative numbers are of functions.
        kept: references of tensors that an op would have changed which was cancelled.
    """

    mesh: str
    failure: OpFailure
    numbers: tuple[int, ...]
    kept: tuple[int, ...] = ()


def failure_of(error: BaseException, op: str, line: int, rank: int) -> OpFailure:
    """Return the failure of an op on this rank."""
    text, _ = trace(error)
    message = str(error) or ("it was interrupted" if isinstance(error, KeyboardInterrupt) else "")
    return OpFailure(op, line, (rank,), type(error).__name__, message[:MOST_TEXT], text[-MOST_TEXT:])


def failure_of_call(error: ActorError, op: str, line: int, ranks: Sequence[int]) -> OpFailure:
    """Return the failure of a function on some of the ranks that it was sent to."""
    at = sorted(error.failures) or [error.rank or 0]
    cause = error.exception or error
    text = (str(cause) or "no message")[:MOST_TEXT]
    return OpFailure(op, line, tuple(ranks[each] for each in at), type(cause).__name__, text, str(error)[-MOST_TEXT:])


def merged(first: OpFailure | None, second: OpFailure) -> OpFailure:
    """Return one failure for two ranks that failed alike; the first one otherwise."""
    if first is None:
        return second
    if (first.op, first.line, first.kind) != (second.op, second.line, second.kind):
        return first
    return first._replace(ranks=tuple(sorted({*first.ranks, *second.ranks})))


def describe_unreported(found: Unreported, names: Mapping[int, str]) -> str:
    """Return lines about something that no look has raised.

    Args:
        found: it.
        names: variables of the program, by reference of their tensors.
    """
    failure = found.failure
    if failure.kind == LOST:
        text = failure.text
    else:
        text = (
            f"{failure.op} failed on {describe_ranks(list(failure.ranks))} of {found.mesh}: "
            f"{failure.kind}: {failure.text.strip().splitlines()[0] if failure.text.strip() else 'no message'}"
        )
    if failure.line and lines.has(failure.line):
        text += f"\nIssued at {lines[failure.line]}"
    numbers = tuple(number for number in found.numbers if number > 0)
    if numbers:
        rest = "" if failure.kind == LOST else "; tensors that do not depend on it are unchanged"
        text += f"\nWithout a value: {_named(numbers, names)}{rest}."
    if found.kept:
        text += f"\nLeft unchanged: {_named(found.kept, names)}. Run the line again, or load a checkpoint."
    return text


def _named(numbers: tuple[int, ...], names: Mapping[int, str]) -> str:
    known = list(dict.fromkeys(names[number] for number in numbers if number in names))
    shown = known[:_MOST_NAMES]
    # A module is one name of many tensors.
    others = sum(number not in names for number in numbers) + len(known) - len(shown)
    if others:
        shown.append(f"{others} {'more ' if shown else ''}tensor{'s' if others > 1 else ''}")
    return ", ".join(shown)


def error_of(failure: OpFailure, mesh: str) -> DeviceMeshError:
    """Return the error for a look at a tensor without a value. On a rank it lacks the line, which the program knows."""
    if failure.kind == LOST:
        return DeviceMeshError(failure.text, mesh=mesh, ranks=failure.ranks)
    issued = f"Issued at {lines[failure.line]}\n" if lines.has(failure.line) else ""
    text = (
        f"the value is missing, because {failure.op} failed on {describe_ranks(list(failure.ranks))} of {mesh}: "
        f"{failure.kind}: {failure.text}\n{issued}"
        f"Tensors that do not depend on it are unchanged.\n\nOn rank {failure.ranks[0]}:\n{failure.traceback}"
    )
    return TensorError(text, mesh=mesh, ranks=failure.ranks)
