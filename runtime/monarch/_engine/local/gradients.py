"""Helpers for autograd on rank-local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import torch

from monarch._core.kinds import is_a, is_list, is_tuple
from monarch._engine.dtensor_compat import tree_flatten, tree_unflatten
from monarch._engine.local.streams import streams
from monarch.exceptions import ArgumentError


def grad_function(function: Callable[..., tuple[Any, Callable[..., Any]]]) -> Callable[..., Any]:
    """Return a function with a custom gradient.

    Args:
        function: returns its result, and a function from the gradients of the tensors of the result to those of the
            tensors among the arguments, in order; None for those without one. Both run outside of autograd, and the
            second one with the stream that was active in the first.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        places = [at for at, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        kept: dict[str, Any] = {}

        class Call(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: Any) -> Any:
                for at, tensor in zip(places, tensors, strict=True):
                    leaves[at] = tensor
                given, named = tree_unflatten(leaves, tree)
                result, backward = function(*given, **named)
                if not callable(backward):
                    raise ArgumentError(
                        f"grad_function: {function.__name__} must return its result and a gradient function"
                    )
                ctx.continuation = backward
                ctx.stream = streams.active
                found, kept["tree"] = tree_flatten(result)
                return tuple(found)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                before, streams.active = streams.active, ctx.stream
                try:
                    found = ctx.continuation(*grads)
                finally:
                    streams.active = before
                given: list[Any] = list(found) if is_tuple(found) or is_list(found) else [found]
                if len(given) != len(places):
                    raise ArgumentError(
                        f"grad_function: {function.__name__} takes {len(places)} tensor arguments, but "
                        f"its gradient function returned {len(given)} gradients"
                    )
                return tuple(given)

        found = cast("Any", Call).apply(*[leaves[at] for at in places])
        return tree_unflatten(list(found), kept["tree"])

    return call


def grad_generator(
    roots: torch.Tensor | Sequence[torch.Tensor], with_respect_to: Sequence[torch.Tensor]
) -> Generator[torch.Tensor | None]:
    """Yield the gradients of the sum of some tensors, without setting ``grad``.

    Args:
        roots: a tensor or several of one element each.
        with_respect_to: the tensors whose gradients are wanted; in their order, None for one that has no effect.
    """
    given: list[Any] = [roots] if is_a(roots, torch.Tensor) else list(roots)
    yield from torch.autograd.grad(given, list(with_respect_to), allow_unused=True)
