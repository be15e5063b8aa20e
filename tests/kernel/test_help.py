"""Completion and inspection: names of ranks and of meshes, without long waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kernels import GUARD, Notebook

SOON = 10.0
"""Seconds for an answer on a busy machine; the goal is half a second, and a hang takes longer."""


@pytest.fixture(scope="module")
def book(notebook: Notebook) -> Iterator[Notebook]:
    notebook.mesh(
        "alpha_one = 1\nalpha_two = 2\nclass Model:\n    def forward_pass(self, x, scale=2):\n"
        "        '''Runs on the rank.'''\nmodel = Model()"
    ).ok()
    spawn = (
        "from monarch.actor import Actor\nclass Holds(Actor):\n"
        "    def __init__(self): self.inner_state = [1]\n    def helper_method(self): 'Helps.'"
    )
    notebook.run(f"%%mesh spawn holders\n{spawn}").ok()
    notebook.mesh("1", "holders").ok()
    yield notebook


def ask(book: Notebook, kind: str, code: str, cursor: int | None = None) -> tuple[dict[str, Any], float]:
    """Return the reply to a request about a cell, and its duration in seconds."""
    content = {"code": code, "cursor_pos": len(code) if cursor is None else cursor}
    if kind == "inspect_request":
        content["detail_level"] = 0
    message = book.client.session.msg(kind, content)
    begun = time.perf_counter()
    book.client.shell_channel.send(message)
    while True:
        reply = book.client.get_shell_msg(timeout=GUARD)
        if reply["parent_header"]["msg_id"] == message["header"]["msg_id"]:
            return reply["content"], time.perf_counter() - begun


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("%%mesh\nalpha_", ["alpha_one", "alpha_two"]),
        ("%%mesh [0,2]\nx = 1\nprint(alpha_t", ["alpha_two"]),
        ("%%mesh\nmodel.forw", ["model.forward_pass"]),
        ("%%mesh\ntorch.nn.functional.cross_ent", ["torch.nn.functional.cross_entropy"]),
        ("%%mesh holders\nself.inner", ["self.inner_state"]),
        ("%%mesh holders[1]\nself.inner_state.app", ["self.inner_state.append"]),
        ("%%mesh me", ["mesh"]),
        ("%%mesh ho", ["holders"]),
        ("%%mesh sp", ["spawn"]),
        ("%%mesh --no", ["--nowait"]),
        ("%mesh rest", ["restart", "restore"]),
        ("%mesh rel", ["reload"]),
        ("x = 1\n%mesh use m", ["mesh"]),
        ("%mesh update ho", ["holders"]),
    ],
)
def test_completion_offers_names(book: Notebook, code: str, expected: list[str]) -> None:
    answer, seconds = ask(book, "complete_request", code)
    begin, end = answer["cursor_start"], answer["cursor_end"]
    # The text after the match, which may replace only the last part.
    made = [code[:begin].rpartition("\n")[2].split("(")[-1].split(" ")[-1] + match for match in answer["matches"]]
    assert end == len(code) and made == expected and seconds < SOON


def test_inspection_shows_signature_and_docstring(book: Notebook) -> None:
    answer, seconds = ask(book, "inspect_request", "%%mesh\nmodel.forward_pass(")
    text = answer["data"]["text/plain"]
    assert "(x, scale=2)" in text and "Runs on the rank." in text and seconds < SOON
    answer, _ = ask(book, "inspect_request", "%%mesh holders\nself.helper_method")
    assert "Helps." in answer["data"]["text/plain"]
    code = "%%mesh\nalpha_one + 1"
    assert "int" in ask(book, "inspect_request", code, len("%%mesh\nalp"))[0]["data"]["text/plain"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("%%mesh nowhere\nalpha_", "complete_request"),
        ("%%mesh [99]\nalpha_", "complete_request"),
        ("%%mesh [\nalpha_", "complete_request"),
        ("%%mesh\nnothing_at_all.x", "complete_request"),
        ("%%mesh\n", "inspect_request"),
        ("%%mesh nowhere\nx", "inspect_request"),
    ],
)
def test_completion_of_unknown_names_is_empty(book: Notebook, code: str, kind: str) -> None:
    answer, seconds = ask(book, kind, code)
    assert answer["status"] == "ok" and seconds < SOON
    assert answer.get("matches", []) == []


@pytest.mark.slow
def test_completion_works_on_a_busy_rank_and_skips_a_blocked_one(book: Notebook, tmp_path: object) -> None:
    wait = f"import os, time\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)"
    book.mesh(wait, "--nowait --out handle").ok()
    answer, seconds = ask(book, "complete_request", "%%mesh\nalpha_t")
    assert answer["matches"] and seconds < SOON
    open(f"{tmp_path}/go", "w").close()
    book.run("handle.result()").ok()
    # The rank holds the GIL in C for a while, so none of its threads can answer.
    book.mesh("_ = sum(range(6 * 10**7))", "--nowait --out handle").ok()
    answer, seconds = ask(book, "complete_request", "%%mesh\nalpha_t")
    assert answer["status"] == "ok" and seconds < SOON
    book.run("handle.result()").ok()
    assert ask(book, "complete_request", "%%mesh\nalpha_t")[0]["matches"]
