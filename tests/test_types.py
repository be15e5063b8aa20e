"""What pyright checks, and how strictly. The lists of exceptions may only become shorter."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [ROOT / "runtime" / "monarch", ROOT / "monarch_kernel"]
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))

NOT_STRICT: set[str] = set()
"""Rooms that pyright does not check in strict mode."""
RULES_OFF = {"runtime/monarch/_kernel_api.py": ["reportUnusedImport=false"]}
"""Files with a rule that is off in all of the file."""
INSIDES = {
    # Where the insides of users' classes are read for other files.
    "runtime/monarch/_meshes/inside.py": 13,
    "runtime/monarch/_node/future.py": 4,
    "runtime/monarch/_node/replies/owed.py": 1,
    "runtime/monarch/_actors/ports.py": 1,
    "runtime/monarch/_state/rdma/buffer.py": 1,
    # The path of each message, where a function would cost a call.
    "runtime/monarch/_core/flow.py": 5,
    "runtime/monarch/_meshes/actors/adverbs.py": 11,
    "runtime/monarch/_meshes/actors/deferred_calls.py": 3,
    "runtime/monarch/_meshes/actors/reply_stream.py": 2,
    "runtime/monarch/_meshes/actors/relay.py": 1,
    # Private names of Python and pyzmq.
    "runtime/monarch/_python/frames.py": 4,
    "runtime/monarch/_python/thread_trace.py": 1,
    "runtime/monarch/_wire/accepting.py": 1,
    "runtime/monarch/_wire/deferred_signals.py": 1,
    "runtime/monarch/_wire/options.py": 1,
}
"""How many lines of a file read private names of another class or module."""
_COMMENT = re.compile(r"#\s*(?:pyright|type):\s*(.*)")


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]


def comments(path: Path) -> list[str]:
    """The comments of a file that change what a type checker reports."""
    return _COMMENT.findall(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def rooms() -> set[str]:
    return {name_of(path.parent) for path in FILES}


def not_strict(strict: list[str]) -> set[str]:
    folders = [Path(each) for each in strict]
    return {room for room in rooms() if not any(Path(room).is_relative_to(each) for each in folders)}


def test_rooms_are_checked_in_strict_mode() -> None:
    assert not_strict(settings()["strict"]) == NOT_STRICT


def test_rooms_left_out_are_found() -> None:
    assert {"monarch_kernel", "runtime/monarch/_wire/bulk"} <= not_strict(
        ["runtime/monarch/_core", "runtime/monarch/*.py"]
    )


def test_tests_and_packages_are_checked() -> None:
    assert {"runtime", "monarch_kernel", "tests"} <= set(settings()["include"])


def test_no_rule_is_off() -> None:
    rules = [name for name in settings() if name.startswith("report")]
    assert not rules, f"{rules}: name the lines instead"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_comments_name_lines_and_rules(package: Path) -> None:
    wrong: dict[str, list[str]] = {}
    for path in FILES:
        if path.is_relative_to(package):
            others = [each for each in comments(path) if not re.match(r"ignore\[[\w, -]+\]", each)]
            if others != RULES_OFF.get(name_of(path), []):
                wrong[name_of(path)] = others
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_ignored_lines_give_a_reason(package: Path) -> None:
    """In a comment above, or behind; ``INSIDES`` has the reasons for private names."""
    wrong: list[str] = []
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_relative_to(package) else []
        for number, line in enumerate(lines):
            found = re.search(r"# (?:(?:pyright|type): ignore\[.*?\]|noqa: \w+)(.*)", line)
            if found is None or "reportPrivateUsage" in line:
                continue
            above = lines[number - 1].strip() if number else ""
            behind = re.sub(r"# (?:pyright|type): ignore\[.*?\]", "", found[1]).strip(" #")
            if not behind and not above.startswith("#"):
                wrong.append(f"{name_of(path)}:{number + 1}")
    assert not wrong


def test_private_names_are_read_in_few_places() -> None:
    counts = {name_of(path): sum("reportPrivateUsage" in each for each in comments(path)) for path in FILES}
    assert {name: count for name, count in counts.items() if count} == INSIDES
