"""Classes of actors from modules, a program's ``__main__``, and cells, which may reuse names."""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

import pytest

from monarch._meshes.actors import class_updates
from monarch.actor import Actor, endpoint

CELL = """
from monarch.actor import Actor, endpoint
FACTOR = {factor}
def helper(x):
    return x * FACTOR
class Base:
    kind = "base {factor}"
class Model(Base, Actor):
    def __init__(self, start=0):
        super().__init__()
        self.total = start
    @endpoint
    def add(self, x):
        self.total += helper(x)
        return self.total
    @endpoint
    def about(self):
        return type(self).__name__, self.kind, FACTOR
    @endpoint
    def make(self, cls):
        return cls().kind, isinstance(self, cls)
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ``__main__`` that runs cells, like a notebook kernel's."""
    main = types.ModuleType("__main__")
    # The module, as in a real one: its names may be functions of a debugger that another test has loaded.
    main.__dict__["__builtins__"] = builtins
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(code: str) -> dict[str, Any]:
        exec(compile(code, "<cell>", "exec"), main.__dict__)
        return main.__dict__

    return run


def test_two_classes_of_one_name_from_two_cells_do_not_mix(procs: Any, notebook: Any) -> None:
    mesh = procs(2)
    old = mesh.spawn("model", notebook(CELL.format(factor=2))["Model"])
    assert old.add.call(1).get(timeout=20)[1] == 2
    new = mesh.spawn("model", notebook(CELL.format(factor=10))["Model"], 5)
    assert new.add.call(1).get(timeout=20)[1] == 15
    assert old.add.call(1).get(timeout=20)[0] == 4
    assert old.about.call().get(timeout=20)[0] == ("Model", "base 2", 2)
    assert new.about.call().get(timeout=20)[0] == ("Model", "base 10", 10)


def test_functions_and_classes_of_cells_as_arguments(procs: Any, notebook: Any) -> None:
    cell = notebook(CELL.format(factor=3))

    class Runs(Actor):
        @endpoint
        def run(self, function: Any, *args: Any) -> Any:
            return function(*args)

    runs = procs(1).spawn("runs", Runs)
    assert runs.run.call_one(cell["helper"], 4).get(timeout=20) == 12
    assert runs.run.call_one(lambda x: x + cell["FACTOR"], 4).get(timeout=20) == 7
    model = procs(1).spawn("model", cell["Model"])
    assert model.make.call_one(cell["Base"]).get(timeout=20)[0] == "base 3"


def test_object_of_a_cell_class_round_trips(procs: Any, notebook: Any) -> None:
    cell = notebook(
        """
import dataclasses
from monarch.actor import Actor, endpoint
@dataclasses.dataclass
class Batch:
    x: int
class Echo(Actor):
    @endpoint
    def echo(self, batch):
        return Batch(batch.x + 1), isinstance(batch, Batch)
"""
    )
    echo = procs(1).spawn("echo", cell["Echo"])
    back, same = echo.echo.call_one(cell["Batch"](1)).get(timeout=20)
    assert back.x == 2 and same and isinstance(back, cell["Batch"])


def test_module_class_keeps_its_identity(procs: Any) -> None:
    class Names(Actor):
        @endpoint
        def module(self, cls: Any) -> tuple[str, bool]:
            import importlib

            return cls.__module__, getattr(importlib.import_module(cls.__module__), cls.__name__) is cls

    import fractions

    names = procs(1).spawn("names", Names)
    assert names.module.call_one(fractions.Fraction).get(timeout=20) == ("fractions", True)


@pytest.mark.slow
def test_module_beside_the_program_is_importable(program: Any, tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from monarch.actor import Actor, endpoint\n"
        "class Mine(Actor):\n"
        "    @endpoint\n"
        "    def name(self):\n"
        "        return __name__\n"
    )
    out = program(
        """
from mine import Mine
from monarch.actor import Actor, endpoint, this_host

VALUE = 42

def helper():
    return VALUE

class Main(Actor):
    @endpoint
    def both(self, mine):
        return mine.name.call_one().get(), helper(), __name__

if __name__ == "__main__":
    procs = this_host().spawn_procs()
    mine = procs.spawn("mine", Mine)
    print(this_host().spawn_procs().spawn("main", Main).both.call_one(mine).get(timeout=50))
"""
    ).ok()
    assert out == "('mine', 42, '__main__')\n"


def test_program_without_main_guard_does_not_respawn(program: Any) -> None:
    out = program(
        """
from monarch.actor import Actor, endpoint, this_host
print("once")
class A(Actor):
    @endpoint
    def f(self):
        return "answered"
print(this_host().spawn_procs().spawn("a", A).f.call_one().get(timeout=50))
"""
    ).ok()
    assert out == "once\nanswered\n"


class Preparing(dict[int, type]):
    """Prepared classes; the next edit adds its class while they are read."""

    def _added(self, read: list[Any]) -> list[Any]:
        self[2] = str
        return read

    def items(self) -> Any:
        return self._added(list(super().items()))

    def __iter__(self) -> Any:
        return iter(self._added(list(super().__iter__())))


def test_class_prepared_during_a_commit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(class_updates._prepared, "key", Preparing({0: float, 1: int}))
    assert class_updates._take_prepared("key", 1) is int
    assert class_updates._take_prepared("key", 2) is str
    assert not {0, 1} & {*class_updates._prepared["key"]}
