"""Output of a rank: read as it comes, and after its death."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from monarch._procs.os import posix
from monarch._procs.rank import output, text_streams
from monarch._procs.rank.output import Capture, Chunk, read_tail

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def files() -> Iterator[dict[str, int]]:
    fds = {"stdout": posix.memfd("stdout"), "stderr": posix.memfd("stderr")}
    yield fds
    for fd in fds.values():
        os.close(fd)


def blocks(fd: int) -> int:
    """Memory behind a file, in bytes."""
    return os.fstat(fd).st_blocks * 512


def test_new_output_is_taken_once(files: dict[str, int]) -> None:
    capture = Capture(files)
    assert capture.take() == []
    os.write(files["stdout"], b"one")
    os.write(files["stderr"], b"two")
    assert capture.take() == [Chunk("stdout", 0, b"one"), Chunk("stderr", 0, b"two")]
    os.write(files["stdout"], b"three")
    assert capture.take() == [Chunk("stdout", 3, b"three")]
    assert capture.take() == []


def test_big_output_comes_in_chunks_and_its_memory_is_freed(files: dict[str, int]) -> None:
    capture = Capture(files)
    data = os.urandom(5 << 19) + b"end"
    os.write(files["stdout"], data)
    assert blocks(files["stdout"]) >= len(data)
    chunks = capture.take()
    assert [chunk.offset for chunk in chunks] == [0, 1 << 20, 2 << 20]
    assert b"".join(chunk.data for chunk in chunks) == data
    assert blocks(files["stdout"]) <= PAGE
    os.write(files["stdout"], b"more")
    assert capture.take() == [Chunk("stdout", len(data), b"more")]


def test_small_writes_free_memory(files: dict[str, int]) -> None:
    capture = Capture(files)
    for _ in range(300):
        os.write(files["stdout"], bytes(PAGE // 2))
        assert len(capture.take()) == 1
    assert blocks(files["stdout"]) <= 17 * PAGE


def test_file_position_is_unchanged(files: dict[str, int]) -> None:
    os.write(files["stdout"], b"some")
    before = os.lseek(files["stdout"], 0, os.SEEK_CUR)
    Capture(files).take()
    read_tail(files["stdout"])
    assert os.lseek(files["stdout"], 0, os.SEEK_CUR) == before


def test_writers_append_and_do_not_overwrite(files: dict[str, int]) -> None:
    fd = files["stdout"]
    subprocess.run(["sh", "-c", "echo one; echo two >&2"], stdout=fd, stderr=fd, check=True)
    own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND)
    os.write(own, b"three\n")
    os.close(own)
    os.write(fd, b"four\n")
    assert Capture(files).take() == [Chunk("stdout", 0, b"one\ntwo\nthree\nfour\n")]


def test_threads_take_everything_once(files: dict[str, int]) -> None:
    capture = Capture(files)
    taken: list[Chunk] = []
    done = threading.Event()

    def take() -> None:
        while not done.is_set():
            taken.extend(capture.take())

    takers = [threading.Thread(target=take) for _ in range(4)]
    for taker in takers:
        taker.start()
    written = b"".join(b"line %d\n" % number for number in range(2000))
    for line in written.splitlines(keepends=True):
        os.write(files["stdout"], line)
    done.set()
    for taker in takers:
        taker.join()
    taken.extend(capture.take())
    assert b"".join(chunk.data for chunk in sorted(taken, key=lambda chunk: chunk.offset)) == written


def test_file_that_was_truncated_is_read_from_its_start(files: dict[str, int]) -> None:
    capture = Capture(files)
    os.write(files["stdout"], b"before that")
    capture.take()
    own = os.open(f"/proc/self/fd/{files['stdout']}", os.O_WRONLY | os.O_TRUNC)
    os.write(own, b"after")
    os.close(own)
    assert capture.take() == [Chunk("stdout", 0, b"after")]


def test_streams_are_flushed_also_behind_redirection(files: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Capture(files)
    with open(files["stdout"], "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)
        print("held")
        assert capture.take() == [Chunk("stdout", 0, b"held\n")]
        print("held too")
        with redirect_stdout(io.StringIO()):
            assert capture.take() == [Chunk("stdout", 5, b"held too\n")]


def test_stream_that_cannot_be_flushed_is_harmless(files: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", None)
    output.flush_streams()
    os.write(files["stderr"], b"x")
    assert Capture(files).take() == [Chunk("stderr", 0, b"x")]


def test_ordinary_files_can_be_captured(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    capture = Capture({"stdout": fd})
    data = bytes(40 * PAGE)
    os.write(fd, data)
    assert capture.take() == [Chunk("stdout", 0, data)]
    os.close(fd)


def test_c_output_is_flushed() -> None:
    code = """
import ctypes, os
from monarch._procs.rank import output
from monarch._procs.os import posix
from monarch._procs.rank import text_streams
fd = posix.memfd("stdout")
os.dup2(fd, 1)
capture = output.Capture()
ctypes.CDLL(None).printf(b"from C")
assert os.fstat(1).st_size == 0
(chunk,) = capture.take()
assert chunk == ("stdout", 0, b"from C"), chunk
posix.unbuffer_c_stdout()
ctypes.CDLL(None).printf(b"a part")
assert os.fstat(1).st_size == 12
"""
    # With PYTHONUNBUFFERED, Python makes C write immediately as well.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr


def test_tail_is_the_end(files: dict[str, int]) -> None:
    fd = files["stdout"]
    assert read_tail(fd) == (0, b"")
    os.write(fd, b"0123456789")
    assert read_tail(fd) == (0, b"0123456789")
    assert read_tail(fd, limit=3) == (7, b"789")
    assert read_tail(fd, since=8) == (8, b"89")
    assert read_tail(fd, limit=3, since=5) == (7, b"789")
    assert read_tail(fd, since=10) == (10, b"")


def test_tail_omits_taken_and_freed_output(files: dict[str, int]) -> None:
    fd = files["stdout"]
    capture = Capture(files)
    os.write(fd, b"x" * (20 * PAGE))
    capture.take()
    assert read_tail(fd) == (20 * PAGE, b"")
    os.write(fd, b"the end\0")
    assert read_tail(fd, limit=1 << 20) == (20 * PAGE, b"the end\0")


def test_output_without_room_waits(files: dict[str, int]) -> None:
    capture = Capture(files)
    os.write(files["stdout"], b"x" * 1000)
    os.write(files["stderr"], b"y" * 1000)
    taken = capture.take(room=500)
    assert sum(len(chunk.data) for chunk in taken) == 500 and {chunk.stream for chunk in taken} == {"stdout", "stderr"}
    assert capture.left == 1500
    rest = capture.take()
    assert capture.left == 0 and sum(len(chunk.data) for chunk in rest) == 1500


def test_lines_take_more_room_than_bytes(files: dict[str, int]) -> None:
    capture = Capture(files)
    os.write(files["stdout"], b"\n" * 100_000)
    taken = capture.take(room=10_000)
    assert output.cost_of(b"\n" * 10) == 10 + 10 * output.LINE_COST
    assert sum(len(chunk.data) for chunk in taken) == 10_000 and capture.left == 90_000


def test_trimmed_output_keeps_its_end_and_frees_its_memory(files: dict[str, int]) -> None:
    capture = Capture(files, most=1 << 20)
    written = b"".join(b"line %d\n" % number for number in range(300_000))
    os.write(files["stdout"], written)
    capture.trim(100_000)
    assert blocks(files["stdout"]) <= 100_000 + 2 * PAGE
    (chunk,) = capture.take()
    # From the beginning of a line on, and its offset says exactly how much is missing.
    assert chunk.data.startswith(b"line ") and written[chunk.offset :] == chunk.data
    assert 0 < len(chunk.data) <= 100_000


def test_trimming_line_without_end_keeps_something(files: dict[str, int]) -> None:
    capture = Capture(files)
    os.write(files["stdout"], b"x" * 1_000_000 + b"\n")
    capture.trim(1000)
    (chunk,) = capture.take()
    assert chunk == Chunk("stdout", 999_001, b"x" * 999 + b"\n")


def test_agent_bounds_output_that_rank_does_not_take(files: dict[str, int]) -> None:
    capture = Capture(files)
    fd = files["stdout"]
    os.write(fd, b"begin")
    assert capture.take() == [Chunk("stdout", 0, b"begin")]
    line = b"y" * 999 + b"\n"
    for _ in range(5_000):
        os.write(fd, line)
    assert output.relieve(fd, 4 << 20) >= 4 << 20
    assert output.relieve(fd, 1 << 20) <= (1 << 20) + PAGE
    chunks = capture.take()
    # No zeros of the hole, and nothing twice.
    assert all(0 not in chunk.data for chunk in chunks)
    written = b"begin" + line * 5_000
    assert b"".join(chunk.data for chunk in chunks) == written[chunks[0].offset :]
    assert chunks[0].offset > 3_000_000


def test_flooding_writer_is_slowed_down_and_then_trimmed(files: dict[str, int]) -> None:
    capture = Capture(files, most=1 << 20)
    asked: list[int] = []
    os.write(files["stdout"], b"x" * (2 << 20))
    capture.pace(lambda: asked.append(1))
    assert asked and capture.behind() <= 1 << 20
    capture.pace(lambda: asked.append(2))
    assert asked == [1]


def test_very_long_text_is_written_piece_by_piece(files: dict[str, int]) -> None:
    capture = Capture(files, most=1 << 20)
    most: list[int] = []
    stream = text_streams.rank_text(os.dup(files["stdout"]))
    text_streams.set_pace(lambda: (most.append(capture.behind()), capture.trim(1 << 19))[1])
    try:
        assert stream.write("ä" * 5_000_000) == 5_000_000
        stream.flush()
    finally:
        text_streams.set_pace(None)
    assert max(most) <= 2 * (1 << 20)
    tail = capture.take()
    assert tail[-1].offset + len(tail[-1].data) == 10_000_000
    fd = stream.fileno()
    stream.detach()
    os.close(fd)


def test_long_text_is_not_encoded_as_whole() -> None:
    """Encoding is one step in C, which no interrupt breaks."""
    long = "x" * (32 * text_streams.STEP)
    with open(os.devnull, "wb") as file:
        stream = text_streams.rank_text(file.fileno())
        tracemalloc.start()
        try:
            assert stream.write(long) == len(long)
            stream.flush()
            assert tracemalloc.get_traced_memory()[1] < 8 * text_streams.STEP
        finally:
            tracemalloc.stop()


def test_stream_reports_buffered_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "ab") as file:
        stream = text_streams.rank_text(file.fileno())
        stream.write("whole lines\n")
        assert not stream.may_hold and path.read_text() == "whole lines\n"
        stream.write("a part")
        assert stream.may_hold
        stream.flush_held()
        assert not stream.may_hold and path.read_text().endswith("a part")
        stream.reconfigure(line_buffering=False)
        stream.write("not at once\n")
        assert stream.may_hold and "not at once" not in path.read_text()
        stream.close()


def test_stream_with_direct_buffer_use_may_hold_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "ab") as file:
        stream = text_streams.rank_text(file.fileno())
        stream.succeed()
        assert not stream.may_hold
        stream.buffer.write(b"bytes")
        assert path.read_bytes() == b"" and stream.may_hold
        stream.flush_held()
        assert path.read_bytes() == b"bytes" and stream.may_hold
        stream.close()


def test_buffered_output_of_c_is_detected() -> None:
    code = """
import ctypes, os
from monarch._procs.rank.output import own_may_hold
libc = ctypes.CDLL(None)
assert not own_may_hold()
libc.printf(b"held")
assert own_may_hold()
libc.fflush(None)
assert not own_may_hold()
"""
    # With PYTHONUNBUFFERED, Python makes C write immediately as well.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, env=env, check=True)


def test_stream_outlasts_a_closed_and_a_replaced_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_streams, "_files", {})
    with open(tmp_path / "captured", "w+b") as captured, open(tmp_path / "other", "w+b") as other:
        fd = os.dup(captured.fileno())
        stream = text_streams.standard_text(fd)
        try:
            os.close(fd)
            print("reopened", file=stream)
            stream.close()
            print("open", file=stream)
            assert text_streams.replaced() == []
            os.dup2(other.fileno(), fd)
            print("elsewhere", file=stream)
            assert text_streams.replaced() == [(fd, str(tmp_path / "other"))]
            print("captured again", file=stream)
            assert text_streams.replaced() == [], "told once"
            text_streams.restore()
            os.write(fd, b"restored\n")
            kept = os.dup(stream.succeed().raw.kept)
            os.dup2(other.fileno(), stream.succeed().raw.kept)
            os.dup2(other.fileno(), fd)
            assert text_streams.replaced() == [], "the duplicate is lost too"
            os.dup2(kept, stream.succeed().raw.kept)
            os.close(kept)
        finally:
            os.close(stream.succeed().raw.kept)
            os.close(fd)
    assert (tmp_path / "captured").read_text().split("\n")[:-1] == ["reopened", "open", "captured again", "restored"]
    assert (tmp_path / "other").read_text() == "elsewhere\n"
