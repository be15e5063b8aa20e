"""Lazy modules, such as ``nn.LazyLinear``: their parameters have no shape before the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from monarch.exceptions import ArgumentError

swap: Any = cast("Any", torch.utils).swap_tensors


def is_lazy(tensor: Any) -> bool:
    """Return whether a parameter or buffer has no shape yet."""
    return isinstance(tensor, UninitializedParameter | UninitializedBuffer)


def lazy_parts(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that get their shapes at their first call, by name."""
    return {name: each for name, each in modules.items() if any(map(is_lazy, _own(each)))}


def move_when_run(module: nn.Module, move: Callable[[], Any]) -> None:
    """Call a function at the first call of a lazy module, once torch has given its parameters their shapes.

    Args:
        module: the lazy module.
        move: the function; returns a hook that it has added and that runs in later calls only, or None.
    """

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        hook = move()
        if hook is not None:
            hook(module, args)

    handle = module.register_forward_pre_hook(before, with_kwargs=True)


def put_in_place(old: Any, new: Any) -> Any:
    """Give a parameter the value of another one; optimizers that have it see the new one.

    Raises:
        ArgumentError: something else refers to its memory.
    """
    try:
        swap(old, new)
    except RuntimeError as error:
        raise ArgumentError(
            f"module_to_mesh: a parameter of a lazy module cannot move to the mesh at its first call: {error}; call "
            f"the module once on a small plain tensor before module_to_mesh"
        ) from error
    return old


def _own(module: nn.Module) -> list[Any]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
