"""Checked collectives: the ranks of a group compare kind, shapes and dtypes before each one begins.

All ways to a collective pass torch's dispatcher: functions of torch.distributed, functional collectives, and C++ such
as the reducer of DistributedDataParallel. A kernel in front of those of the backends compares the calls by the store of
the group, and is removed when the check is turned off. Messages (``send`` and ``recv``) are left alone.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

import torch

from monarch._core.collective_calls import CollectiveCall, TensorInfo
from monarch._core.kinds import is_list
from monarch._core.places import is_users
from monarch._core.position import Frame
from monarch._python.frames import caller
from monarch._tensors.collectives import waiting
from monarch._tensors.collectives.agreeing import agree_all
from monarch._tensors.collectives.details import reduction_of
from monarch._tensors.torch_compat import before_backends, group_of_operator

_KINDS = {
    "allreduce_": ("all_reduce", "tensors", ""),
    "allreduce_coalesced_": ("all_reduce_coalesced", "tensors", ""),
    "broadcast_": ("broadcast", "tensors", ""),
    "reduce_": ("reduce", "tensors", ""),
    "barrier": ("barrier", "", ""),
    "_allgather_base_": ("all_gather_into_tensor", "input_tensor", ""),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", "inputs", ""),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", "input_tensor", ""),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "inputs", ""),
    "allgather_coalesced_": ("all_gather_coalesced", "input_list", ""),
    "allgather_": ("all_gather", "input_tensors", "output_tensors"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors"),
    "gather_": ("gather", "input_tensors", "output_tensors"),
    "scatter_": ("scatter", "input_tensors", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": ("all_to_all_single", "input", "output"),
}
"""By operator of torch: what users call it, and its parameters for what a rank gives and receives."""
_lock = threading.Lock()
# Under the lock, both.
_kernels: Any = None
"""Removes the kernels; None while nothing is checked."""
_set_at = 0
"""When the check was last turned on or off, in the program's time; ranks that join later adopt the newest setting."""


def set_checks(on: bool, at: int) -> None:
    """Check the collectives of this process from now on, or no longer.

    Args:
        at: when that was decided; an older decision than the last one is ignored.
    """
    global _kernels, _set_at
    with _lock:
        if at < _set_at:
            return
        _set_at = at
        if on and _kernels is None:
            _kernels = before_backends({name: _check for name in _KINDS})
        elif not on and _kernels is not None:
            remove, _kernels = _kernels, None
            remove()


def setting() -> str:
    """Return whether collectives are checked, and since when, as text for other ranks."""
    with _lock:
        return f"{_set_at} {int(_kernels is not None)}"


def adopt(settings: list[str]) -> None:
    """Adopt the newest of the settings of all ranks of a new group."""
    at, on = max((int(each.split()[0]), int(each.split()[1])) for each in settings)
    set_checks(bool(on), at)


def _check(operator: str, values: dict[str, Any]) -> None:
    """Compare a collective that is about to begin with those of the other ranks."""
    group = group_of_operator(values)
    if group.size() > 1:
        agree_all(group, _called(operator, values, group, caller()))


def _called(operator: str, values: dict[str, Any], group: Any, frame: FrameType) -> CollectiveCall:
    kind, given, taken = _KINDS[operator]
    root = values.get("root_rank", -1)
    inputs, outputs = _tensors(values.get(given)), _tensors(values.get(taken))
    if operator == "alltoall_base_":
        inputs = _parts(inputs[0], values["input_split_sizes"], group.size())
        outputs = _parts(outputs[0], values["output_split_sizes"], group.size())
    elif operator in ("gather_", "scatter_"):
        # torch wants a list on the other ranks too, which nobody reads.
        listed = operator == "gather_"
        if group.rank() != root:
            inputs, outputs = (inputs, ()) if listed else ((), outputs)
    function = waiting.outermost(frame)
    return CollectiveCall(
        kind, reduction_of(function.f_locals) if function is not None else "", root, inputs, outputs, _place(frame)
    )


def _tensors(value: Any) -> tuple[TensorInfo, ...]:
    if isinstance(value, torch.Tensor):
        return (TensorInfo(str(value.dtype).removeprefix("torch."), tuple(value.shape)),)
    return tuple(each for one in value for each in _tensors(one)) if is_list(value) else ()


def _parts(whole: TensorInfo, sizes: list[int], count: int) -> tuple[TensorInfo, ...]:
    """Return the parts of a tensor for each rank; without sizes, they are equal."""
    first, *rest = whole.shape or (1,)
    return tuple(TensorInfo(whole.dtype, (size, *rest)) for size in sizes or [first // count] * count)


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code; empty in a thread of torch, as in a backward pass on a GPU."""
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    code = frame.f_code
    return str(Frame(code.co_filename, frame.f_lineno, code.co_name, ""))
