"""torch's own samples for each op, run on sharded tensors: by DTensor on the ranks, and by distributed tensors."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

SAMPLES = 6
"""Samples of an op, taken evenly from those of torch."""
LARGEST = 1 << 16
"""Elements of a tensor of a sample; larger ones take long and show nothing more."""
ABORTS = {"fft_ihfft", "fft_ihfft2", "fft_ihfftn", "masked_logsumexp"}
"""Ops with samples at which torch's own DTensor ends the process: gloo gets a size that it does not expect. Others do
on some meshes, and are found there; those take a new mesh each."""
RANDOM = (
    "bernoulli",
    "dropout",
    "rand",
    "normal",
    "uniform",
    "exponential",
    "cauchy",
    "geometric",
    "multinomial",
    "rrelu",
    "empty",
)
"""Parts of names of ops whose values are drawn: their shapes and dtypes are compared."""

DIVISIONS: dict[int, dict[str, Callable[[int, int], list[Any]]]] = {
    1: {
        "rows": lambda at, ndim: [_shard(0, ndim)],
        "columns": lambda at, ndim: [_shard(-1, ndim)],
        "first tensor": lambda at, ndim: [_shard(0, ndim) if at == 0 else Replicate()],
        "whole": lambda at, ndim: [Replicate()],
    },
    2: {
        "rows and columns": lambda at, ndim: [_shard(0, ndim), _shard(-1, ndim)],
        "rows twice": lambda at, ndim: [_shard(0, ndim), _shard(0, ndim)],
        "first tensor": lambda at, ndim: [_shard(0, ndim) if at == 0 else Replicate(), Replicate()],
    },
}
"""By the number of axes of the mesh: how tensor number ``at`` of a sample is sharded."""


def _shard(dim: int, ndim: int) -> Any:
    return Shard(dim % ndim) if ndim else Replicate()


@cache
def ops() -> dict[str, Any]:
    """Return torch's descriptions of ops that have samples of float32, by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        op.formatted_name: op
        for op in op_db
        if torch.float32 in op.supported_dtypes("cpu") and op.formatted_name not in ABORTS
    }


def samples(op: Any) -> list[Any]:
    """Return some samples, always the same."""
    torch.manual_seed(0)
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
            leaves = [each for each in tree_leaves((sample.input, sample.args, sample.kwargs))]
            tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
            if tensors and all(_is_plain(each) for each in tensors):
                found.append(sample)
            if len(found) == 40:
                break
    step = max(1, len(found) // SAMPLES)
    return found[::step][:SAMPLES]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() <= LARGEST and not tensor.is_quantized


def is_random(name: str) -> bool:
    return any(part in name for part in RANDOM)


def outcome(op: Any, sample: Any, division: Callable[[int, int], list[Any]], distribute: Any, gather: Any) -> str:
    """Return "ok", or the stage and cause of a failure, for a sample on sharded tensors.

    Args:
        op: of torch.
        sample: of its arguments.
        division: placements by the number of the tensor and its dims.
        distribute: makes a sharded tensor of one and placements.
        gather: returns the value of a sharded tensor.
    """
    arguments = sample.input, list(sample.args), dict(sample.kwargs)
    expected, expected_grads = _run(op, arguments, lambda tensor: tensor.detach().clone())
    if isinstance(expected, str):
        return "no sample"
    count = iter(range(1000))
    found, grads = _run(op, arguments, lambda tensor: distribute(tensor.detach(), division(next(count), tensor.dim())))
    if isinstance(found, str):
        return f"forward: {found}"
    told = _compared(found, expected, gather, is_random(op.name))
    if told:
        return f"forward: {told}"
    if isinstance(expected_grads, str):
        return "ok"
    if isinstance(grads, str):
        return f"backward: {grads}"
    told = _compared(grads, expected_grads, gather, is_random(op.name))
    return f"backward: {told}" if told else "ok"


def _run(op: Any, arguments: Any, make: Callable[[torch.Tensor], Any]) -> tuple[Any, Any]:
    """Return results and gradients, or the text of an error for each."""
    leaves: list[Any] = []

    def convert(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = make(value)
        if value.requires_grad:
            leaves.append(made.requires_grad_())
        return made

    torch.manual_seed(1)
    try:
        given, args, kwargs = tree_map(convert, arguments)
        result = op(given, *args, **kwargs)
    except Exception as error:
        return _text(error), ""
    if not leaves:
        return result, "no gradients"
    outs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not outs:
        return result, "no gradients"
    try:
        total: Any = sum((each.abs() if each.is_complex() else each).sum() for each in outs)
        return result, list(torch.autograd.grad(total, leaves, allow_unused=True))
    except Exception as error:
        return result, _text(error)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"[:600]


def _compared(found: Any, expected: Any, gather: Any, shapes_only: bool) -> str:
    """Return what differs, or nothing."""
    try:
        left, right = tree_flatten(found)[0], tree_flatten(expected)[0]
        if len(left) != len(right):
            return f"ValueError: {len(left)} results instead of {len(right)}"
        for one, other in zip(left, right, strict=True):
            value = gather(one).detach() if isinstance(one, torch.Tensor) else one
            if shapes_only and isinstance(value, torch.Tensor):
                assert value.shape == other.shape and value.dtype == other.dtype, "another shape or dtype"
            elif isinstance(value, torch.Tensor):
                torch.testing.assert_close(
                    value, other.detach(), atol=2e-4, rtol=2e-3, equal_nan=True, check_stride=False
                )
            else:
                assert value == other or value != value, f"{value} instead of {other}"
    except AssertionError as error:
        return f"other values: {str(error).splitlines()[0]}"
    except Exception as error:
        return _text(error)
    return ""


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_dtensor(name: str) -> list[tuple[int, str, str]]:
    """Return the outcome of each sample and division by torch's DTensor; runs on each rank."""
    from monarch.distributed import device_mesh

    mesh = device_mesh()

    def distribute(tensor: Any, placements: Any) -> Any:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    return list(outcomes(name, mesh.ndim, distribute, whole))


def outcomes(name: str, ndim: int, distribute: Any, gather: Any) -> Iterator[tuple[int, str, str]]:
    """Yield the number of the sample, the division and the outcome."""
    op = ops()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at, sample in enumerate(samples(op)):
            for division, placements in DIVISIONS[ndim].items():
                yield at, division, outcome(op, sample, placements, distribute, gather)


CAUSES = {
    "torch's DTensor ends its process, or never ends": r"ends its process",
    "torch has no sharding rule for the op": r"does not have a sharding strategy|no rule|not have a sharding",
    "the shape of the result depends on values": r"shape of its result depends|data.dependent",
    "the op would move a sharded dim; redistribute first": r"redistribut|unevenly sharded|would remove or reshape",
    "the op changes a tensor in place to other placements": r"in.place",
    "torch's rule fails": r"torch's rule fails|sharding_prop|Sharding propagation failed",
    "the op fails on the ranks": r"failed on rank",
    "other values, as with DTensor": r"other values",
    "the op takes no generator, or another device": r"generator|device",
}
"""Patterns of texts of errors, by cause."""


def cause_of(found: str) -> str:
    """Return the cause of an outcome, in a few words."""
    return next((cause for cause, pattern in CAUSES.items() if re.search(pattern, found, re.I)), "another error")


def add_known(path: Path, mesh: str, causes: dict[str, list[str]]) -> None:
    """Add ops that do not run to the list."""
    known: dict[str, dict[str, list[str]]] = json.loads(path.read_text()) if path.exists() else {}
    for cause, names in causes.items():
        of_cause = known.setdefault(mesh, {}).setdefault(cause, [])
        of_cause[:] = sorted({*of_cause, *names})
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
