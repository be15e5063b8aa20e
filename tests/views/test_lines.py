"""The newest lines of the output log, for views: from memory, and from files where that is asked for."""

from __future__ import annotations

from monarch_kernel.output.log import LoggedLine, OutputLog
from monarch_kernel.views.details import log_line


def filled(lines: int, memory: int = 1 << 20) -> OutputLog:
    log = OutputLog(memory, 1 << 20)
    for number in range(lines):
        stream = "stderr" if number % 2 else "stdout"
        log.add(f"[ranks 0-{number % 3}] line {number}\n", number // 10, stream, f"mesh{number % 2}")
    return log


def test_newest_lines_know_ranks_stream_cell_and_mesh() -> None:
    lines, more = filled(12).newest(lambda line: True, 2)
    assert more
    assert lines == [
        LoggedLine("mesh0", (0, 1), "stdout", "line 10", 1),
        LoggedLine("mesh1", (0, 1, 2), "stderr", "line 11", 1),
    ]


def test_lines_of_one_text_stay_in_order() -> None:
    log = OutputLog()
    log.add("[rank 0] a\n[rank 0] b\n[rank 0] c\n", 1)
    assert [line.text for line in log.newest(lambda line: True, 2)[0]] == ["b", "c"]


def test_older_lines_come_from_files_only_if_asked() -> None:
    log = filled(400, memory=2000)
    quick, more = log.newest(lambda line: True, 400, whole=False)
    assert 0 < len(quick) < 400 and more
    whole, more = log.newest(lambda line: True, 400)
    assert [line.text for line in whole] == [f"line {number}" for number in range(400)] and not more
    assert {line.mesh for line in whole} == {"mesh0", "mesh1"}


def test_the_log_itself_shows_no_marks() -> None:
    log = filled(2)
    assert "".join(log.read()) == "[ranks 0-0] line 0\n[ranks 0-1] line 1\n"
    assert list(log.lines(ranks=[1])) == ["[ranks 0-1] line 1\n"]


def test_rows_of_views_have_no_codes_of_terminals() -> None:
    line = LoggedLine("mesh0", (0,), "stdout", "\x1b[1;31mloss\x1b[0m 0.5\x1b[K", 1)
    assert log_line(line).text == "loss 0.5"
