"""The collective that a thread waits in, from its Python frames."""

from __future__ import annotations

import dis
import os
import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# torch exports these without __all__.
from torch.distributed import DebugLevel, get_debug_level  # pyright: ignore[reportPrivateImportUsage]

from monarch._core.places import is_ours
from monarch._core.unjoined import CollectiveWait
from monarch._python.frames import outward
from monarch._tensors.collectives.agreeing import is_checked_now
from monarch._tensors.collectives.messages import WAITS, MessageEnd, message_in, message_of
from monarch._tensors.torch_compat import begun, default_group, group_names

_C10D = dist.distributed_c10d.__file__
_TORCH = os.path.dirname(torch.__file__) + os.sep
_WAITING = tuple(_TORCH + part + os.sep for part in ("autograd", "distributed", os.path.join("nn", "parallel")))
"""Parts of torch whose functions wait for collectives that others have begun."""
_CALLING = tuple(_TORCH + part for part in ("_ops.py", "_tensor.py", "_library" + os.sep))
"""Parts of torch that call operators."""
_DEPTH = 60
"""Maximum number of frames to search."""
_MAKERS = {"new_group", "init_process_group"}
_PEERS = {
    "send": "dst", "send_object_list": "dst", "recv": "src", "recv_object_list": "src",
}  # fmt: skip
"""Point-to-point operations, and the parameter that names the peer."""
_UNLABELED = ("", "undefined", "default_pg")
"""Descriptions of groups that nobody has described."""

ALIKE = {
    "all_reduce": "tensor", "reduce": "tensor", "broadcast": "tensor", "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor", "reduce_scatter_tensor": "input", "reduce_scatter_single": "input",
}  # fmt: skip
"""Collectives whose tensor has the same shape and dtype on all ranks, and the parameter for it."""


def waits_in(
    frame: FrameType | None, rank: int, place: tuple[int, ...], in_futex: bool, any_peer: bool = False
) -> CollectiveWait | None:
    """Return the collective that a thread waits in, None if it waits in none.

    Args:
        frame: the innermost frame of the thread.
        rank: that of this process.
        place: that of the frame.
        in_futex: whether the thread waits in a futex.
        any_peer: whether to return point-to-point operations with an unknown peer too.
    """
    try:
        return _waits_in(frame, rank, place, in_futex, any_peer)
    except (KeyError, ValueError, RuntimeError):
        # Its thread continues meanwhile, and is destroying the group.
        return None


def _waits_in(
    frame: FrameType | None, rank: int, place: tuple[int, ...], in_futex: bool, any_peer: bool
) -> CollectiveWait | None:
    if frame is None or default_group() is None:
        return None
    innermost, frame = frame, outside_receive(frame)
    function = outermost(frame)
    if function is None:
        message = message_at(innermost)
        if message is not None:
            number = begun(message.group)
            return _waits(message.operation, message.group, number, rank, place, (message.peer,))
        return _work_of_default(rank, place) if in_futex and _waits_by_name(frame) else None
    name, values = function.f_code.co_name, function.f_locals
    if name in _MAKERS:
        return _making(name, values, rank, place)
    group = default_group_of(values)
    if group is None:
        return None
    peers = _peers(name, values, group)
    # The check of a collective runs before it is counted.
    number = begun(group) + (is_checked_now(group) or get_debug_level() == DebugLevel.DETAIL)
    # A point-to-point operation with an unknown peer may be with any rank.
    if peers is None and any_peer:
        peers = ()
    return None if peers is None else _waits(name, group, number, rank, place, peers)


def tensors_in(frame: FrameType | None) -> str:
    """Return dtype and shape of the tensor of a collective that takes the same on all ranks; empty for others."""
    function = outermost(frame) if frame is not None else None
    if function is None or function.f_code.co_name not in ALIKE:
        return ""
    tensor = function.f_locals.get(ALIKE[function.f_code.co_name])
    if not isinstance(tensor, torch.Tensor):
        return ""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def message_at(frame: FrameType) -> MessageEnd | None:
    """Return the message for whose end a thread waits, None if it waits for none.

    Args:
        frame: the innermost frame of the thread.
    """
    return message_in(frame) or message_of(called_object(outside_receive(frame)))


def outside_receive(frame: FrameType) -> FrameType:
    """Return the frame that waits for a message, instead of those of this package inside it."""
    while frame.f_code in WAITS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def outermost(frame: FrameType) -> FrameType | None:
    """Return the torch.distributed function that the program has called, if the thread is inside one."""
    outermost: FrameType | None = None
    for each in outward(frame, _DEPTH):
        if is_ours(each):
            # This package wraps the function that makes groups.
            continue
        if not each.f_code.co_filename.startswith(_TORCH):
            break
        if each.f_code.co_filename == _C10D and not each.f_code.co_name.startswith("_"):
            outermost = each
    return outermost


def _waits_by_name(frame: FrameType) -> bool:
    """Return whether code waits for a Work, or in torch code that does, such as the backward pass of a parallel
    module."""
    if not frame.f_code.co_filename.startswith(_TORCH):
        return called_method(frame) == "wait"
    # Such as wait_tensor of functional collectives, behind the call of its operator.
    files = (each.f_code.co_filename for each in outward(frame, _DEPTH))
    return next((file for file in files if not file.startswith(_CALLING)), "").startswith(_WAITING)


def called_method(frame: FrameType) -> str:
    """Return the name of the method that a frame is calling; empty if it calls none, or that is not known."""
    done = [each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti]
    names = [each for each in done if each.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    if sys.version_info >= (3, 11) and done:
        # A call begins where the expression of its method begins; arguments begin later.
        names = [each for each in names if _begin(each) == _begin(done[-1])]
    return str(names[-1].argval) if names else ""


def called_object(frame: FrameType) -> Any:
    """Return the object whose method a frame is calling, if a variable or attribute names it; else None."""
    if sys.version_info < (3, 11):
        return None
    done = [each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti]
    names = [each for each in done if _begin(each) == _begin(done[-1])]
    found: Any = None
    for each in names:
        if each.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")):
            known = frame.f_locals if each.argval in frame.f_locals else frame.f_globals
            found = known.get(each.argval)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and each is not names[-1]:
            later = [one for one in names if one.offset > each.offset and one.opname in ("LOAD_ATTR", "LOAD_METHOD")]
            # The last one is the method itself. Only what is stored is read, so no code of the user runs.
            found = getattr(found, "__dict__", {}).get(each.argval) if later else found
    return found


def _begin(instruction: Any) -> tuple[int | None, int | None]:
    return instruction.positions.lineno, instruction.positions.col_offset


def default_group_of(values: dict[str, Any]) -> Any:
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


def _waits(
    name: str, group: Any, number: int, rank: int, place: tuple[int, ...], peers: tuple[int, ...] = ()
) -> CollectiveWait:
    members = tuple(dist.get_process_group_ranks(group))
    return CollectiveWait(
        rank, name, dict(group_names()).get(group, ""), members, group is default_group(), number, peers, place
    )


def labels() -> dict[str, str]:
    """Return what tells groups apart, by torch's names: a description, or a number among those of the same ranks."""
    found: dict[str, str] = {}
    alike: dict[tuple[int, ...], list[str]] = {}
    for group, name in group_names():
        if group is default_group():
            continue
        label = str(getattr(group, "group_desc", "") or "")
        found[name] = "" if label in _UNLABELED else label
        try:
            alike.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(name)
        except (KeyError, ValueError):
            # It is being destroyed.
            continue
    for names in alike.values():
        for number, name in enumerate(names, 1) if len(names) > 1 else ():
            found[name] = found[name] or str(number)
    return found


def _making(name: str, values: dict[str, Any], rank: int, place: tuple[int, ...]) -> CollectiveWait:
    ranks = values.get("ranks")
    waits = _waits(name, default_group(), 0, rank, place)
    return waits._replace(members=tuple(ranks)) if type(ranks) in (list, tuple) and ranks else waits


def _work_of_default(rank: int, place: tuple[int, ...]) -> CollectiveWait:
    """Return a wait for a Work, which does not name its group: taken as the default group."""
    group: Any = default_group()
    return _waits("", group, begun(group), rank, place)
