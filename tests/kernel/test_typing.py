"""Tab and Shift-Tab in ``%mesh`` lines and in the first line of ``%%mesh`` cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels import GUARD, Notebook
from monarch_kernel.grammar.header import OPTIONS
from monarch_kernel.grammar.help import bundle_of
from monarch_kernel.grammar.parsers import PARSERS

SOON = 10.0
"""Seconds for an answer on a busy machine; a hang takes longer."""
UP = [name for each in PARSERS["up"].arguments for name in each.option_strings]


@pytest.fixture(scope="module")
def book(notebook: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "saved").mkdir()
    for name in ("train.py", "notes.txt", "saved/a b.py"):
        (folder / name).touch()
    notebook.run(f"%cd -q {folder}\n_hidden = 1\nlearning_rate = 0.1\nlayers = 2").ok()
    notebook.mesh("tensor_x = torch.ones(3)\nif rank == 2: only_two = 1").ok()
    notebook.run("%%mesh spawn workers\nclass Works(Actor): pass").ok()
    yield notebook


def ask(book: Notebook, kind: str, code: str, cursor: int) -> dict[str, Any]:
    """Return the content of the reply to a request about a cell."""
    detail = {"detail_level": 0} if kind == "inspect_request" else {}
    message = book.client.session.msg(kind, {"code": code, "cursor_pos": cursor, **detail})
    book.client.shell_channel.send(message)
    while True:
        reply = book.client.get_shell_msg(timeout=GUARD)
        if reply["parent_header"]["msg_id"] == message["header"]["msg_id"]:
            return reply["content"]


def tab(book: Notebook, line: str) -> list[str]:
    """Return what a line may become; ``|`` is the cursor, at the end if there is none."""
    before, _, after = line.partition("|")
    answer = ask(book, "complete_request", before + after, len(before))
    code, start, end = before + after, answer["cursor_start"], answer["cursor_end"]
    assert answer["status"] == "ok" and start <= len(before) <= end
    return [code[:start] + match + code[end:] for match in answer["matches"]]


def words(book: Notebook, line: str) -> list[str]:
    """Return the last words of what a line may become."""
    return [each.split(" ")[-1] for each in tab(book, line)]


def shift_tab(book: Notebook, line: str) -> dict[str, str]:
    before, _, after = line.partition("|")
    return ask(book, "inspect_request", before + after, len(before)).get("data", {})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%mesh ", sorted(PARSERS)),
        ("%mesh u", ["until", "up", "update", "use"]),
        ("%mesh up --", UP),
        ("%mesh up ", UP),
        ("%mesh up big --procs 4 --pro", []),
        ("%mesh up --env A=1 --en", ["--env"]),
        ("%mesh up --device ", ["cpu", "cuda"]),
        ("%mesh up --device=cu", ["--device=cuda"]),
        ("%mesh up --procs ", []),
        ("%mesh heal --copy", ["--copy-from"]),
        ("%mesh heal --copy-from ", ["0", "1", "2", "3", "peer"]),
        ("%mesh heal --copy-from 0 mesh ten", ["tensor_x"]),
        ("%mesh heal --copy-from 0 ", ["mesh", "only_two", "tensor_x"]),
        ("%mesh heal --copy-from 0 ten", ["tensor_x"]),
        ("%mesh heal ", ["mesh"]),
        ("%mesh down ", ["mesh"]),
        ("%mesh down mesh ", ["--all"]),
        ("%mesh kill ", ["mesh"]),
        ("%mesh resize ", ["mesh", "procs="]),
        ("%mesh definitions ", ["mesh", "drop", "clear"]),
        ("%mesh list ", ["--all"]),
        ("%mesh config ti", ["timeout="]),
        ("%mesh config --", ["--reset"]),
        ("%mesh help he", ["heal", "help"]),
        ("%mesh pull ten", ["tensor_x"]),
        ("%mesh pull on", ["only_two"]),
        ("%mesh pull tensor_x ", ["only_two"]),
        ("%mesh pull tensor_x --", ["--rank", "--as"]),
        ("%mesh who ", ["mesh", "only_two", "tensor_x"]),
        ("%mesh who mesh on", ["only_two"]),
        ("%mesh pull nothing_like_it", []),
        ("%mesh push l", ["layers", "learning_rate"]),
        ("%mesh push layers l", ["learning_rate"]),
        ("%mesh push _hid", ["_hidden"]),
        ("%mesh update ", ["workers"]),
        ("%mesh log --rank ", ["0", "1", "2", "3"]),
        ("%mesh run ", ["saved/", "train.py"]),
        ("%mesh run --on ", ["mesh"]),
        ("%mesh run --on mesh tr", ["train.py"]),
        ("%mesh run train.py --on", []),
        ("%mesh run train.py no", ["notes.txt"]),
        ("%mesh checkpoint ", ["saved/"]),
        ("%mesh restore saved ten", ["tensor_x"]),
        ("%mesh log --save no", ["notes.txt"]),
        ("%mesh tensor_x.shap", ["tensor_x.shape"]),
        ("%mesh ten", ["tensor_x"]),
        ("%mesh print(tensor_x.shap", ["print(tensor_x.shape"]),
        ("%mesh print(1, tensor_x.shap", ["tensor_x.shape"]),
        ("%mesh torch.nn.functional.cross_ent", ["torch.nn.functional.cross_entropy"]),
        ("%%mesh ", ["mesh", "workers", "spawn", *OPTIONS]),
        ("%%mesh w", ["workers"]),
        ("%%mesh --", list(OPTIONS)),
        ("%%mesh mesh --timeout ", []),
        ("%%mesh mesh[0:2] --timeout 5 --no", ["--nowait"]),
        ("%%mesh mesh[", ["mesh[procs="]),
        ("%%mesh spawn workers --", ["--on", "--new"]),
        ("%%mesh spawn workers --on ", ["mesh"]),
    ],
)
def test_tab_offers_what_fits_and_nothing_else(book: Notebook, line: str, expected: list[str]) -> None:
    assert words(book, line) == expected


def test_names_of_the_shell_are_not_offered_to_push(book: Notebook) -> None:
    assert not {"In", "Out", "get_ipython", "exit", "quit", "_hidden"} & set(words(book, "%mesh push "))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%mesh he| mesh", ["%mesh heal mesh", "%mesh help mesh"]),
        ("%mesh up --pr|ocs 4", ["%mesh up --procs 4"]),
        ("%mesh run tr|ain.py --lr 1", ["%mesh run train.py --lr 1"]),
        ("%mesh heal | --bare", ["%mesh heal mesh --bare"]),
        ("größe = 'ä𝔘'\n%mesh heal --copy|\nx = 1", ["größe = 'ä𝔘'\n%mesh heal --copy-from\nx = 1"]),
        ("%mesh run 'saved/a| --lr 1", ["%mesh run 'saved/a b.py' --lr 1"]),
        ("%mesh run 'saved/a| b.py' --lr 1", ["%mesh run 'saved/a b.py' --lr 1"]),
        ("%mesh run saved/a| --lr 1", ["%mesh run saved/a\\ b.py --lr 1"]),
        ("%mesh push 'ä' l|ay", ["%mesh push 'ä' layers", "%mesh push 'ä' learning_rate"]),
        ("x = %mesh pull ten|", ["x = %mesh pull tensor_x"]),
        ("%%mesh me|[0]\nx", ["%%mesh mesh[0]\nx"]),
        ("%%mesh --time| 5\nx", ["%%mesh --timeout 5\nx"]),
        ("%%time\n%%mesh\nß = tensor_x.shap| + 1", ["%%time\n%%mesh\nß = tensor_x.shape + 1"]),
        ("# all ranks\n\n%%mesh --time| 5\nx", ["# all ranks\n\n%%mesh --timeout 5\nx"]),
        ("# a\n%%mesh\ntensor_x.shap|", ["# a\n%%mesh\ntensor_x.shape"]),
    ],
)
def test_tab_replaces_exactly_the_word(book: Notebook, line: str, expected: list[str]) -> None:
    assert tab(book, line) == expected


def test_tab_in_python_offers_names_of_the_notebook(book: Notebook) -> None:
    assert words(book, "learn") == ["learning_rate"]
    assert "%mesh" in words(book, "%mes") and "%%mesh" in words(book, "%%mes")


def test_automatic_mode_offers_names_of_ranks_in_plain_cells(book: Notebook) -> None:
    book.run("%mesh auto on [2]").ok()
    try:
        assert tab(book, "x = 1\nonly_") == ["x = 1\nonly_two"] and tab(book, "learning_r") == []
        assert tab(book, "%%here\nlearning_r") == ["%%here\nlearning_rate"]
        assert tab(book, "%mesh w|") == tab(book, "%mesh w") and "%timeit" in tab(book, "%timei")
        answer = ask(book, "inspect_request", "y = only_two", 12)
        assert answer["found"] and "int" in answer["data"]["text/plain"]
    finally:
        book.run("%mesh auto off").ok()
    assert tab(book, "learning_r") == ["learning_rate"] and tab(book, "only_") == []


def test_tab_skips_dead_and_blocked_ranks(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    book.mesh("tensor_y = 1").ok()
    book.mesh("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "[1] --nowait").ok()
    begun = time.perf_counter()
    assert words(book, "%mesh pull ten") == ["tensor_y"]
    assert words(book, "%mesh tensor_y.rea") == ["tensor_y.real"]
    assert words(book, "%%mesh [1]\ntensor_y.rea") == []
    assert time.perf_counter() - begun < SOON
    book.mesh("os = __import__('os'); os.kill(os.getpid(), 9)", "[0]")
    assert words(book, "%mesh pull ten") == []


@pytest.mark.parametrize(
    ("line", "verb"),
    [
        ("%me|sh", None),
        ("%mesh|", None),
        ("%mesh| heal", "heal"),
        ("%mesh heal|", "heal"),
        ("%mesh he|al mesh", "heal"),
        ("%mesh heal mesh|", "heal"),
        ("y = 2\n%mesh up --pr|ocs 4\ny", "up"),
    ],
)
def test_shift_tab_shows_the_help_of_the_command(book: Notebook, line: str, verb: str | None) -> None:
    assert shift_tab(book, line) == bundle_of(verb)


@pytest.mark.parametrize("line", ["%%me|sh\nx", "%%mesh|", "%%mesh me|sh[0]\nx", "%%mesh spawn| workers\nx"])
def test_shift_tab_on_a_header_shows_the_options_of_cells(book: Notebook, line: str) -> None:
    text = shift_tab(book, line)["text/plain"]
    assert "%%mesh spawn NAME" in text and all(option in text for option in OPTIONS)


def test_shift_tab_on_code_in_a_line_asks_a_rank(book: Notebook) -> None:
    assert "Tensor" in shift_tab(book, "%mesh tensor|_x + 1")["text/plain"]
    assert "learning_rate" not in shift_tab(book, "x = 1\nlearning|_rate").get("text/html", "")


@pytest.mark.parametrize("line", ["%mesh?", "?%mesh"])
def test_question_mark_lists_the_commands(book: Notebook, line: str) -> None:
    cell = book.run(line).ok()
    (page,) = cell.reply["payload"]
    assert all(parser.summary in page["data"]["text/plain"] for parser in PARSERS.values())


def test_question_mark_after_a_verb_explains_it(book: Notebook) -> None:
    cell = book.run("%mesh heal?").ok()
    text = cell.shown or cell.reply["payload"][0]["data"]["text/plain"]
    assert "--copy-from" in text


def test_paths_are_those_of_the_notebook_folder(book: Notebook, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file.py").touch()
    assert words(book, f"%mesh run {tmp_path}/de") == [f"{tmp_path}/deep/"]
    assert words(book, f"%mesh run {tmp_path}/deep/") == [f"{tmp_path}/deep/file.py"]
    assert words(book, f"%mesh run {tmp_path}/nowhere/") == []


@pytest.mark.slow
def test_tab_works_in_any_ipython_kernel(own: Callable[..., Notebook]) -> None:
    book = own("python3")
    book.run("%load_ext monarch_kernel").ok()
    assert words(book, "%mesh heal --copy") == ["--copy-from"] and sorted(words(book, "%mesh up --")) == sorted(UP)
    book.run("%unload_ext monarch_kernel").ok()
    assert "--copy-from" not in words(book, "%mesh heal --copy")
