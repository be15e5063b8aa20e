"""Private names of other packages are used in a few files only, each of which has tests against those packages."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from sources import parsed

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "runtime" / "monarch", ROOT / "monarch_kernel"]

COMPAT = {
    "monarch_kernel/compat.py": "ipykernel, IPython",
    "runtime/monarch/_tensors/torch_compat.py": "torch",
    "runtime/monarch/_tensors/ddp_compat.py": "torch.nn.parallel.distributed",
    "runtime/monarch/_tensors/training_compat.py": "torch",
    "runtime/monarch/_engine/dtensor_compat.py": "torch.distributed.tensor",
    "runtime/monarch/_wire/options.py": "pyzmq",
    "runtime/monarch/_wire/tensor_compat.py": "torch, on a floor that does not import it",
    "runtime/monarch/_wire/accepting.py": "zmq",
    "runtime/monarch/_notebook/adapting/progress.py": "tqdm, rich",
    "runtime/monarch/_procs/rank/exit_functions.py": "threading, atexit, weakref: the end of a process",
    "runtime/monarch/_debug/why/workers_compat.py": "torch.utils.data, multiprocessing, concurrent.futures",
    # Its documented module has this name.
    "runtime/monarch/_tensors/transports/nixl.py": "nixl",
}
PLATFORM = {
    "_PyEval_SetTrace",
    "__res_init",
    "__res_state",
    "_children",
    "_current_exceptions",
    "_current_frames",
    "_fut_waiter",
    "_enter_task",
    "_get_running_loop",
    "_getframe",
    "_is_owned",
    "_leave_task",
    "_monarch_call",
    "_set_running_loop",
    "_signal",
}
"""Private names of Python and the C library, and one that we set on Python's objects."""


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("_")


@functools.cache
def files() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): parsed(path) for source in SOURCES for path in sorted(source.rglob("*.py"))}


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file defines: functions, classes, variables, and attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private names that a file takes of objects and modules, with their lines."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "setattr", "hasattr"}:
            names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        yield from ((getattr(node, "lineno", 0), name) for name in names if is_private(name))


def rooms(trees: dict[str, ast.Module]) -> set[str]:
    return {part for file in trees for part in file.removesuffix(".py").split("/")}


def foreign(trees: dict[str, ast.Module]) -> list[tuple[str, int, str]]:
    """The private names that no file defines, with file and line."""
    own = {name for tree in trees.values() for name in defined(tree)} | PLATFORM | rooms(trees)
    return [(file, line, name) for file, tree in trees.items() for line, name in used(tree) if name not in own]


@functools.cache
def foreign_here() -> list[tuple[str, int, str]]:
    return foreign(files())


def names_of_others() -> set[str]:
    """The private names that the compat modules use and do not define themselves."""
    own = rooms(files())
    trees = [(used(tree), {*defined(tree), *own}) for file, tree in files().items() if file in COMPAT]
    return {name for names, known in trees for _, name in names if name not in known}


def test_private_names_of_others_are_in_compat_modules() -> None:
    wrong = [f"{file}:{line}: {name}" for file, line, name in foreign_here() if file not in COMPAT]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_own_names_do_not_hide_names_of_others() -> None:
    """A name of torch that one of our classes has too would pass the test above."""
    trees = {file: tree for file, tree in files().items() if file not in COMPAT}
    both = names_of_others() & {name for tree in trees.values() for name in defined(tree)}
    assert not both


def test_compat_modules_are_needed() -> None:
    assert {file for file, _, _ in foreign_here()} == set(COMPAT)


@pytest.mark.parametrize(
    "code",
    ["group._get_backend(1)", "import torch._C", "from torch import _utils", "getattr(shell, '_showtraceback')(1)"],
)
def test_foreign_private_names_are_found(code: str) -> None:
    tree = ast.parse(f"class A:\n    def _own(self): self._mine = 1\n\nx._own, x._mine\n{code}\n")
    assert [line for _, line, _ in foreign({"a.py": tree})] == [5]
