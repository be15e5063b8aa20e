"""Methods of actors that are not endpoints."""

from __future__ import annotations

from typing import Any

from monarch._meshes.inside import state_of
from monarch._meshes.mesh_like import ActorMeshLike
from monarch.exceptions import ArgumentError, NotAnEndpointError


class Undecorated:
    """An actor method that is not an endpoint."""

    __slots__ = ("function", "mesh", "name")

    def __init__(self, mesh: ActorMeshLike, name: str, function: Any) -> None:
        self.mesh = mesh
        self.name = name
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotAnEndpointError(self._text())

    def __getattr__(self, name: str) -> Any:
        raise ArgumentError(f"{self._text()}; {name!r} is for endpoints")

    def _text(self) -> str:
        name = f"{state_of(self.mesh).name}.{self.name}"
        return f"{name} is a method, not an endpoint; decorate it with @endpoint, or use as_endpoint({name})"
