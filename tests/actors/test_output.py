"""Output of ranks: its place, its order, and folding of equal lines."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from leaks import wait_until
from monarch._core.text.folding.blocks import OutputLine
from monarch._node.current import current_node
from monarch._session.session import need_session
from monarch._wire import messages as m
from monarch.actor import Actor, current_rank, endpoint
from monarch.exceptions import ActorError, SupervisionError


class Prints(Actor):
    @endpoint
    def say(self, text: str) -> None:
        print(text)

    @endpoint
    def say_rank(self, count: int = 1) -> int:
        for index in range(count):
            print(f"line {index} of rank {current_rank().rank}")
        return current_rank().rank

    @endpoint
    def by_all_ways(self) -> None:
        print("python stdout")
        print("python stderr", file=sys.stderr)
        os.write(1, b"descriptor 1\n")
        os.write(2, b"descriptor 2\n")
        libc = ctypes.CDLL(None)
        libc.printf(b"c printf\n")
        subprocess.run(["sh", "-c", "echo subprocess; echo subprocess stderr >&2"], check=True)

    @endpoint
    def write(self, *pieces: bytes) -> None:
        for piece in pieces:
            os.write(1, piece)

    @endpoint
    async def say_async(self, text: str) -> None:
        print(text)

    @endpoint
    def unfinished(self) -> None:
        print("no line end", end="")

    @endpoint
    def log(self, text: str) -> None:
        logging.getLogger("user").info(text)

    @endpoint
    def nothing(self) -> None:
        pass


class Asks(Actor):
    @endpoint
    def of(self, other: Any) -> None:
        other.end.call().get(timeout=20)


@pytest.fixture
def lines(host: Any) -> Iterator[list[OutputLine]]:
    """The lines as they arrive, without showing them."""
    output = need_session(current_node()).output
    output.flush()
    seen: list[OutputLine] = []
    old, output.on_line = output.on_line, seen.append
    yield seen
    output.flush()
    output.on_line = old


def texts(lines: list[OutputLine], stream: str = "stdout") -> list[str]:
    return [line.text for line in lines if line.stream == stream]


def test_output_is_shown_before_the_result(procs: Any, lines: list[OutputLine]) -> None:
    prints = procs(2).spawn("prints", Prints)
    prints.nothing.call().get(timeout=20)
    for number in range(50):
        prints.say.call(f"number {number}").get(timeout=20)
        assert texts(lines)[-1] == f"number {number}"
        assert lines[-1].ranks == (0, 1) and lines[-1].prefix() == "[ranks 0-1]"
    assert len(lines) == 50


def test_output_of_every_writer_is_captured(procs: Any, lines: list[OutputLine]) -> None:
    procs(1).spawn("prints", Prints).by_all_ways.call().get(timeout=20)
    assert sorted(texts(lines)) == ["c printf", "descriptor 1", "python stdout", "subprocess"]
    assert sorted(texts(lines, "stderr")) == ["descriptor 2", "python stderr", "subprocess stderr"]
    assert {line.prefix() for line in lines} == {"[rank 0]"}


def test_the_order_of_each_rank_is_kept(procs: Any, lines: list[OutputLine]) -> None:
    prints = procs(3).spawn("prints", Prints)
    prints.say_rank.call(300).get(timeout=20)
    assert wait_until(lambda: len(lines) == 900)
    for rank in range(3):
        mine = [line.text for line in lines if line.ranks == (rank,)]
        assert mine == [f"line {index} of rank {rank}" for index in range(300)]


def test_lines_common_to_all_ranks_are_folded(procs: Any, lines: list[OutputLine]) -> None:
    prints = procs(4).spawn("prints", Prints)
    prints.nothing.call().get(timeout=20)
    prints.say.call("the same").get(timeout=20)
    prints.slice(gpus=slice(1, 3)).say.call("some").get(timeout=20)
    prints.say_rank.call().get(timeout=20)
    assert [(line.prefix(), line.text) for line in lines[:2]] == [("[ranks 0-3]", "the same"), ("[ranks 1-2]", "some")]
    assert wait_until(lambda: len(lines) == 6)
    assert sorted(line.prefix() for line in lines[2:]) == [f"[rank {rank}]" for rank in range(4)]


def test_split_characters_and_invalid_bytes_are_shown(procs: Any, lines: list[OutputLine]) -> None:
    prints = procs(1).spawn("prints", Prints)
    data = "größe 🙂 Ende\n".encode()
    prints.write.call(*(bytes([byte]) for byte in data)).get(timeout=20)
    assert texts(lines) == ["größe 🙂 Ende"]
    # At the end of a call its output is shown, though the line has not ended; no character is lost by that.
    for piece in (b"h\xc3", b"\xbc", b"h \xff\n"):
        prints.write.call(piece).get(timeout=20)
    assert texts(lines)[1:] == ["h", "ü", "h \ufffd"]


def test_long_lines_and_much_output_arrive(procs: Any, lines: list[OutputLine]) -> None:
    prints = procs(1).spawn("prints", Prints)
    prints.say.call("x" * 3_000_000).get(timeout=20)
    assert [len(text) for text in texts(lines)] == [3_000_000]
    prints.write.call(b"y" * 99 + b"\n", *[b"z" * 99 + b"\n"] * 40_000).get(timeout=30)
    assert wait_until(lambda: len(lines) == 40_002)


def test_unfinished_line_is_shown_finally(procs: Any, lines: list[OutputLine]) -> None:
    mesh = procs(1)
    prints = mesh.spawn("prints", Prints)
    prints.unfinished.call().get(timeout=20)
    prints.say.call(", and its end").get(timeout=20)
    assert wait_until(lambda: "no line end, and its end" in "".join(texts(lines)))


def test_output_of_async_endpoints_and_broadcasts(procs: Any, lines: list[OutputLine]) -> None:
    prints = procs(2).spawn("prints", Prints)
    prints.nothing.call().get(timeout=20)
    prints.say_async.call("async").get(timeout=20)
    assert texts(lines) == ["async"]
    prints.say.broadcast("broadcast")
    assert wait_until(lambda: texts(lines)[-1] == "broadcast")


def test_output_source_names_the_call(procs: Any, lines: list[OutputLine]) -> None:
    mesh = procs(1)
    first, second = mesh.spawn("first", Prints), mesh.spawn("second", Prints)
    # What one of them prints while another one ends something may be taken for that one's.
    second.initialized.get(timeout=20)
    one = first.say.call("one")
    one.get(timeout=20)
    two = second.say.call("two")
    two.get(timeout=20)
    found: dict[str, Any] = {line.text: line.source for line in lines}
    assert found["one"][1:] == (first._key, one.port) and found["two"][1:] == (second._key, two.port)


def test_concurrent_prints_of_one_proc_lose_nothing(procs: Any, lines: list[OutputLine]) -> None:
    mesh = procs(1)
    actors = [mesh.spawn(f"a{index}", Prints) for index in range(3)]
    for number in range(100):
        futures = [actor.say.call(f"{index} says {number}") for index, actor in enumerate(actors)]
        for index, future in enumerate(futures):
            future.get(timeout=20)
            assert f"{index} says {number}" in texts(lines)
    assert len(lines) == 300


def test_output_keeps_stdout_and_stderr_apart(procs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    prints = procs(2).spawn("prints", Prints)
    prints.nothing.call().get(timeout=20)
    prints.by_all_ways.call().get(timeout=20)
    out, err = capsys.readouterr()
    assert "[ranks 0-1] python stdout\n" in out and "[ranks 0-1] python stderr\n" in err
    assert "python stderr" not in out


def test_logging_option(procs: Any, lines: list[OutputLine]) -> None:
    import asyncio

    mesh = procs(2)
    prints = mesh.spawn("prints", Prints)
    asyncio.run(mesh.logging_option(stream_to_client=False))
    prints.say.call("unseen").get(timeout=20)
    asyncio.run(mesh.logging_option(stream_to_client=True, aggregate_window_sec=0, level=logging.INFO))
    prints.log.call("a record").get(timeout=20)
    prints.say.call("seen").get(timeout=20)
    assert wait_until(lambda: "seen" in texts(lines))
    assert "unseen" not in texts(lines)
    assert any("a record" in text for text in texts(lines, "stderr"))
    asyncio.run(mesh.logging_option(level=logging.WARNING))
    prints.log.call("too little").get(timeout=20)
    assert not any("too little" in text for text in texts(lines, "stderr"))
    for wrong in ({"aggregate_window_sec": -1}, {"level": 256}, {"level": -1}):
        with pytest.raises(ValueError):
            asyncio.run(mesh.logging_option(**wrong))


def test_last_words_of_stopped_procs_are_shown(procs: Any, lines: list[OutputLine]) -> None:
    class Says(Actor):
        @endpoint
        def f(self) -> None: ...

        def __cleanup__(self, error: Exception | None) -> None:
            print("good bye")

    mesh = procs(2)
    mesh.spawn("says", Says).f.call().get(timeout=20)
    mesh.stop().get(timeout=20)
    assert wait_until(lambda: "good bye" in texts(lines))


def test_dead_ranks_keep_only_quoted_output(procs: Any, lines: list[OutputLine]) -> None:
    class Talks(Actor):
        @endpoint
        def end(self) -> None:
            for stream in (1, 2):
                os.write(stream, b"".join(b"line %d\n" % number for number in range(9_000)))
            os._exit(3)

    for stop in (False, True):
        mesh = procs(1)
        talks = mesh.spawn("talks", Talks)
        proc = talks._members_at().peers[0]
        if stop:
            mesh.stop().get(timeout=20)
        else:
            with pytest.raises(SupervisionError, match=r"line 8990\n(.*\n)*.*line 8999"):
                talks.end.call().get(timeout=20)
            assert wait_until(lambda: texts(lines).count("line 8999") and texts(lines, "stderr").count("line 8999"))
        assert proc.dead is not None
        assert sum(len(data) for _, _, data in proc.dead.tails) == (0 if stop else 8192)
        # A late one asks the agent, which has no more of it.
        with pytest.raises(ActorError) as caught:
            procs(1).spawn("asks", Asks).of.call_one(talks).get(timeout=20)
        assert ("line 8999" in str(caught.value)) == (not stop)


def test_idle_ranks_send_no_output(procs: Any, lines: list[OutputLine], monkeypatch: pytest.MonkeyPatch) -> None:
    prints = procs(1).spawn("prints", Prints)
    prints.nothing.call().get(timeout=20)
    node = current_node()
    told: list[Any] = []
    take = node.dispatch.handlers[m.Output]
    monkeypatch.setitem(node.dispatch.handlers, m.Output, lambda output, _: (told.append(output), take(output, ())))
    for _ in range(100):
        prints.nothing.call().get(timeout=20)
    assert not told


def test_flood_is_bounded_and_omitted_bytes_are_exact(procs: Any, lines: list[OutputLine]) -> None:
    class Floods(Actor):
        @endpoint
        def flood(self, count: int) -> int:
            for _ in range(count):
                os.write(1, b"y" * (1 << 20))
            os.write(1, b"\n")
            print("the end")
            return os.fstat(1).st_blocks

        @endpoint
        def held(self) -> int:
            return os.fstat(1).st_blocks * 512

    floods = procs(1).spawn("floods", Floods)
    floods.flood.call(400).get(timeout=60)
    assert wait_until(lambda: "the end" in texts(lines))
    shown = sum(text.count("y") for text in texts(lines) if "omitted" not in text)
    notes = [re.match(r"\[([\d,]+) bytes of output.* omitted here\]$", text) for text in texts(lines)]
    left_out = sum(int(note[1].replace(",", "")) for note in notes if note)
    assert shown + left_out == 400 << 20
    # Nothing of it is held any more.
    assert floods.held.call_one().get(timeout=20) < 1 << 20


def test_output_within_the_bound_is_all_shown(procs: Any, lines: list[OutputLine]) -> None:
    class Floods(Actor):
        @endpoint
        def say(self, count: int) -> None:
            for number in range(count):
                print(current_rank().rank, number)

    floods = procs(2).spawn("floods", Floods)
    floods.say.call(50_000).get(timeout=60)
    assert wait_until(lambda: len(lines) == 100_000)
    for rank in range(2):
        assert [line.text for line in lines if line.ranks == (rank,)] == [f"{rank} {n}" for n in range(50_000)]


def test_c_output_without_a_newline_comes_with_its_call(procs: Any, lines: list[OutputLine]) -> None:
    class Prints(Actor):
        @endpoint
        def part(self) -> None:
            ctypes.CDLL(None).printf(b"a part")

        @endpoint
        def in_child(self) -> None:
            subprocess.run([sys.executable, "-c", "import ctypes; ctypes.CDLL(None).printf(b'of a child')"], check=True)

    prints = procs(1).spawn("prints", Prints)
    prints.part.call().get(timeout=20)
    assert texts(lines) == ["a part"]
    prints.in_child.call().get(timeout=20)
    assert texts(lines) == ["a part", "of a child"]


def test_output_hook_may_call_ranks(procs: Any, lines: list[OutputLine]) -> None:
    prints = procs(2).spawn("prints", Prints)
    answers: list[Any] = []

    def ask(line: OutputLine) -> None:
        lines.append(line)
        # It runs with no lock held and not in the receiving thread.
        answers.append(len(prints.nothing.call().get(timeout=20)))
        output.flush()

    output = need_session(current_node()).output
    output.on_line = ask
    prints.say.call("one").get(timeout=20)
    # On a busy machine the lines of the two ranks may not be merged.
    assert wait_until(lambda: set(texts(lines)) == {"one"} and len(answers) == len(lines)), (lines, answers)
    assert set(answers) == {2}


def test_failing_output_hook_does_not_end_output(
    procs: Any, lines: list[OutputLine], capsys: pytest.CaptureFixture[str]
) -> None:
    prints = procs(1).spawn("prints", Prints)

    def fail(line: OutputLine) -> None:
        raise ValueError("a hook failed")

    output = need_session(current_node()).output
    output.on_line = fail
    prints.say.call("one").get(timeout=20)
    output.on_line = lines.append
    prints.say.call("two").get(timeout=20)
    assert texts(lines) == ["two"] and "a hook failed" in capsys.readouterr().err
