"""The list of tests that run less often."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiers import LISTS, kept, rules

ALL = [rule for text in LISTS for rule in rules(text.read_text())]


def test_listed_tests_exist() -> None:
    assert all(rules(text.read_text()) for text in LISTS)
    for rule in ALL:
        file, *names = rule.name.split("::")
        if file.endswith("/"):
            assert (Path(__file__).parent / file).is_dir(), rule.name
            continue
        text = (Path(__file__).parent / file).read_text()
        for name in names:
            assert re.search(rf"^\s*(async )?(def|class) {name}\b", text, re.M), f"there is no {rule.name}"


def test_list_names_no_test_twice() -> None:
    names = [(rule.mark, rule.name) for rule in ALL]
    assert len(set(names)) == len(names)


def test_kept_parameters_are_spread() -> None:
    assert kept(12, 3) == {0, 4, 8}
    assert kept(2, 3) == {0, 1} and kept(5, 0) == set()


@pytest.mark.parametrize("line", ["soak", "often a.py", "soak a.py keep", "soak a.py but 3"])
def test_wrong_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"tiers\.txt: expected"):
        rules(line)
