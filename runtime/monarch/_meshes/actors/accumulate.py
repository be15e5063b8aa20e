"""Fold the answers of a mesh into one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar, cast

from monarch._actors.endpoint import EndpointLike
from monarch._meshes.actors.adverbs import Endpoint
from monarch._meshes.inside import node_of, state_of
from monarch._node.future import Future, in_thread

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class Accumulator(Generic[P, R, A]):
    """Calls an endpoint on all actors and folds what they return, in the order in which it arrives.

    Args:
        endpoint: the endpoint to call.
        identity: the initial value.
        combine: returns the next value from the current one and an answer.
    """

    def __init__(self, endpoint: EndpointLike[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = cast("Endpoint[P, R]", endpoint)
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Send now and return a future of the folded answers, which fails with the first error of an actor."""
        answers = self._endpoint.stream(*args, **kwargs)

        def fold() -> A:
            value = self._identity
            for answer in answers:
                value = self._combine(value, answer.get())
            return value

        endpoint = self._endpoint
        return in_thread(node_of(endpoint.mesh), f"{state_of(endpoint.mesh).name}.{endpoint.name}() accumulated", fold)
