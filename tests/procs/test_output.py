"""Output of a rank: taken as it comes, and read after its death."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from monarch._procs import output, posix
from monarch._procs.output import Capture, Chunk, read_tail

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


def test_what_is_new_is_taken_once(files: dict[str, int]) -> None:
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


def test_little_by_little_memory_is_freed_too(files: dict[str, int]) -> None:
    capture = Capture(files)
    for _ in range(300):
        os.write(files["stdout"], bytes(PAGE // 2))
        assert len(capture.take()) == 1
    assert blocks(files["stdout"]) <= 17 * PAGE


def test_the_position_of_the_file_stays(files: dict[str, int]) -> None:
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


def test_a_file_that_was_truncated_is_read_from_its_start(files: dict[str, int]) -> None:
    capture = Capture(files)
    os.write(files["stdout"], b"before that")
    capture.take()
    own = os.open(f"/proc/self/fd/{files['stdout']}", os.O_WRONLY | os.O_TRUNC)
    os.write(own, b"after")
    os.close(own)
    assert capture.take() == [Chunk("stdout", 0, b"after")]


def test_streams_are_flushed_also_behind_a_redirection(files: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Capture(files)
    with open(files["stdout"], "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)
        print("held")
        assert capture.take() == [Chunk("stdout", 0, b"held\n")]
        print("held too")
        with redirect_stdout(io.StringIO()):
            assert capture.take() == [Chunk("stdout", 5, b"held too\n")]


def test_a_stream_that_cannot_be_flushed_does_no_harm(files: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", None)
    output.flush_streams()
    os.write(files["stderr"], b"x")
    assert Capture(files).take() == [Chunk("stderr", 0, b"x")]


def test_other_files_than_those_in_memory_can_be_captured(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    capture = Capture({"stdout": fd})
    data = bytes(40 * PAGE)
    os.write(fd, data)
    assert capture.take() == [Chunk("stdout", 0, data)]
    os.close(fd)


def test_c_output_is_flushed() -> None:
    code = """
import ctypes, os
from monarch._procs import output, posix
fd = posix.memfd("stdout")
os.dup2(fd, 1)
capture = output.Capture()
ctypes.CDLL(None).printf(b"from C")
assert os.fstat(1).st_size == 0
(chunk,) = capture.take()
assert chunk == ("stdout", 0, b"from C"), chunk
posix.line_buffer_c_stdout()
ctypes.CDLL(None).printf(b"a line\\n")
assert os.fstat(1).st_size == 13
"""
    # With PYTHONUNBUFFERED, Python has C write at once as well.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr


def test_a_tail_is_the_end(files: dict[str, int]) -> None:
    fd = files["stdout"]
    assert read_tail(fd) == (0, b"")
    os.write(fd, b"0123456789")
    assert read_tail(fd) == (0, b"0123456789")
    assert read_tail(fd, limit=3) == (7, b"789")
    assert read_tail(fd, since=8) == (8, b"89")
    assert read_tail(fd, limit=3, since=5) == (7, b"789")
    assert read_tail(fd, since=10) == (10, b"")


def test_a_tail_leaves_out_what_was_taken_and_freed(files: dict[str, int]) -> None:
    fd = files["stdout"]
    capture = Capture(files)
    os.write(fd, b"x" * (20 * PAGE))
    capture.take()
    assert read_tail(fd) == (20 * PAGE, b"")
    os.write(fd, b"the end\0")
    assert read_tail(fd, limit=1 << 20) == (20 * PAGE, b"the end\0")
