"""``%mesh help`` is made from the parsers, and fits a terminal."""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import monarch_kernel
from kernels import Notebook
from monarch_kernel.grammar.arguments import label
from monarch_kernel.grammar.header import OPTIONS, HeaderError
from monarch_kernel.grammar.header import parse as parse_header
from monarch_kernel.grammar.help import bundle_of
from monarch_kernel.grammar.parsers import PARSERS, parse

VERBS = [None, *PARSERS]


def text_of_html(html: str) -> str:
    return re.sub(r"<[^>]+>", " ", html).replace("&lt;", "<").replace("&gt;", ">").replace("&#x27;", "'")


def test_every_verb_has_a_parser(notebook: Notebook) -> None:
    code = "print(sorted(get_ipython().magics_manager.registry['MeshMagics'].commands()))"
    assert notebook.run(code).ok().stream() == f"{sorted(PARSERS)}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_80_columns(verb: str | None) -> None:
    lines = bundle_of(verb)["text/plain"].splitlines()
    assert max(len(line) for line in lines) <= 80 and all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("verb", VERBS)
def test_html_help_has_all_that_the_text_has(verb: str | None) -> None:
    text, html = (" ".join(bundle_of(verb)[kind].split()) for kind in ("text/plain", "text/html"))
    arguments = PARSERS[verb].arguments if verb else []
    helps = [str(argument.help) % {} for argument in arguments]
    for each in helps if verb else [p.summary for p in PARSERS.values()]:
        assert each in text and each in " ".join(text_of_html(html).split())
    assert all(label(each) in text_of_html(html) for each in arguments)


def test_overview_explains_the_options_of_cells() -> None:
    text = " ".join(bundle_of(None)["text/plain"].split())
    assert all(f"{option} {meaning}" in text for option, meaning in OPTIONS.items())


@pytest.mark.parametrize("verb", list(PARSERS))
def test_every_argument_is_explained(verb: str) -> None:
    assert all(each.help for each in PARSERS[verb].arguments) and len(PARSERS[verb].summary) <= 50


def test_error_of_a_parser_names_only_what_is_required() -> None:
    with pytest.raises(HeaderError, match=r"are required: PATH; see"):
        parse("checkpoint", [])


def test_error_of_a_parser_names_the_help() -> None:
    with pytest.raises(HeaderError, match=r"^%mesh pull: .*required: NAME; see %mesh help pull$"):
        parse("pull", [])


@pytest.mark.parametrize("line", ["%mesh help", "%mesh help up"])
def test_help_is_shown_as_text_and_html(notebook: Notebook, line: str) -> None:
    (shown,) = notebook.run(line).ok().bundles
    verb = line.split()[2:]
    assert shown == bundle_of(verb[0] if verb else None)


def test_help_is_plain_text_in_a_terminal() -> None:
    code = "%load_ext monarch_kernel\n%mesh help log\nimport monarch; monarch.shutdown_context().get()\n"
    shown = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner"],
        input=code, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "usage: %mesh log [" in shown.stdout and "<table>" not in shown.stdout, shown.stderr


BY_HAND = {("run", "on"), ("run", "script"), ("run", "arguments"), ("definitions", "change"), ("print", "expression")}
BY_HAND |= {
    ("break", "place"),
    ("break", "condition"),
    ("break", "ranks"),
    ("diff", "expression"),
    ("why", "words"),
    ("pip", "words"),
}
"""Arguments that their commands take from the words of the line; tests/kernel has tests of each."""


class Source(NamedTuple):
    """A file of the package, and the names that it uses."""

    path: Path
    reads: set[str]
    """Names of the attributes that it reads."""
    parses: set[object]
    """Its constants if it parses the words of commands, among them their names."""


@functools.cache
def sources() -> list[Source]:
    return [source(path) for path in Path(monarch_kernel.__file__).parent.rglob("*.py")]


def source(path: Path) -> Source:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    reads = {each.attr for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load)}
    calls = [each for each in nodes if isinstance(each, ast.Call)]
    named = [each.args[1] for each in calls if getattr(each.func, "id", "") == "getattr"]
    reads |= {str(each.value) for each in named if isinstance(each, ast.Constant)}
    parses = any(getattr(each.func, "id", "") == "parse" for each in calls)
    return Source(path, reads, {each.value for each in nodes if isinstance(each, ast.Constant)} if parses else set())


@pytest.mark.parametrize("verb", PARSERS)
def test_every_argument_of_a_command_is_read(verb: str) -> None:
    read = set[str]().union(*(each.reads for each in sources() if verb in each.parses))
    arguments = [each.dest for each in PARSERS[verb].arguments if (verb, each.dest) not in BY_HAND]
    assert [each for each in arguments if each not in read] == []


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_cells_is_read_outside_its_parser(option: str) -> None:
    value = {"--timeout": " 1", "--out": " x", "--world": " 1x8"}.get(option, "")
    before, after = (vars(parse_header(line)) for line in ("", option + value))
    # --stream is the default.
    (changed,) = {name for name, each in after.items() if each != before[name]} or {"stream"}
    users = [each.path for each in sources() if each.path.name != "header.py" and changed in each.reads]
    assert users, f"nothing reads {changed}, which {option} sets"


def test_interrupted_parse_changes_no_parser() -> None:
    """argparse changes its parser while it parses words in any order."""
    # In a thread of its own: in Python 3.11 an error of a trace function can leave another one as handled there.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(interrupt_parses).result() > 100


def interrupt_parses() -> int:
    """Interrupt a parse at each step; return at how many."""
    steps = 0

    def count(frame: Any, _event: str, _argument: object) -> Any:
        nonlocal steps
        if frame.f_code.co_filename == argparse.__file__:
            steps -= 1
            if steps == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return count

    interrupted = 0
    for moment in range(1, 2000):
        steps = moment
        sys.settrace(count)
        try:
            parse("down", ["x"])
            return interrupted
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert parse("down", ["x"]).names == ["x"]
    raise AssertionError("the parse has not ended")
