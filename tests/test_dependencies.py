"""What the two packages declare: exactly what they import, one version, and the Pythons that they are tested with."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sources import parsed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "runtime"

OPTIONAL = {"nixl", "matplotlib", "pytest", "ray"}
"""Imported where they are installed: an extra, or a library that the program itself uses."""
UNIMPORTED = {"ipywidgets", "jupyterlab"}
"""What a person works with in a notebook; the code imports neither."""


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def declared(folder: Path) -> set[str]:
    return {name_of(each) for each in project(folder)["dependencies"]}


def modules_of(node: ast.AST) -> list[str]:
    """The modules that a statement imports, also through importlib by a constant name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module and not node.level else []
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return [str(node.args[0].value)] if called in {"import_module", "__import__"} else []
    return []


def imported(folder: Path) -> Iterator[str]:
    """The top-level packages of others that the source in a folder imports."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            yield from (module.partition(".")[0] for module in modules_of(node))


def distributions(folder: Path) -> set[str]:
    """The distributions that provide what the source in a folder imports."""
    providers = importlib.metadata.packages_distributions()
    others = set(imported(folder)) - set(sys.stdlib_module_names) - {"monarch", "monarch_kernel", ""} - OPTIONAL
    missing = others - set(providers)
    assert not missing, f"no installed distribution provides {sorted(missing)}"
    return {name_of(providers[each][0]) for each in others}


def test_runtime_declares_exactly_what_it_imports() -> None:
    assert declared(RUNTIME) == distributions(RUNTIME / "monarch")


def test_kernel_declares_exactly_what_it_imports() -> None:
    assert declared(ROOT) == distributions(ROOT / "monarch_kernel") | {"monarch-kernel-runtime"} | UNIMPORTED


def test_one_version_everywhere() -> None:
    version = project(RUNTIME)["version"]
    assert project(ROOT)["version"] == version
    assert json.loads((ROOT / "package.json").read_text())["version"] == version
    extras = [each for needs in project(ROOT)["optional-dependencies"].values() for each in needs]
    pins = [each for each in [*project(ROOT)["dependencies"], *extras] if each.startswith("monarch-kernel-runtime")]
    assert len(pins) == 3
    assert {each.partition("==")[2] for each in pins} == {version}


def test_both_licence_files_are_the_same() -> None:
    assert (ROOT / "LICENSE").read_text() == (RUNTIME / "LICENSE").read_text()


def test_declared_pythons_are_those_of_the_workflow() -> None:
    prefix = "Programming Language :: Python :: 3."
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    tested = set(re.findall(r'"(3\.\d+)"', workflow))
    for folder in (ROOT, RUNTIME):
        classifiers = project(folder)["classifiers"]
        assert {f"3.{each.removeprefix(prefix)}" for each in classifiers if each.startswith(prefix)} == tested
        assert project(folder)["requires-python"] == f">={min(tested, key=lambda each: int(each[2:]))}"


def test_an_undeclared_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    import numpy.linalg\n    from . import b\n    import os\n")
    assert distributions(tmp_path) == {"numpy"}
