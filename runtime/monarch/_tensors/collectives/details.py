"""The collective that a thread has entered, with its tensors, reduction, source and peers, from its Python frames."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from monarch._core.diagnosis.facts import Entered
from monarch._core.kinds import is_list
from monarch._tensors.collectives.waiting import (
    ALIKE,
    called_object,
    default_group_of,
    labels,
    message_at,
    outermost,
    outside_receive,
    waits_in,
)
from monarch._tensors.torch_compat import type_of_work

_MESSAGES = {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv"}
_ROOTS = ("src", "dst", "group_src", "group_dst")
_TENSORS = (
    "tensor", "input_tensor", "input", "output", "tensor_list", "scatter_list", "input_list", "output_tensor",
)  # fmt: skip
_MOST = 3
"""Tensors of a list that are described."""
_TYPES = {
    0: "broadcast", 1: "all_reduce", 2: "all_reduce_coalesced", 3: "reduce", 4: "all_gather",
    5: "all_gather_into_tensor", 6: "all_gather_coalesced", 7: "gather", 8: "scatter", 9: "reduce_scatter",
    10: "all_to_all_single", 11: "all_to_all", 12: "isend", 13: "irecv", 14: "irecv", 15: "barrier",
    16: "reduce_scatter_tensor",
}  # fmt: skip
"""Operations by torch's number of their type."""


def entered(frame: FrameType | None, rank: int, in_futex: bool) -> Entered | None:
    """Return the collective that a thread has entered, None if it is in none.

    Args:
        frame: the innermost frame of the thread.
        rank: that of this process.
        in_futex: whether the thread waits in a futex.
    """
    waits = waits_in(frame, rank, (), in_futex, True)
    if waits is None or frame is None:
        return None
    outside = outside_receive(frame)
    function = outermost(outside)
    name = waits.operation
    values: dict[str, Any] = function.f_locals if function is not None else {}
    if not name:
        name = _operation_of(called_object(outside)) if outside is frame else "irecv"
    sent = message_at(frame) if function is None else None
    if sent is not None:
        values = {"tag": sent.tag, "tensor": sent.tensor()}
    message = name in _MESSAGES
    root = next((values[key] for key in _ROOTS if type(values.get(key)) is int), -1) if not message else -1
    if root >= 0 and type(values.get("src", values.get("dst"))) is not int:
        root = dist.get_global_rank(default_group_of(values), root)
    tag = values.get("tag", 0)
    return Entered(
        name, waits.group, waits.members, waits.is_default, waits.number, waits.peers, _tensors(name, values),
        name in ALIKE, reduction_of(values), root, tag if type(tag) is int else 0, message,
        labels().get(waits.group, ""),
    )  # fmt: skip


def _operation_of(work: Any) -> str:
    """Return the operation of a Work; empty if it has none, or does not tell."""
    return _TYPES.get(type_of_work(work), "") if isinstance(work, dist.Work) else ""


def reduction_of(values: dict[str, Any]) -> str:
    """Return the reduction among the arguments of a collective, as in ``sum``; empty if there is none."""
    op = values.get("op")
    name = getattr(getattr(op, "op", op), "name", "") if op is not None else ""
    return str(name).lower()


def _tensors(name: str, values: dict[str, Any]) -> str:
    keys = [ALIKE[name]] if name in ALIKE else _TENSORS
    for key in keys:
        value = values.get(key)
        if isinstance(value, torch.Tensor):
            return _tensor_text(value)
        if is_list(value) and value and all(isinstance(each, torch.Tensor) for each in value[:_MOST]):
            texts = [_tensor_text(each) for each in value[:_MOST]]
            more = ", ..." if len(value) > _MOST else ""
            return f"{len(value)} of {texts[0]}" if len(set(texts)) == 1 else f"[{', '.join(texts)}{more}]"
    return ""


def _tensor_text(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
