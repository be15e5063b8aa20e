"""The lines of user code that a thread runs, as people see them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from monarch._core.places import place_of


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("cell [3]", "cell [3] line 1"),
        ("/home/me/train.py", "train.py line 1"),
        ("/tmp/marimo_17/__marimo__cell_MJUe_.py", "cell MJUe line 1"),
    ],
)
def test_place_names_the_cell_or_the_file(file: str, shown: str) -> None:
    variables: dict[str, Any] = {"sys": sys}
    exec(compile("frame = sys._getframe()", file, "exec"), variables)
    assert place_of(variables["frame"]) == shown
