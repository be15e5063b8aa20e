"""The architecture: what each room may import, how long a file may be, what the public modules promise."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sources import parsed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "runtime" / "monarch"

# Ground first. A public module is one whose name has no leading underscore; it stands on the top floor.
FLOORS = [
    "_config",
    "_core",
    "_python",
    "_wire",
    "_procs",
    "_tensors",
    "_node",
    "_actors",
    "_groups",
    "_meshes",
    "_supervision",
    "_session",
    "_state",
    "_telemetry",
    "_debug",
    "_engine",
    "_notebook",
    "_services",
    "_kernel_api",
    "public",
    "__main__",
]
TOP_LEVEL = {
    *("monarch_kernel", "labextension", "runtime", "notebooks", "tests", "pyproject.toml", "package.json"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "Makefile", "benchmarks", "docs"),
    *(".ci", ".github", ".gitignore", ".pre-commit-config.yaml", "package-lock.json", "biome.json", "typings"),
}
KERNEL_FLOORS = [
    "kernel_like",
    "compat",
    "grammar",
    "source",
    "calls",
    "output",
    "meshes",
    "cells",
    "editing",
    "commands",
    "debug",
    "dap",
    "views",
    "magics",
    "monarch_kernel",
    "late_magics",
    "kernel",
    "__main__",
]
"""Rooms and single files of the notebook's side; ``monarch_kernel`` is its ``__init__.py``."""
MOST_FILES = 25
"""Files of a room, besides its ``__init__.py``."""
MOST_LETTERS = 60
"""Of the name of a test."""
# Every floor may import these. In return they import nothing of the package but each other and the lowest floor.
GROUND = {"monarch.exceptions", "monarch.config"}

JUPYTER = {
    "IPython",
    "anywidget",
    "comm",
    "ipykernel",
    "ipywidgets",
    "nbclient",
    "nbconvert",
    "nbformat",
    "notebook",
    "traitlets",
    "widgetsnbextension",
}

FILES = sorted(PACKAGE.rglob("*.py"))
KERNEL = sorted((ROOT / "monarch_kernel").rglob("*.py"))
"""The notebook's side."""


def _dotted(path: Path) -> list[str]:
    """The parts of the name of a module."""
    parts = ["monarch", *path.relative_to(PACKAGE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


PUBLIC = sorted(
    ".".join(parts) for parts in map(_dotted, PACKAGE.rglob("*.py")) if not any(part.startswith("_") for part in parts)
)


class Import(NamedTuple):
    """One imported module, as a dotted name, and where that is written."""

    module: str
    line: int
    typing_only: bool
    """Under ``if TYPE_CHECKING:``."""
    deferred: bool
    """Inside a function, so not done when the file is imported."""


def module_name(path: Path) -> str:
    parts = path.relative_to(base_of(path)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def base_of(path: Path) -> Path:
    """The folder that a file is imported from."""
    return PACKAGE.parent if path.is_relative_to(PACKAGE) else ROOT


def is_module(name: str) -> bool:
    paths = [base.joinpath(*name.split(".")) for base in (PACKAGE.parent, ROOT)]
    return any(path.with_suffix(".py").exists() or path.is_dir() for path in paths)


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


@functools.cache
def imports_of(path: Path) -> list[Import]:
    """Every import in a file, also those in functions and those by a constant name through importlib."""
    return [*found_imports(path)]


def found_imports(path: Path) -> Iterator[Import]:
    name = module_name(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]

    def targets(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from monarch import actor` imports a module; `from monarch._core import Shape` does not.
            whole = [f"{base}.{alias.name}" for alias in node.names]
            return [full if is_module(full) else base for full in whole]
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            target = node.args[0].value
            if called in {"import_module", "__import__"} and isinstance(target, str):
                return [target]
        return []

    def walk(node: ast.AST, typing_only: bool, deferred: bool) -> Iterator[Import]:
        for target in targets(node):
            yield Import(target, getattr(node, "lineno", 0), typing_only, deferred)
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for child in node.body:
                yield from walk(child, True, deferred)
            for child in node.orelse:
                yield from walk(child, typing_only, deferred)
            return
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, typing_only, deferred or inside)

    yield from walk(parsed(path), False, False)


def place(path: Path, found: Import) -> str:
    return f"{path.relative_to(ROOT)}:{found.line}"


def room_of(module: str) -> str:
    """``_core`` for ``monarch._core.shape``, ``public`` for ``monarch`` and ``monarch.actor``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1].startswith("_") else "public"


def kernel_room_of(module: str) -> str:
    """``meshes`` for ``monarch_kernel.meshes.registry``, ``monarch_kernel`` for the package itself."""
    return module.split(".")[1] if "." in module else module


def is_ours(module: str) -> bool:
    return module == "monarch" or module.startswith("monarch.")


def in_packages(module: str, packages: set[str]) -> bool:
    top = module.partition(".")[0]
    return top in packages


def test_house_test_sees_files() -> None:
    assert {"monarch", "monarch.actor", "monarch.exceptions"} <= set(PUBLIC)
    assert len(FILES) > len(PUBLIC)


def test_top_level_has_what_belongs_there() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {path.partition("/")[0] for path in listed.splitlines()}
    assert found <= TOP_LEVEL, f"{sorted(found - TOP_LEVEL)}: move them into a folder, or remove them"


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(module_name(path)) for path in FILES}
    assert rooms <= set(FLOORS), f"no floor is known for {sorted(rooms - set(FLOORS))}"
    rooms = {kernel_room_of(module_name(path)) for path in KERNEL}
    assert rooms == set(KERNEL_FLOORS), f"floors and rooms differ: {sorted(rooms ^ set(KERNEL_FLOORS))}"


def upward(imports: Iterable[tuple[str, str, str]], floors: list[str], room: Callable[[str], str]) -> list[str]:
    """Return lines about the imports that go up, of those given as place, importing module and imported module."""
    return [
        f"{where}: {room(here)} is below {room(module)}, so not {module}"
        for where, here, module in imports
        if floors.index(room(module)) > floors.index(room(here))
    ]


def test_imports_go_down() -> None:
    ours = [
        (place(path, found), module_name(path), found.module)
        for path in FILES
        for found in imports_of(path)
        if is_ours(found.module) and found.module not in GROUND
    ]
    wrong = [
        f"{where}: {here} may import nothing of ours, not {module}"
        for where, here, module in ours
        if here in GROUND and room_of(module) != FLOORS[0]
    ]
    wrong += upward([each for each in ours if each[1] not in GROUND], FLOORS, room_of)
    assert not wrong, "\n".join(wrong)


def test_imports_of_the_kernel_go_down() -> None:
    imports = [
        (place(path, found), module_name(path), found.module)
        for path in KERNEL
        for found in imports_of(path)
        if in_packages(found.module, {"monarch_kernel"})
    ]
    wrong = upward(imports, KERNEL_FLOORS, kernel_room_of)
    assert not wrong, "\n".join(wrong)


def test_upward_imports_are_found() -> None:
    imports = [("a.py:1", "k.low.a", "k.high.b"), ("b.py:1", "k.high.b", "k.low.a"), ("b.py:2", "k.high.b", "k.high.c")]
    assert upward(imports, ["low", "high"], kernel_room_of) == ["a.py:1: low is below high, so not k.high.b"]


def test_only_the_top_of_the_kernel_looks_the_magics_up() -> None:
    """A room below them gets what it needs of them as an argument; a look-up would be an import in disguise."""
    top = KERNEL_FLOORS[KERNEL_FLOORS.index("magics") :]
    below = [path for path in KERNEL if kernel_room_of(module_name(path)) not in top]
    assert not [path for path in below if "MeshMagics" in path.read_text(encoding="utf-8")]


PURE = {
    "os": {"os.path", "os.sep"},
    "signal": {"signal.Signals"},
    "threading": {"threading.RLock"},
    "time": {"time.strftime", "time.localtime"},
}
"""What ``_core`` may use of modules that do more: names, the text of paths and times, and locks of its own state."""
IMPURE = {
    "asyncio",
    "ctypes",
    "io",
    "multiprocessing",
    "pathlib",
    "queue",
    "select",
    "shutil",
    "socket",
    "subprocess",
    "zmq",
}


def impurities(text: str) -> list[str]:
    """Return what some code uses that ``_core`` may not: I/O, threads and clocks."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names if each.name not in PURE]
        elif isinstance(node, ast.Attribute):
            names = [name for name in [ast.unparse(node)] if name.partition(".")[0] in PURE or name.startswith("sys._")]
        else:
            names = [node.id] if isinstance(node, ast.Name) and node.id == "open" else []
        for name in names:
            top = name.partition(".")[0]
            # `os.path` is part of `os.path.join`.
            is_allowed = top not in PURE or any(map(name.startswith, PURE[top]))
            if not is_allowed or top in IMPURE or name == "open" or name.startswith("sys._"):
                found.append(name)
    return found


def test_core_is_pure() -> None:
    core = [path for path in FILES if room_of(module_name(path)) == "_core"]
    wrong = {path: found for path in core if (found := impurities(path.read_text("utf-8")))}
    assert not wrong, "\n".join(f"{path.relative_to(ROOT)}: {', '.join(found)}" for path, found in wrong.items())


def test_impurities_are_found() -> None:
    code = "import os, time, ctypes\nfrom threading import RLock, Thread\nos.path.join('a'), os.getpid(), open('x')"
    assert sorted(impurities(code)) == ["ctypes", "open", "os.getpid", "threading.Thread"]


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in edges.get(module, ()):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            cycle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(cycle) > 1:
                found.append(sorted(cycle))

    for module in edges:
        if module not in index:
            visit(module)
    return found


def test_no_modules_import_each_other_in_a_cycle() -> None:
    files = {module_name(path): path for path in [*FILES, *KERNEL]}
    edges = {
        name: {found.module for found in imports_of(path) if found.module in files and found.module != "monarch"}
        for name, path in files.items()
    }
    assert not cycles(edges), "\n".join(" <-> ".join(cycle) for cycle in cycles(edges))


def inner_room(package: str, module: str) -> str:
    """``monarch._engine.rank`` for all modules in that folder; a file of the package itself is a room of its own."""
    return ".".join(module.split(".")[: package.count(".") + 2])


@pytest.mark.parametrize("package", ["monarch._engine", "monarch._engine.rank", "monarch._notebook"])
def test_inner_rooms_import_each_other_in_no_cycle(package: str) -> None:
    files = {module_name(path): path for path in FILES if module_name(path).startswith(f"{package}.")}
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        rooms = {inner_room(package, found.module) for found in imports_of(path) if found.module in files}
        edges.setdefault(inner_room(package, name), set()).update(rooms - {inner_room(package, name)})
    assert edges
    assert not cycles(edges), "\n".join(" <-> ".join(cycle) for cycle in cycles(edges))


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


TWICE = {
    # A message between processes, or with a view, beside what handles it.
    *("Level", "Probe", "Refused", "Taken", "Targets", "Watch"),
    # The same command of two state machines.
    *("Free", "Interrupt", "Look"),
    # The names of a public API and of a peer's.
    *("KubernetesJob", "Mesh"),
    # What ``wiring.py`` sets in a file below.
    "Above",
}
"""The only names that two classes have. Take out what is renamed; add nothing."""


def test_a_name_means_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path in [*FILES, *KERNEL]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    several = {name: where for name, where in places.items() if len(where) > 1}
    wrong = [f"{name}: {', '.join(where)}" for name, where in several.items() if name not in TWICE or len(where) > 2]
    assert not wrong, "\n".join(wrong)
    assert not TWICE - set(several), f"no longer needed: {TWICE - set(several)}"


def test_no_room_has_too_many_files() -> None:
    rooms = Counter(path.parent for path in [*FILES, *KERNEL] if path.stem != "__init__")
    wrong = [f"{room.relative_to(ROOT)}: {count} files" for room, count in rooms.items() if count > MOST_FILES]
    assert not wrong, "\n".join(wrong)


def test_the_runtime_does_not_import_the_notebooks_side() -> None:
    wrong = [
        f"{place(path, found)}: {found.module}"
        for path in FILES
        for found in imports_of(path)
        if in_packages(found.module, {"monarch_kernel"})
    ]
    assert not wrong, "\n".join(wrong)


def test_only_tensors_and_engine_import_torch_at_module_level() -> None:
    wrong = [
        f"{place(path, found)}: {found.module}"
        for path in FILES
        if room_of(module_name(path)) not in ("_tensors", "_engine")
        for found in imports_of(path)
        if in_packages(found.module, {"torch"}) and not found.deferred and not found.typing_only
    ]
    assert not wrong, "\n".join(wrong)


def test_the_runtime_imports_no_jupyter_package() -> None:
    wrong = [
        f"{place(path, found)}: {found.module}"
        for path in FILES
        for found in imports_of(path)
        if in_packages(found.module, JUPYTER) or found.module.startswith("jupyter")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in [*FILES, *KERNEL]}
    wrong = [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in lengths.items() if lines > 600]
    assert not wrong, "\n".join(wrong)


def test_names_of_tests_are_short() -> None:
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [(path, name) for path in tests for name in re.findall(r"def (test_\w+)", path.read_text())]
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, name in names if len(name) > MOST_LETTERS]
    assert len(names) > 1000
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["monarch", "monarch.actor"])
def test_an_import_brings_neither_torch_nor_jupyter(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    loaded = set(ran.stdout.split())
    assert "monarch" in loaded
    wrong = {name for name in loaded if name in {"torch", *JUPYTER} or name.startswith("jupyter")}
    assert not wrong, f"import {module} also imports {sorted(wrong)}"


@pytest.mark.parametrize("module", ["monarch", "monarch._kernel_api"])
def test_no_name_of_a_program_brings_torch(module: str) -> None:
    """It takes more than a second to import, which the first heal of a program took. Names of tensors need it."""
    names = "[n for n, home in api._HOME.items() if home != 'monarch.tensor']"
    code = f"import sys, {module} as api; [getattr(api, n) for n in {names}]; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "False\n", ran.stdout + ran.stderr


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_module_says_what_it_exports(module: str) -> None:
    loaded = importlib.import_module(module)
    assert Path(loaded.__file__ or "").is_relative_to(PACKAGE), f"{module} is from {loaded.__file__}"
    names = getattr(loaded, "__all__", None)
    assert names is not None, f"{module} has no __all__"
    assert len(set(names)) == len(names), f"{module}.__all__ names something twice"
    missing = [name for name in names if not hasattr(loaded, name)]
    assert not missing, f"{module}.__all__ names what is not there: {missing}"


def test_node_is_small() -> None:
    path = PACKAGE / "_node" / "node.py"
    tree = parsed(path)
    node = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Node")
    attributes = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    assert len(attributes) <= 20, sorted(attributes)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 250


def test_kernel_uses_public_modules_and_its_list_of_the_others() -> None:
    wrong: list[str] = []
    for path in KERNEL:
        for each in ast.walk(parsed(path)):
            modules = [each.module or ""] if isinstance(each, ast.ImportFrom) else []
            modules += [alias.name for alias in each.names] if isinstance(each, ast.Import) else []
            for module in modules:
                if module.startswith("monarch._") and module != "monarch._kernel_api":
                    wrong.append(f"{path.relative_to(ROOT)}: {module}")
    assert not wrong


def test_list_of_the_kernel_is_the_same_for_type_checkers() -> None:
    from monarch import _kernel_api

    tree = parsed(Path(_kernel_api.__file__))
    block = next(each for each in tree.body if isinstance(each, ast.If))
    typed = {
        alias.asname or alias.name: (each.module, alias.name)
        for each in block.body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    assert typed == _kernel_api._HOME
