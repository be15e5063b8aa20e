"""The collective that a thread waits in, from its Python frames."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # pyright: ignore[reportPrivateImportUsage]

from monarch._core.unjoined import Waits
from monarch._tensors.torch_compat import begun, default_group, group_names

_C10D = dist.distributed_c10d.__file__
_TORCH = os.path.dirname(torch.__file__) + os.sep
_WAITING = tuple(_TORCH + part + os.sep for part in ("autograd", "distributed", os.path.join("nn", "parallel")))
"""Parts of torch whose functions wait for collectives that others have begun."""
_DEPTH = 60
"""Maximum number of frames to search."""
_MAKERS = {"new_group", "init_process_group"}
_PEERS = {
    "send": "dst", "send_object_list": "dst", "recv": "src", "recv_object_list": "src",
}  # fmt: skip
"""Point-to-point operations, and the parameter that names the peer."""


def waits_in(frame: FrameType | None, rank: int, place: tuple[int, ...], in_futex: bool) -> Waits | None:
    """Return the collective that a thread waits in, None if it waits in none.

    Args:
        frame: the innermost frame of the thread.
        rank: that of this process.
        place: that of the frame.
        in_futex: whether the thread waits in a futex.
    """
    if frame is None or default_group() is None:
        return None
    function = _outermost(frame)
    if function is None:
        return _work_of_default(rank, place) if in_futex and _waits_by_name(frame) else None
    name, values = function.f_code.co_name, function.f_locals
    if name in _MAKERS:
        return _making(name, values, rank, place)
    group = _group_of(values)
    if group is None:
        return None
    peers = _peers(name, values, group)
    # The check of a collective runs before it is counted.
    number = begun(group) + (get_debug_level() == DebugLevel.DETAIL)
    # A point-to-point operation with an unknown peer may be with any rank.
    return None if peers is None else _waits(name, group, number, rank, place, peers)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _outermost(frame: FrameType) -> FrameType | None:
    """Return the torch.distributed function that the program has called, if the thread is inside one."""
    found: FrameType | None = None
    for each in _frames(frame):
        if not each.f_code.co_filename.startswith(_TORCH):
            break
        if each.f_code.co_filename == _C10D and not each.f_code.co_name.startswith("_"):
            found = each
    return found


def _waits_by_name(frame: FrameType) -> bool:
    """Return whether code waits for a Work, or in torch code that does, such as the backward pass of a parallel
    module."""
    file = frame.f_code.co_filename
    return file.startswith(_WAITING) if file.startswith(_TORCH) else called_method(frame) == "wait"


def called_method(frame: FrameType) -> str:
    """Return the name of the method that a frame is calling; empty if it calls none, or that is not known."""
    done = [each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti]
    names = [each for each in done if each.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    if sys.version_info >= (3, 11) and done:
        # A call begins where the expression of its method begins; arguments begin later.
        names = [each for each in names if _begin(each) == _begin(done[-1])]
    return str(names[-1].argval) if names else ""


def _begin(instruction: Any) -> tuple[int | None, int | None]:
    return instruction.positions.lineno, instruction.positions.col_offset


def _group_of(values: dict[str, Any]) -> Any:
    group = values.get("group")
    if issubclass(type(group), dist.ProcessGroup):
        return group
    return default_group()


def _peers(name: str, values: dict[str, Any], group: Any) -> tuple[int, ...] | None:
    parameter = _PEERS.get(name)
    if parameter is None:
        return ()
    peer, in_group = values.get(parameter), values.get(f"group_{parameter}")
    if type(peer) is int:
        return (peer,)
    return (dist.get_global_rank(group, in_group),) if type(in_group) is int else None


def _waits(name: str, group: Any, number: int, rank: int, place: tuple[int, ...], peers: tuple[int, ...] = ()) -> Waits:
    members = tuple(dist.get_process_group_ranks(group))
    return Waits(
        rank, name, dict(group_names()).get(group, ""), members, group is default_group(), number, peers, place
    )


def _making(name: str, values: dict[str, Any], rank: int, place: tuple[int, ...]) -> Waits:
    ranks = values.get("ranks")
    waits = _waits(name, default_group(), 0, rank, place)
    return waits._replace(members=tuple(ranks)) if type(ranks) in (list, tuple) and ranks else waits


def _work_of_default(rank: int, place: tuple[int, ...]) -> Waits:
    """Return a wait for a Work, which does not name its group: taken as the default group."""
    group: Any = default_group()
    return _waits("", group, begun(group), rank, place)
