"""The list of tests that run less often."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiers import LIST, kept, rules


def test_listed_tests_exist() -> None:
    known = rules(LIST.read_text())
    assert known
    for rule in known:
        file, *names = rule.name.split("::")
        text = (Path(__file__).parent / file).read_text()
        for name in names:
            assert re.search(rf"^\s*(async )?(def|class) {name}\b", text, re.M), f"tiers.txt: there is no {rule.name}"


def test_list_names_no_test_twice() -> None:
    names = [(rule.mark, rule.name) for rule in rules(LIST.read_text())]
    assert len(set(names)) == len(names)


def test_kept_parameters_are_spread() -> None:
    assert kept(12, 3) == {0, 4, 8}
    assert kept(2, 3) == {0, 1} and kept(5, 0) == set()


@pytest.mark.parametrize("line", ["soak", "often a.py", "soak a.py keep", "soak a.py but 3"])
def test_wrong_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"tiers\.txt: expected"):
        rules(line)
