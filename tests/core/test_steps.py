"""Whether ranks are in step in their process groups."""

from __future__ import annotations

import pytest

from monarch._core.steps import in_step


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ({0: None, 1: None}, True),
        ({0: {"": 1, "0,1": 5}, 1: {"": 1, "0,1": 5}}, True),
        ({0: {"": 1, "0,1": 5}, 1: {"": 1, "0,1": 4}}, False),
        ({0: {"": 1, "0,1": 5}, 1: {"": 2, "0,1": 5}}, False),
        ({0: {"": 1}, 1: None}, False),
        # Groups of some ranks are compared among those.
        ({0: {"": 1, "0,2": 3}, 1: {"": 1, "1,3": 9}, 2: {"": 1, "0,2": 3}, 3: {"": 1, "1,3": 9}}, True),
        ({0: {"": 1, "0,2": 3}, 1: {"": 1, "1,3": 9}, 2: {"": 1, "0,2": 4}, 3: {"": 1, "1,3": 9}}, False),
    ],
)
def test_ranks_in_step_have_equal_counts(positions: dict[int, dict[str, int] | None], expected: bool) -> None:
    assert in_step(positions) is expected
