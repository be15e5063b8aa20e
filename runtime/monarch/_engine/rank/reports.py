"""Answers of ranks to the program, and names of its calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from monarch._core.shapes.region import Region
from monarch._engine.issuing.failures import OpFailure

TITLES = {
    **dict.fromkeys(("__init__", "prepare"), "the start of the tensor executor"),
    **dict.fromkeys(("run", "ready", "put_rank"), "ops on tensors"),
    **dict.fromkeys(("look", "fetch"), "the read of a tensor"),
    "execute": "a function of mesh.execute()",
    "executed": "the result of a function",
    "make_shard": "from_local()",
    "put_shard": "distribute()",
    **dict.fromkeys(("contents", "read_values"), "load()"),
    **dict.fromkeys(
        ("halt", "spread", "resume", "account", "drop_ops", "give", "restore"),
        "the recovery of tensors after a failure",
    ),
}
"""Names of the calls of an executor, for errors."""


class BatchReport(NamedTuple):
    """The answer of a rank to a batch, or to a look at a tensor.

    Attributes:
        halted: whether the rank has stopped before some ops.
        value: what was asked for.
        failure: why there is no value.
    """

    halted: bool
    value: Any = None
    failure: OpFailure | None = None


class HaltReport(NamedTuple):
    """The answer of a rank that has halted.

    Attributes:
        failures: what has failed since the last halt, by reference.
        is_new: whether it has begun after the others and lacks their tensors.
        rank: its number.
        waiting: how many ops of each mesh or slice it has not run.
    """

    failures: dict[int, OpFailure]
    is_new: bool
    rank: int
    waiting: dict[Region, int]
