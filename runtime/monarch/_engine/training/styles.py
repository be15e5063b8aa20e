"""Parallel styles of torch, such as ``ColwiseParallel``, for modules whose parameters are distributed tensors.

torch applies them to the shard of a rank. Here the program sees whole tensors, so a style is a choice of placements for
the parameters, and of those of inputs and outputs along one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from monarch._engine.dtensor_compat import tree_map
from monarch._engine.layouts.specs import Placements
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.redistribution import to_placements
from monarch.exceptions import ArgumentError

_KNOWN = (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    PrepareModuleInputOutput,
)


def check_style(style: ParallelStyle, module: nn.Module, name: str) -> None:
    """Raise if a style cannot be applied to a module.

    Raises:
        ArgumentError: the style is not one of torch's, or does not know the module.
    """
    if not isinstance(style, _KNOWN):
        raise ArgumentError(f"plan: expected a style of torch.distributed.tensor.parallel, got {style!r} for {name}")
    if isinstance(style, ColwiseParallel | RowwiseParallel) and not isinstance(module, nn.Linear | nn.Embedding):
        raise ArgumentError(
            f"plan: {type(style).__name__} is for Linear and Embedding, got {type(module).__name__} for {name}; give "
            f"specs of its parameters instead"
        )


def dim_of(style: ParallelStyle, module: nn.Module, name: str) -> int | None:
    """Return the dim of a parameter that a style shards; None for none. The style was checked."""
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    if isinstance(style, ColwiseParallel):
        return 1 if isinstance(module, nn.Embedding) else 0
    if isinstance(module, nn.Embedding):
        return 0
    return 1 if name == "weight" else None


def apply_hooks(style: ParallelStyle, module: nn.Module, axis: int) -> None:
    """Shard the inputs and outputs of a module as a style says, along one axis of their mesh."""
    inputs, named, outputs = _layouts(style, module)
    if inputs or named:

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            # Further arguments stay as they are.
            placed = tuple(_placed(arg, wanted, axis) for arg, wanted in zip(args, _padded(inputs, len(args))))  # noqa: B905
            return placed, {key: _placed(arg, named.get(key), axis) for key, arg in kwargs.items()}

        module.register_forward_pre_hook(before, with_kwargs=True)
    if outputs:

        def after(_: nn.Module, args: Any, result: Any) -> Any:
            if isinstance(result, Tensor):
                return _placed(result, outputs[0], axis)
            wanted = _padded(outputs, len(result))
            return type(result)(_placed(each, want, axis) for each, want in zip(result, wanted, strict=True))

        module.register_forward_hook(after)


def _layouts(style: Any, module: nn.Module) -> tuple[Sequence[Any], dict[str, Any], Sequence[Any]]:
    """Return the placements of inputs by position, by name, and of outputs."""
    if isinstance(style, PrepareModuleInputOutput):
        first, named, _ = _layouts(style.prepare_module_input, module)
        return first, named, _layouts(style.prepare_module_output, module)[2]
    if isinstance(style, ColwiseParallel):
        return (Replicate(),), {}, tuple(style.output_layouts)
    if isinstance(style, RowwiseParallel):
        wanted = Replicate() if isinstance(module, nn.Embedding) else Shard(-1)
        return (wanted,), {}, tuple(style.output_layouts)
    if isinstance(style, SequenceParallel):
        return tuple(style.sequence_sharding), {}, ()
    if isinstance(style, PrepareModuleInput):
        given: Any = style.desired_input_layouts
        return tuple(given or ()), dict(style.desired_input_kwarg_layouts), ()
    assert isinstance(style, PrepareModuleOutput)
    return (), {}, tuple(style.desired_output_layouts)


def _padded(layouts: Sequence[Any], count: int) -> list[Any]:
    return [*layouts, *[None] * max(0, count - len(layouts))]


def _placed(value: Any, wanted: Placement | None, axis: int) -> Any:
    """Return a value with its tensors sharded along an axis as wanted."""
    if wanted is None:
        return value

    def change(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        target: Placement = wanted
        if isinstance(wanted, Shard):
            target = Shard(int(cast("Any", wanted).dim) % each.dim())
        placements = list(each.placements)
        placements[axis] = target
        return to_placements(each, tuple(placements))

    return tree_map(change, value)


def sharded(placements: Placements, axis: int, dim: int | None) -> Placements:
    """Return placements with one axis that shards a dim."""
    found = list(placements)
    found[axis] = Replicate() if dim is None else Shard(dim)
    return tuple(found)
