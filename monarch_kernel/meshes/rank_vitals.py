"""Questions to ranks whose answers are of use only if they come soon."""

from __future__ import annotations

from collections.abc import Sequence

from monarch._kernel_api import Vitals, ask_soon, is_tuple, request, vitals_here


def ask_vitals(procs: Sequence[str]) -> dict[str, Vitals]:
    """Return the vitals of the processes that answer soon."""
    answers = ask_soon(procs, request(vitals_here))
    return {proc: Vitals(*answer) for proc, answer in answers.items() if is_tuple(answer)}


def places_of(procs: Sequence[str]) -> dict[str, str]:
    """Return the lines of cells that processes run, of those that answer soon."""
    return {proc: each.place for proc, each in ask_vitals(procs).items()}
