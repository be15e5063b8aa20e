"""Each thread of the package has a name, and docs/threads.md lists it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from sources import parsed
from state import KNOWN_THREADS

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "runtime"
SOURCES = sorted([*RUNTIME.rglob("*.py"), *(ROOT / "monarch_kernel").rglob("*.py")])
PAGE = (ROOT / "docs" / "threads.md").read_text(encoding="utf-8")
STARTERS = {
    # Function: position of the name among its arguments, and the pattern of the name.
    "spawn_thread": (0, "{}"),
    "new_thread": (0, "{}"),
    "in_thread": (1, "monarch-{}"),
    "to_its_end": (1, "monarch-{}"),
    "lanes.post": (0, "monarch-{}"),
    "ThreadExecutor": (1, "{}"),
    "primitives.thread": (1, "{}"),
}
"""Functions that start threads under the names that their callers pass."""
REGISTRY = "monarch/_python/threads.py"
ALONE = {"monarch/_procs/launch/ray.py"}
"""Files with code that runs where this package is not installed."""
DEFINED_IN = {
    REGISTRY,
    "monarch/_node/future.py",
    "monarch/_node/services/lanes.py",
    "monarch/_actors/executors.py",
    "monarch/_wire/receiving/leadership.py",
}
"""The files that define them: there the name is an argument."""
Started = tuple[str, str]
"""The name of a thread, with ``*`` for each part that varies, and the file that starts it."""


def name_of(path: Path) -> str:
    return str(path.relative_to(RUNTIME if path.is_relative_to(RUNTIME) else ROOT))


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    return [(name_of(path), parsed(path)) for path in SOURCES]


@functools.cache
def function_calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """The calls in a file, each with the text of its function."""
    return [(ast.unparse(each.func), each) for each in ast.walk(tree) if isinstance(each, ast.Call)]


def text_of(node: ast.expr | None, tree: ast.Module) -> str:
    """The text of an expression, with ``*`` for each part that varies; finds variables and functions of the file."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = ["*" if isinstance(part, ast.FormattedValue) else text_of(part, tree) for part in node.values]
        return re.sub(r"\*+", "*", "".join(parts))
    if isinstance(node, ast.Name):
        values = [
            each.value
            for each in ast.walk(tree)
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == node.id
        ]
        return text_of(values[0], tree) if len(values) == 1 else "*"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == node.func.id]
        last = functions[0].body[-1] if functions else None
        return text_of(last.value, tree) if isinstance(last, ast.Return) else "*"
    return "*"


def names_assigned(tree: ast.Module) -> dict[str, str]:
    """The names that ``X.name = ...`` gives to threads, by X."""
    found: dict[str, str] = {}
    for each in ast.walk(tree):
        if not isinstance(each, ast.Assign):
            continue
        target, value = each.targets[0], each.value
        parts = (
            zip(target.elts, value.elts, strict=False)
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            else [(target, value)]
        )
        for to, given in parts:
            if isinstance(to, ast.Attribute) and to.attr == "name" and text_of(given, tree).startswith("monarch-"):
                found[ast.unparse(to.value)] = text_of(given, tree)
    return found


def calls_of(tree: ast.Module, name: str) -> list[ast.Call]:
    """The calls in a file of a function, such as Thread or threading.Thread."""
    found = [(function, call) for function, call in function_calls(tree) if function.rpartition(".")[2] == name]
    # It measures and starts no thread.
    return [call for function, call in found if function != "timeit.Timer"]


def has_keyword(call: ast.Call, name: str) -> bool:
    return any(keyword.arg == name for keyword in call.keywords)


def names_passed(file: str, tree: ast.Module) -> Iterator[str]:
    """The names of the threads that a file starts by functions of the package."""
    for function, call in function_calls(tree):
        for starter, (place, pattern) in STARTERS.items():
            if re.search(rf"(^|[._]){re.escape(starter)}$", function) and len(call.args) > place:
                name = pattern.format(text_of(call.args[place], tree))
                if name not in ("*", "monarch-*") or file not in DEFINED_IN:
                    yield name


def names_started(file: str, tree: ast.Module) -> set[str]:
    direct = {
        text_of(keyword.value, tree)
        for call in calls_of(tree, "Thread")
        for keyword in call.keywords
        if keyword.arg == "name"
    }
    if file in DEFINED_IN:
        direct -= {"*", "monarch-*"}
    return direct | set(names_assigned(tree).values()) | set(names_passed(file, tree))


def rows() -> Iterator[tuple[str, str]]:
    """The first and the third column of the tables of the page, with ``*`` for parts that vary."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `monarch-"):
            for file in re.findall(r"`([^`]+)`", cells[2]):
                yield re.sub(r"<[^>]+>", "*", cells[0].strip("`")), file


def test_threads_are_those_of_the_page() -> None:
    assert sorted(rows()) == sorted((name, file) for file, tree in trees() for name in names_started(file, tree))


def test_registry_starts_all_threads() -> None:
    started = {file for file, tree in trees() if calls_of(tree, "Thread")}
    assert started == {REGISTRY, *ALONE}
    assert all(has_keyword(call, "name") for file, tree in trees() for call in calls_of(tree, "Thread"))


def test_timer_has_a_name() -> None:
    for file, tree in trees():
        made = [
            each for each in ast.walk(tree) if isinstance(each, ast.Assign) and each.value in calls_of(tree, "Timer")
        ]
        assert len(made) == len(calls_of(tree, "Timer")), f"{file} does not keep a Timer, so it has no name"
        assert {ast.unparse(each.targets[0]) for each in made} <= names_assigned(tree).keys(), file


def test_thread_pool_has_a_name() -> None:
    for file, tree in trees():
        for call in calls_of(tree, "ThreadPoolExecutor"):
            assert has_keyword(call, "thread_name_prefix"), f"{file}:{call.lineno}"


def test_threads_allowed_between_tests_are_of_the_page() -> None:
    names = {name for name, _ in rows()}
    assert {name for name in KNOWN_THREADS if name.startswith("monarch-")} <= names
