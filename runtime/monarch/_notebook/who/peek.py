"""A look into a rank that continues meanwhile: the stack of its main thread, and its tensors. No user code runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple

from monarch._actors.pausing.gate import gate
from monarch._core.digests.arrays import size_of
from monarch._core.kinds import class_of
from monarch._core.places import is_ours, is_users
from monarch._node.services.registry import service
from monarch._notebook.names.user_names import user_names
from monarch._notebook.who.kinds import is_module, is_one, is_tensor, look_at
from monarch._python.frames import frame_of

MOST_TENSORS = 200
_MOST_FRAMES = 100
_SMALL = 64 << 20
"""Bytes of a tensor up to which its norm is always computed."""
_BUDGET_S = 0.1
"""Seconds that norms of small tensors may take together; one that has begun is finished."""
_GPU_S = 1.0
"""Seconds to wait for a GPU, which may be behind a collective that does not end."""
_LOOK_S = 0.002


class PeekedTensor(NamedTuple):
    """A tensor of a rank."""

    name: str
    shape: list[int]
    dtype: str
    device: str
    norm: float | None
    """None if it was not computed."""
    nans: int


class Peek(NamedTuple):
    """The answer of a rank."""

    stack: list[str]
    """Lines of the main thread, outermost first."""
    tensors: list[PeekedTensor]
    more: int
    """Tensors that are not listed."""
    without: int
    """Tensors whose norm was not computed: they are large, on a GPU, or there was no time."""


@service("peek.peek_here", "probe")
def peek_here(tensors: bool, norms: bool) -> Peek:
    """Service: look at this process while it runs.

    Args:
        tensors: whether to list its tensors.
        norms: whether to compute the norms of large tensors too, and of those on GPUs.
    """
    stack = stack_of(gate.place() or frame_of(threading.main_thread().ident or 0))
    return Peek(stack, *(_tensors(sys.modules["__main__"].__dict__, norms) if tensors else ([], 0, 0)))


# The stack


def stack_of(frame: FrameType | None) -> list[str]:
    """Return the lines of a stack, from the outermost frame of user code on, without this package's, such as the wait
    of its ``time.sleep``; all frames if no user code runs."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    first = next((at for at in range(len(frames) - 1, -1, -1) if is_users(frames[at])), None)
    shown = frames if first is None else [each for each in frames[: first + 1] if not is_ours(each)]
    return [_line_of(each) for each in reversed(shown)]


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


# Tensors


def _tensors(variables: dict[str, Any], norms: bool) -> tuple[list[PeekedTensor], int, int]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return [], 0, 0
    # One tensor under several names is listed once.
    named = {id(value): (name, value) for name, value in reversed(list(_named(variables)))}
    found = list(reversed(named.values()))
    until = time.monotonic() + _BUDGET_S
    shown = [_tensor(torch, name, value, norms, until) for name, value in found[:MOST_TENSORS]]
    without = sum(each.norm is None for each in shown)
    return shown, len(found) - len(shown), without


def _named(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a namespace, and the parameters and buffers of its modules."""
    for name in user_names(variables):
        value = variables.get(name)
        if is_tensor(value):
            yield name, value
        elif is_module(value):
            # Without methods that the class of the module may override.
            base: Any = sys.modules["torch"].nn.Module
            for part, tensor in chain(list(base.named_parameters(value)), list(base.named_buffers(value))):
                yield f"{name}.{part}", tensor


def _tensor(torch: Any, name: str, value: Any, norms: bool, until: float) -> PeekedTensor:
    norm, nans = None, 0
    try:
        if _is_plain(torch, value) and (norms or _is_cheap(value, until)):
            norm, nans = _figures(torch, value)
    except Exception:
        # A cell may resize or free it meanwhile.
        norm, nans = None, 0
    dtype = str(look_at(value, "dtype")).removeprefix("torch.")
    return PeekedTensor(name, list(map(int, look_at(value, "shape"))), dtype, str(look_at(value, "device")), norm, nans)


def _is_plain(torch: Any, value: Any) -> bool:
    """Return whether operations on a tensor run no code of its class."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return is_one(class_of(value), kinds) and value.layout is torch.strided and value.device.type in ("cpu", "cuda")


def _is_cheap(value: Any, until: float) -> bool:
    return value.device.type == "cpu" and size_of(value) <= _SMALL and time.monotonic() < until


def _figures(torch: Any, value: Any) -> tuple[float | None, int]:
    """Return the norm of a tensor, and how many of its values are NaN."""
    if value.device.type == "cpu":
        norm, nans = _computed(torch, value)
        return float(norm), int(nans)
    # A stream of its own does not wait for the user's, which may be behind a collective that does not end.
    side = torch.cuda.Stream(value.device)
    with torch.cuda.stream(side):
        norm, nans = _computed(torch, value)
        done = torch.cuda.Event()
        done.record(side)
        until = time.monotonic() + _GPU_S
        while not done.query():
            if time.monotonic() > until:
                return None, 0
            time.sleep(_LOOK_S)
        return float(norm), int(nans)


def _computed(torch: Any, value: Any) -> tuple[Any, Any]:
    with torch.no_grad():
        plain = value.detach()
        plain = plain if plain.is_floating_point() or plain.is_complex() else plain.to(torch.float32)
        return torch.linalg.vector_norm(plain), torch.isnan(plain).sum()
