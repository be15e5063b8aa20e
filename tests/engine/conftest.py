"""A mesh of 2 x 2 ranks that the tests of a file share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from monarch.distributed import Mesh


@pytest.fixture(scope="module")
def shared_mesh() -> Iterator[Any]:
    made = Mesh(shape=(2, 2), mesh_dim_names=("dp", "mp"))
    # An overloaded machine takes minutes for the first mesh.
    assert made.procs.initialized.get(300)
    # Later, connections to ranks would count as opened by a test.
    assert made.execute(os.getpid).values()
    yield made
    made.stop().get(30)


@pytest.fixture
def mesh(shared_mesh: Any, leaks: Any) -> Any:
    return shared_mesh
