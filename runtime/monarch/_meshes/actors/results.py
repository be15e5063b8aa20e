"""Make the result of a call from the values of its ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from monarch._core.shapes.value_mesh import Deferred, ValueMesh
from monarch._node.replies.answers import ranks_of_peers
from monarch._node.replies.gather import Gather


def value_mesh_of(gather: Gather[Any], values: list[Any]) -> Any:
    """Return the values of a call as a ValueMesh."""
    return ValueMesh.of(gather.extent, values, partial(ranks_of_peers, gather.targets))


def single_value(gather: Gather[Any], values: list[Any]) -> Any:
    """Return the value of a call to one actor, or raise its error."""
    value = values[0]
    return cast("Deferred[Any]", value).read() if type(value) is Deferred else value
