"""``%mesh who``: the variables of ranks, where they differ, and ranks that are busy, blocked or dead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from kernels import Cell, Notebook
from leaks import wait_until
from monarch._notebook.who.complete import complete, inspect_name
from monarch._notebook.who.listing import Variable, listing
from monarch._notebook.who.sizes import bytes_of
from monarch_kernel.commands.who_lines import WhoLine, lines_of, size_text


@pytest.fixture(scope="module")
def book(notebook: Notebook) -> Iterator[Notebook]:
    notebook.mesh(
        "import math\nweights = torch.ones(100, 2)\nshard = torch.full((30000,), float(rank))\n"
        "same = torch.ones(4)\nlosses = [0.5, 0.25, 0.125]\nloss = 1.5 if rank < 3 else 2.5\n"
        "class Config:\n    def __init__(self): self.lr, self.steps = 0.1, 10\n"
        "    def __repr__(self): raise SystemExit('asked for its repr')\n"
        "config = Config()\nmodel = torch.nn.Linear(3, 2)\nname = 'größe'\n"
        "if rank == 1: only_one = {'a': 1}\n_hidden = 1"
    ).ok()
    yield notebook


def rows_of(cell: Cell) -> dict[str, list[list[str]]]:
    """Return the cells of the lines of each variable, without its name."""
    lines = [line for line in cell.ok().shown.splitlines() if not line.startswith("not compared: ")]
    columns = [match.start() for match in re.finditer(r"\S+", lines[1])]
    found: dict[str, list[list[str]]] = {}
    name = ""
    for line in lines[2:]:
        parts = [line[a:b].strip() for a, b in zip(columns, [*columns[1:], None], strict=True)]
        name = parts[0] or name
        found.setdefault(name, []).append(parts[1:])
    return found


def test_table_describes_each_variable(book: Notebook) -> None:
    cell = book.run("%mesh who")
    assert "not compared: %mesh diff NAME compares the contents" in cell.ok().shown
    assert "%mesh diff" not in book.run("%mesh who weights").ok().shown
    rows = rows_of(cell)
    names = ["Config", "config", "loss", "losses", "math", "model", "name", "only_one", "same", "shard", "weights"]
    assert list(rows) == names
    assert rows["weights"] == [["Tensor", "float32[100, 2] on cpu", "800 B", "0-3", "equal"]]
    assert rows["same"] == [["Tensor", "float32[4] on cpu = [1, 1, 1, 1]", "16 B", "0-3", "equal"]]
    assert rows["losses"][0][:2] == ["list", "3 items: [0.5, 0.25, 0.125]"]
    assert rows["config"][0][:2] == ["Config", "attributes lr, steps"] and rows["config"][0][4] == "not compared"
    assert rows["model"][0][:3] == ["Linear", "8 parameters on cpu", "32 B"]
    assert rows["name"][0][1] == "'größe'" and rows["Config"][0][0] == "class" and rows["math"][0][4] == ""


def test_actors_are_listed_with_class_mesh_and_ranks(book: Notebook) -> None:
    book.run("%%mesh spawn trainers\nclass Trainer(Actor):\n    @endpoint\n    def step(self): return 1").ok()
    book.run("%%mesh spawn loaders --on mesh[2:4]\nclass Loader(Actor):\n    pass").ok()
    book.run("mesh.execute(lambda: 1)").ok()
    try:
        lines = book.run("%mesh who").ok().shown.splitlines()
        assert [line.split() for line in lines[-4:-1]] == [
            ["actors", "class", "mesh", "ranks"], ["loaders", "Loader", "mesh", "2-3"],
            ["trainers", "Trainer", "mesh", "0-3"],
        ]  # fmt: skip
        assert book.run("%mesh who [0] train*").ok().shown.split()[4:] == ["trainers", "Trainer", "mesh", "0"]
        assert "<td" in book.run("%mesh who mesh[3] loaders").ok().bundles[0]["text/html"]
        assert "no variable on rank 0 matches 'loaders'" in book.run("%mesh who [0] loaders").text
    finally:
        book.run("trainers.stop().get(); loaders.stop().get()").ok()
    assert "trainers" not in book.run("%mesh who").ok().shown


def test_ranks_that_differ_have_lines_of_their_own(book: Notebook) -> None:
    rows = rows_of(book.run("%mesh who loss only_one shard"))
    assert [row[1:] for row in rows["loss"]] == [["1.5", "24 B", "0-2", "differ"], ["2.5", "24 B", "3", "differ"]]
    assert [row[3:] for row in rows["only_one"]] == [["1", ""]]
    assert rows["shard"] == [["Tensor", "float32[30000] on cpu", "117 KiB", "0-3", "not compared"]]


def test_slices_and_patterns_choose(book: Notebook) -> None:
    assert list(rows_of(book.run("%mesh who mesh[0, 2] lo*"))) == ["loss", "losses"]
    assert rows_of(book.run("%mesh who [2:4] loss"))["loss"][1][3] == "3"
    assert list(rows_of(book.run("%mesh who mesh [sw]*"))) == ["same", "shard", "weights"]
    assert "only_one" not in rows_of(book.run("%mesh who [0]")) and "contents" not in book.run("%mesh who [0]").shown


def test_pattern_without_match_suggests_a_name(book: Notebook) -> None:
    cell = book.run("%mesh who weight")
    assert cell.status == "error" and "no variable on ranks 0-3 matches 'weight'; did you mean 'weights'?" in cell.text
    assert "did you mean 'mesh'" in book.run("%%mesh mush\n1").text
    assert "no rank 9" in book.run("%mesh who mesh[9]").text


def test_html_has_the_rows_of_the_text(book: Notebook) -> None:
    (bundle,) = book.run("%mesh who weights loss").ok().bundles
    assert all(f">{text}<" in bundle["text/html"] for text in ("weights", "float32[100, 2] on cpu", "0-2", "differ"))


def test_busy_ranks_answer_and_are_named(own: Callable[..., Notebook], tmp_path: object) -> None:
    book = own()
    book.run("%mesh up --procs 3").ok()
    assert book.run("%mesh who").ok().shown == "cells have defined no variables on ranks 0-2"
    book.mesh("x = 1").ok()
    wait = f"import os, time\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)"
    book.mesh(wait, "[0] --nowait --out handle").ok()
    shown = book.run("%mesh who x").ok().shown
    assert re.search(r"^x +int +1 +\S+ B +0-2 +equal$", shown, re.M)
    assert re.search(r"^rank 0: busy: cell \[4\].*; values may change$", shown, re.M)
    open(f"{tmp_path}/go", "w").close()
    book.run("handle.result()").ok()
    book.mesh("os = __import__('os'); os.kill(os.getpid(), 19)", "[1] --nowait").ok()
    shown = book.run("%mesh who x").ok().shown
    assert re.search(r"^x +int +1 +\S+ B +0,2 +equal$", shown, re.M)
    assert re.search(r"^rank 1: no answer within 2 s \(busy: cell", shown, re.M)


def test_dead_ranks_are_named(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    book.mesh("x = 1").ok()
    book.mesh("__import__('os').kill(__import__('os').getpid(), 9)", "[1]")
    shown = book.run("%mesh who").ok().shown
    assert re.search(r"^x +int +1 +\S+ B +0$", shown, re.M)
    assert re.search(r"^rank 1: dead: .*; %mesh heal replaces dead ranks$", shown, re.M)
    assert "dead" in book.run("%mesh who [1]").ok().shown


def test_restarted_ranks_are_said_to_get_the_definitions_later(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2 --restart").ok()
    book.mesh("def f(): return 1").ok()
    book.mesh("__import__('os').kill(__import__('os').getpid(), 9)", "[1]")
    later = "rank 1: restarted; the next cell first runs the definitions of 1 cell there"
    assert wait_until(lambda: later in book.run("%mesh who").ok().shown)
    book.mesh("1").ok()
    shown = book.run("%mesh who").ok().shown
    assert re.search(r"^f +function .* 0-1$", shown, re.M) and "restarted" not in shown


@pytest.mark.slow
def test_value_that_blocks_does_not_silence_later_answers(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    # Shapes of a wrapper come from its dispatch, which is code of the cell.
    book.mesh(
        "import threading\nclass Blocked(torch.Tensor):\n    @classmethod\n"
        "    def __torch_dispatch__(cls, *a, **k): threading.Event().wait()\n"
        "x = torch.Tensor._make_wrapper_subclass(Blocked, (2,), dispatch_sizes_strides_policy='sizes')\nzed = 1"
    ).ok()
    assert "no answer within 2 s" in book.run("%mesh who x").shown
    assert re.search(r"^zed +int +1 .*equal$", book.run("%mesh who zed").ok().shown, re.M)
    for _ in range(2):
        assert "no answer within 2 s" in book.run("%mesh who x").shown
    shown = book.run("%mesh who zed").shown
    assert re.search(r"ranks? .*service-who is stuck: its 3 threads .*for \d+ s at .*:\d+ in ", shown), shown


def test_many_variables_are_cut_with_their_number(book: Notebook) -> None:
    book.mesh("globals().update({f'v{number:05}': number for number in range(10_000)})").ok()
    lines = book.run("%mesh who v*").ok().shown.splitlines()
    assert (
        lines[-1] == "showing the first 200 of 10,000 variables; name others, as in %mesh who w*" and len(lines) == 203
    )
    assert (
        lines[-2].startswith("v00199")
        and book.mesh("for name in list(globals()):\n    name[0] == 'v' and globals().pop(name)").ok()
    )


# Without a kernel


def row(value: object) -> Variable:
    return listing({"value": value}, [])[1][0]


def test_contents_of_large_values_are_not_read() -> None:
    assert row(list(range(100))).mark == row(list(range(100))).mark != row(list(range(101))).mark
    assert row(list(range(100_000))).mark == "" and row("x" * 100_000).mark == "" and row("x").mark


def test_code_of_user_classes_does_not_run() -> None:
    class Hostile:
        def __getattribute__(self, name: str) -> object:
            raise SystemExit(name)

        __repr__ = __reduce_ex__ = __sizeof__ = __eq__ = __len__ = __hash__ = __iter__ = None  # type: ignore[assignment]

    class Sly(dict[str, int]):
        def __len__(self) -> int:
            raise SystemExit

        items = __iter__ = __sizeof__ = __repr__ = __len__  # type: ignore[assignment]

    assert row(Hostile()).kind == "Hostile" and row([Hostile()]).text == "1 item"
    assert row(Sly(a=1)).text == "1 item" and row(Sly(a=1)).mark == ""


def test_metaclasses_and_tensor_classes_do_not_run() -> None:
    import torch

    def stop(*_: object, **__: object) -> None:
        raise SystemExit("code of a cell ran")

    names = ("__getattribute__", "__getattr__", "__repr__", "__instancecheck__", "__eq__", "__hash__")
    meta = type("Meta", (type,), {**dict.fromkeys(names, stop), "__name__": property(stop)})
    cell = {"__module__": "__main__", "__qualname__": "Odd"}
    odd = type.__new__(meta, "Odd", (), dict(cell))
    strange = type(
        "Strange", (torch.Tensor,), {**cell, "__torch_function__": classmethod(stop), "shape": property(stop)}
    )
    assert row(object.__new__(odd)).kind == "Odd" and row(odd).text == "__main__.Odd"
    tensor = row(torch.ones(2).as_subclass(strange))  # type: ignore[arg-type]
    assert (tensor.kind, tensor.text, tensor.size) == ("Strange", "float32[2] on cpu", 8)


def test_completion_runs_no_code_of_cells() -> None:
    import torch

    def stop(*_: object) -> None:
        raise SystemExit("code of a cell ran")

    def made(base: type = object, **members: object) -> object:
        return type("Odd", (base,), {"__module__": "__main__", "method": len, **members})()

    for name in ("__dir__", "__getattr__", "__getattribute__"):
        variables = {"x": made(object, **{name: stop})}
        assert "x.method" in complete("x.", variables)
        assert complete("x.missing.", variables) == [] and inspect_name("x", variables)
    get = type("Get", (), {"__module__": "__main__", "__get__": stop})()
    assert complete("x.part.", {"x": made(part=get)}) == []
    module = made(torch.nn.Module, __getattr__=stop, __dir__=stop)
    module.inner = torch.nn.Linear(2, 2)  # type: ignore[attr-defined]
    assert complete("m.inn", {"m": module}) == ["m.inner"]
    assert complete("m.inner.weig", {"m": module}) == ["m.inner.weight"]
    assert "torch.nn.Linear" in complete("torch.nn.Lin", {"torch": torch})


def test_size_counts_each_part_once_and_is_bounded() -> None:
    import torch

    tensor = torch.zeros(1000)

    class Holder:
        def __init__(self) -> None:
            self.parts = [tensor, tensor, {"again": tensor}]

    assert 4000 < bytes_of(Holder()).bytes < 6000 and bytes_of(Holder()).complete
    assert not bytes_of([[each] for each in range(10_000)]).complete
    parts = [{number: str(number) for number in range(1000)}] * 3
    assert not bytes_of([dict(each) for each in parts]).complete and len(parts) == 3
    module = torch.nn.Linear(10, 10)
    assert bytes_of(module).bytes == 440 and row(module).text == "110 parameters on cpu"


def variables(*contents: tuple[str, str]) -> dict[int, list[Variable]]:
    return {rank: [Variable("x", "list", text, 8, True, mark)] for rank, (text, mark) in enumerate(contents)}


def test_lines_that_look_the_same_are_one_if_all_ranks_differ() -> None:
    assert lines_of(variables(("a", "1"), ("a", "2"), ("a", "3")), 9) == [
        WhoLine("x", "list", "a", "8 B", "0-2", "all differ")
    ]
    two = lines_of(variables(("a", "1"), ("a", "1"), ("a", "3")), 9)
    assert [(line.name, line.ranks, line.contents) for line in two] == [("x", "0-1", "differ"), ("", "2", "differ")]


def test_lines_of_one_variable_are_bounded() -> None:
    lines = lines_of(variables(*((str(rank), str(rank)) for rank in range(100))), 9)
    assert len(lines) == 6 and lines[-1].value == "… 95 more values" and lines[-1].ranks == "5-99"


def test_sizes_have_units() -> None:
    assert [size_text(each) for each in (0, 999, 1536, 150 << 10, 5 << 20, 3 << 30)] == [
        "0 B", "999 B", "1.5 KiB", "150 KiB", "5.0 MiB", "3.0 GiB",
    ]  # fmt: skip
