"""Questions to ranks whose answers are of use only if they come soon."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from monarch._kernel_api import AgentRequest, Answers, Request, Vitals, current_node, is_tuple, request, vitals_here

_ALL = 0.2
"""Seconds for all ranks to answer."""
_ONE = 0.3
"""More seconds for the first answer, on a busy machine."""


def ask_soon(procs: Sequence[str], asked: Request | AgentRequest, patience: float = _ALL) -> dict[str, Any]:
    """Return the answers of the processes that answer soon, by process; an error is a Failure."""
    answers: dict[str, Any] = {}
    said, all_said = threading.Event(), threading.Event()

    def heard(proc: str, answer: Any) -> None:
        answers[proc] = answer
        said.set()
        if len(answers) == len(procs):
            all_said.set()

    asking = Answers(current_node(), procs, asked, heard)
    if procs and not all_said.wait(patience):
        said.wait(_ONE)
    asking.close()
    return dict(answers)


def ask_vitals(procs: Sequence[str]) -> dict[str, Vitals]:
    """Return the figures of the processes that answer soon."""
    answers = ask_soon(procs, request(vitals_here))
    return {proc: Vitals(*answer) for proc, answer in answers.items() if is_tuple(answer)}


def places_of(procs: Sequence[str]) -> dict[str, str]:
    """Return the lines of cells that processes run, of those that answer soon."""
    return {proc: each.place for proc, each in ask_vitals(procs).items()}
