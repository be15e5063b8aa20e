"""Functions of the program that make tensors of this rank, in order with its ops."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from monarch._engine.dtensor_compat import shard_of_dtensor, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from monarch._engine.issuing.encoding import Input, Template
from monarch._engine.issuing.failures import LOST, OpFailure
from monarch._engine.issuing.shard_refs import ShardRef
from monarch._engine.rank.functions.shield import of_user
from monarch._engine.rank.operations.rank_local import plain
from monarch._engine.rank.operations.table import OPERATIONS
from monarch._engine.rank.recovery.restoring import RestoresTensors
from monarch._engine.rank.reports import BatchReport
from monarch._wire.pickling import loads
from monarch.exceptions import ArgumentError, ShapeError

Meta = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""
_functions: dict[bytes | str, Any] = {}
"""Functions by name, or as they came. Used by the thread of the executor."""


class Results(NamedTuple):
    """Results of a function, until the program knows how many tensors there are.

    Attributes:
        tree: the results with the place of each tensor instead of it.
        leaves: tensors and None.
    """

    tree: Any
    leaves: list[Any]


def metas_of(results: Results) -> tuple[Any, list[Meta | None]]:
    """Return the structure of results, and shapes, strides and dtypes."""
    return results.tree, [meta(each) if each is not None else None for each in results.leaves]


def meta(tensor: torch.Tensor) -> Meta:
    """Return shape, strides and dtype of a tensor."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def named_function(name: str) -> Any:
    """Return the function of a name with its module."""
    module, _, own = name.rpartition(".")
    return getattr(import_module(module), own)


def title_of(template: Template) -> str:
    """Return what an op is called in errors."""
    if template.kind == "call":
        name = getattr(_functions.get(template.args[0]), "__name__", "")
        return f"the remote function {name}".rstrip()
    if template.kind == "check":
        return f"the check of {template.args[0]}"
    return "::".join(template.op[:2]) or template.kind


def _found(function: bytes | str) -> Any:
    known = _functions.get(function)
    if known is None:
        known = named_function(function) if isinstance(function, str) else loads(function)
        _functions[function] = known
    return known


def _call(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    packed, expected = values
    given, named = tree_map_only(Input, lambda each: plain(tensors[each.place]), loads(packed), _is_input)
    function = _found(args[0])
    with of_user():
        result = function(*given, **named)
    leaves, tree = tree_flatten(result)
    for each in leaves:
        if each is not None and not isinstance(each, torch.Tensor):
            raise ArgumentError(
                f"a remote function must return tensors, not {type(each).__name__}; use its call() for other values"
            )
    leaves = [each.detach().to(mesh.device_type) if each is not None else None for each in leaves]
    if expected is None:
        return [Results(tree_unflatten(list(range(len(leaves))), tree), leaves)]
    found = [each for each in leaves if each is not None]
    if [meta(each)[::2] for each in found] != [each[::2] for each in expected]:
        raise ShapeError(
            f"a remote function returned tensors of {[meta(each)[::2] for each in found]}; expected "
            f"{[each[::2] for each in expected]}, from propagate= or an earlier call"
        )
    return [_strided(each, wanted) for each, wanted in zip(found, expected, strict=True)]


def _is_input(value: Any) -> bool:
    return isinstance(value, Input)


def _strided(tensor: torch.Tensor, wanted: Meta) -> torch.Tensor:
    if tuple(tensor.stride()) == wanted[1]:
        return tensor
    return torch.empty_strided(*wanted[:2], dtype=wanted[2], device=tensor.device).copy_(tensor)


def _unpack(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> list[Any]:
    return [each for each in args[0].leaves if each is not None]


OPERATIONS["call"] = _call
OPERATIONS["unpack"] = _unpack


def _item(tensor: torch.Tensor) -> Any:
    return (shard_of_dtensor(tensor) if isinstance(tensor, DTensor) else tensor).item()


def with_shards(executor: RestoresTensors, function: Any, args: Any, kwargs: Any) -> BatchReport:
    """Call a function with the shards of a rank; return a report of what it returns, or of a shard without a value."""
    shards = [each for each in tree_leaves((args, kwargs), is_leaf=_is_shard) if isinstance(each, ShardRef)]
    missing = [executor.failed[each.number] for each in shards if each.number in executor.failed]
    if missing:
        return BatchReport(False, None, missing[0])
    args, kwargs = tree_map_only(
        ShardRef, lambda shard: plain(executor.values[shard.number]), (args, kwargs), _is_shard
    )
    if isinstance(function, str):
        function = named_function(function)
    return BatchReport(False, function(*args, **kwargs))


def name_of(function: Any) -> str:
    """Return the name of a function, for errors."""
    return function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)


def cancelled(rank: int) -> OpFailure:
    """Return why a function has no result that a rank has not got, or has forgotten."""
    text = "the function was cancelled on some ranks: a rank died before all of them had run it; call it again"
    return OpFailure("", 0, (rank,), LOST, text, "")


def _is_shard(value: Any) -> bool:
    return isinstance(value, ShardRef)


LOOKS: dict[str, Any] = {"item": _item, "local": plain, "results": metas_of}
"""Questions about a shard, by name."""
