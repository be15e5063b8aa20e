"""Causes of death: each has a sentence, a tag of its own in the protocol, and survives the wire."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._core import causes as c
from monarch._core.text.causes import describe, describe_all
from monarch._node.replies.death_errors import age_of_lines, last_lines
from monarch._wire import messages as m

PROTOCOL = (Path(__file__).resolve().parents[2] / "docs" / "wire-protocol.md").read_text(encoding="utf-8")
KINDS = get_args(c.Cause)
AT = c.CellRef(3, 5)


def causes() -> st.SearchStrategy[c.Cause]:
    text = st.text(max_size=20)
    plain = st.one_of(
        st.builds(c.Exited, st.integers(0, 255)),
        st.builds(c.Signaled, st.integers(1, 64), st.booleans(), text),
        st.builds(c.NotStarted, text),
        st.builds(c.AgentEnded, st.none(), text),
        st.builds(c.HostsParted, text, text),
        st.just(c.Stopped()),
    )
    return st.recursive(
        plain, lambda inner: st.builds(c.Orphaned, text, inner) | st.builds(c.NotRestarted, inner, text), max_leaves=4
    )


@given(causes(), st.one_of(st.none(), st.builds(c.CellRef, st.integers(0, 2**31), st.integers(0, 2**31))))
def test_cause_survives_wire(cause: c.Cause, at: c.CellRef | None) -> None:
    decoded = m.decode(m.encode(m.Dead("h/a.0", cause, False, [], at=at)))
    assert isinstance(decoded, m.Dead)
    assert (decoded.cause, decoded.at) == (cause, at)
    assert decoded.reason == describe(cause, at)


def test_protocol_lists_each_cause_with_its_fields() -> None:
    section = PROTOCOL.partition("#### Causes of death")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.*?) ?\|$", section, flags=re.MULTILINE)
    listed = {int(tag): (name, re.findall(r"`(\w+)`", fields)) for tag, name, fields in rows}
    assert listed == {kind.__struct_config__.tag: (kind.__name__, list(kind.__struct_fields__)) for kind in KINDS}


def test_overdue_without_grace_was_just_killed() -> None:
    assert describe(c.Overdue(2.0)) == "was killed because it did not stop within 2 s"
    assert describe(c.Overdue(0.0)) == "was killed"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_cause_has_sentence(kind: type[msgspec.Struct]) -> None:
    values = {"code": 3, "signal": 9, "grace": 2.0, "seconds": 60.0, "how": c.Exited(1)}
    cause = kind(**{name: values.get(name, f"<{name}>") for name in kind.__struct_fields__ if name != "out_of_memory"})
    text = describe(cause, AT)  # pyright: ignore[reportArgumentType]
    assert "at cell [3] line 5" in text
    for name in kind.__struct_fields__:
        if name not in values and name != "out_of_memory":
            assert f"<{name}>" in text


def test_sentence_names_signal_and_line() -> None:
    assert describe(c.Signaled(9), AT) == "was killed by signal 9 (SIGKILL) at cell [3] line 5"
    assert describe(c.Signaled(63)) == "was killed by signal 63"


def test_sentence_about_several_processes_is_plural() -> None:
    assert describe_all(c.Signaled(9)) == "were killed by signal 9 (SIGKILL)"
    assert describe_all(c.Exited(3)) == "exited with code 3"
    assert describe_all(c.Overdue(2.0)) == "were killed because they did not stop within 2 s"
    assert (
        describe_all(c.Orphaned("rank 1", c.Exited(0))) == "were killed because their owner, rank 1, exited with code 0"
    )
    lost = c.NotRestarted(c.HostLost("h2"), "no room")
    assert (
        describe_all(lost)
        == "were lost with their host h2: the connection to it broke, and could not be restarted: no room"
    )


def test_line_belongs_to_death_when_restart_failed() -> None:
    cause = c.NotRestarted(c.Exited(3), "no room")
    assert describe(cause, AT) == "exited with code 3 at cell [3] line 5, and could not be restarted: no room"


def test_last_lines_have_the_last_state_of_a_progress_bar() -> None:
    text = b"before\n\r 10%|#   | 1/10\r 20%|##  | 2/10\r\nTraceback\n"
    dead = m.Dead("a/b.0", c.Exited(1), False, [("stdout", 0, b"out\n"), ("stderr", 0, text)])
    assert last_lines(dead) == ["before", " 20%|##  | 2/10", "Traceback"]


def test_last_lines_are_those_of_the_last_cell() -> None:
    def dead(since: int, quiet: float = 0.0) -> m.Dead:
        return m.Dead("a/b.0", c.Signaled(9), False, [("stderr", 100, b"old\nnew\n")], since=since, quiet=quiet)

    assert last_lines(dead(0)) == ["old", "new"] == last_lines(dead(90))
    assert last_lines(dead(104)) == ["new"]
    assert last_lines(dead(108)) == [], "the cell has printed nothing"
    assert last_lines(dead(1000)) == ["old", "new"], "the file has been made shorter"
    assert age_of_lines(dead(0)) == ""
    assert age_of_lines(dead(0, 93.0)) == ", written 1m 33s before its death"


def test_last_lines_of_a_crash_are_frames_of_its_thread() -> None:
    ours = m.__file__
    dump = f"""Fatal Python error: Segmentation fault

Thread 0x00007f34 (most recent call first):
  File "{ours}", line 57 in wait

Current thread 0x00007f35 (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "cell [7]", line 2 in <module>
  File "{ours}", line 145 in main
  File "<frozen runpy>", line 88 in _run_code

Extension modules: zmq, numpy (total: 2)
"""
    dead = m.Dead("a/b.0", c.Signaled(11), False, [("stderr", 0, b"loss 1\n" + dump.encode())])
    assert last_lines(dead) == [
        "Fatal Python error: Segmentation fault",
        '  File "/lib/ctypes/__init__.py", line 519 in string_at',
        '  File "cell [7]", line 2 in <module>',
    ]
