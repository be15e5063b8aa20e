"""Collectives that have not ended here, from the record that torch keeps of the last ones.

A wait for a ``Work``, such as that of the backward pass of a parallel module, does not name its collective. The record
does.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch.distributed as dist

from monarch._core.diagnosis.facts import Entered, Unended
from monarch._core.kinds import is_list
from monarch._tensors.collectives.waiting import ALIKE, labels
from monarch._tensors.torch_compat import default_group, group_names, recorded_collectives, recorded_name

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Int": "int32", "Long": "int64",
    "Byte": "uint8", "Bool": "bool", "Short": "int16", "Char": "int8",
}  # fmt: skip
"""Names of dtypes, by those in the record."""


class Recorded(NamedTuple):
    """A collective that has not ended here."""

    group: Any
    unended: Unended
    others: tuple[Unended, ...]
    """All of the group that have not ended here."""


def records_of(group: Any, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of the collectives of a group."""
    name = recorded_name(group)
    own = [each for each in entries if each["process_group"][0] == name]
    # Groups of the same name have been made one after another.
    newest = max((each["pg_id"] for each in own), default=0)
    return [each for each in own if each["pg_id"] == newest]


def recorded_by(backend: str) -> list[dict[str, Any]]:
    """Return the records of the last collectives of a backend, the oldest first; none where torch keeps none.

    Args:
        backend: "gloo" or "nccl".
    """
    found: dict[Any, dict[str, Any]] = {}
    for text in recorded_collectives():
        dump: dict[str, Any] = json.loads(text or "{}")
        for each in dump.get("entries") or ():
            if str(each["profiling_name"]).startswith(f"{backend}:"):
                # Both functions of torch may tell of it.
                found[each["pg_id"], each["record_id"]] = each
    return list(found.values())


def has_ended(record: dict[str, Any]) -> bool:
    """Return whether a collective has ended here; one on a GPU may have before torch looks at it."""
    return bool(record["retired"]) or record["state"] == "completed"


def operation_in(record: dict[str, Any]) -> str:
    """Return the operation of a record, as in ``all_reduce``."""
    return str(record["profiling_name"]).partition(":")[2]


def awaited(entered: Entered) -> Entered:
    """Return a wait for a ``Work`` with what torch has recorded of it: the oldest collective that has not ended here.

    It takes up to 0.1 s, so it is meant for waits that last.
    """
    entries = recorded_by("gloo")
    found: list[tuple[int, Recorded]] = []
    for group, _ in group_names() if entries else ():
        unended = [each for each in records_of(group, entries) if not has_ended(each)]
        told = tuple(_unended(each) for each in unended)
        for each, one in zip(unended, told, strict=True):
            found.append((each["time_created_ns"], Recorded(group, one, told)))
    alike = [each for each in found if entered.operation in ("", each[1].unended.operation)]
    if not alike:
        return entered
    _, one = min(alike, key=lambda each: each[0])
    members = tuple(dist.get_process_group_ranks(one.group))
    name = dict(group_names()).get(one.group, "")
    return entered._replace(
        operation=one.unended.operation, group=name, members=members, is_default=one.group is default_group(),
        number=one.unended.number, tensors=one.unended.tensors, is_alike=one.unended.is_alike,
        label=labels().get(name, ""), unended=one.others,
    )  # fmt: skip


def _unended(record: dict[str, Any]) -> Unended:
    operation = operation_in(record)
    return Unended(record["collective_seq_id"], record["op_id"], operation, _tensors(record), operation in ALIKE)


def _tensors(record: dict[str, Any]) -> str:
    """Return dtype and shape of the tensor of a collective; empty if there are several, or none."""
    dtypes, sizes = record.get("input_dtypes"), record.get("input_sizes")
    if not is_list(dtypes) or not is_list(sizes) or len(dtypes) != 1 or len(sizes) != 1 or not is_list(sizes[0]):
        return ""
    dtype = _DTYPES.get(str(dtypes[0]), str(dtypes[0]).lower())
    return f"{dtype}[{', '.join(map(str, sizes[0]))}]"
