"""The header of a ``%%mesh`` cell: parsed options, and errors for the rest."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarch_kernel.grammar.header import OPTIONS, Header, HeaderError, parse, parse_where, ranks_of


@pytest.mark.parametrize(
    ("line", "header"),
    [
        ("", Header()),
        ("   ", Header()),
        ("trainers", Header(name="trainers")),
        ("[1]", Header(ranks=[1])),
        (" [ 0 , 3 ] ", Header(ranks=[0, 3])),
        ("[::2]", Header(ranks=[slice(None, None, 2)])),
        ("[-1]", Header(ranks=[-1])),
        ("[0, 2:4]", Header(ranks=[0, slice(2, 4)])),
        ("trainers[gpus=0:4, hosts=1]", Header(name="trainers", axes={"gpus": slice(0, 4), "hosts": 1})),
        ("trainers [gpus=-1]", Header(name="trainers", axes={"gpus": -1})),
        ("--nowait --quiet", Header(nowait=True, quiet=True)),
        ("m[0] --timeout 1.5 --out x", Header(name="m", ranks=[0], timeout=1.5, out="x")),
        ("--out='y'", Header(out="y")),
        ("--timeout=2", Header(timeout=2.0)),
        ("--collect", Header(stream=False)),
        ("--collect --stream", Header()),
    ],
)
def test_header_is_parsed(line: str, header: Header) -> None:
    assert parse(line) == header


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[", ["the bracket", "not closed"]),
        ("1abc", ["cannot parse"]),
        ("[]", ["empty", "[0,3]"]),
        ("[ , ]", ["empty"]),
        ("[1.5]", ["'1.5'"]),
        ("[-]", ["'-'"]),
        ("[1:-]", ["'1:-'"]),
        ("[::0]", ["step"]),
        ("[1, gpus=2]", ["mixes axes and ranks"]),
        ("[gpus=1, gpus=2]", ["'gpus'", "twice"]),
        ("[=1]", ["=1", "axis"]),
        ("[gpus=]", ["'gpus='", "range"]),
        ("--nowiat", ["'--nowiat'", "--nowait"]),
        ("--timeout", ["--timeout", "seconds", "SECONDS"]),
        ("--timeout soon", ["seconds from 0 to", "'soon'"]),
        ("--timeout -1", ["seconds from 0 to", "'-1'"]),
        ("--timeout nan", ["seconds from 0 to", "'nan'"]),
        ("--out", ["--out", "NAME"]),
        ("--out 3x", ["variable", "'3x'"]),
        ("--out class", ["variable", "'class'"]),
        ("--out 'x", ["quotation"]),
        ("mesh other", ["'mesh other'", "options"]),
        ("--nowait --timeout 3", ["--nowait", "--timeout", "result"]),
        ("--nowait --collect", ["--nowait", "--collect"]),
        ("[1]x", ["cannot parse", "write %%mesh x[1]"]),
        ("--timeout 10 [0:2]", ["cannot parse", "write %%mesh [0:2] --timeout 10"]),
        ("other 0-3", ["write %%mesh other[0:4]"]),
        ("rank 0", ["write %%mesh [0]"]),
        ("ranks 0,2 --quiet", ["write %%mesh [0,2] --quiet"]),
        ("--rank 3", ["unknown option '--rank'; write the ranks in brackets, as in %%mesh [3]"]),
        ("--targets=0,1", ["write the ranks in brackets, as in %%mesh [0,1]"]),
        ("--ranks all", ["write the ranks in brackets, as in %%mesh [0:2]"]),
        ("0,2 --quiet", ["write %%mesh [0,2] --quiet"]),
        ("[1][2]", ["[MESH][SLICE]"]),
    ],
)
def test_header_error_names_the_problem(line: str, words: list[str]) -> None:
    with pytest.raises(HeaderError) as caught:
        parse(line)
    text = str(caught.value)
    for word in words:
        assert word.lower() in text.lower()


def test_header_options_are_parsed_and_explained() -> None:
    for option, meaning in OPTIONS.items():
        value = " 1" if option == "--timeout" else " x" if option in ("--out", "--world") else ""
        parse(option + value)
        assert meaning


LINES = st.one_of(
    st.text(max_size=40),
    st.text("[]=:,-0123 abgpus'\"\\", max_size=30),
    st.builds(
        lambda *parts: " ".join(parts),
        st.sampled_from(["", "m", "m[0]", "[gpus=0:2]", "[::]", "[0", "["]),
        st.sampled_from([*OPTIONS, "--", "-x", ""]),
        st.text(max_size=8),
    ),
)


@given(LINES)
@example("[" + "9" * 5000 + "]")
@example("--timeout " + "9" * 400)
@example("--timeout 1e999")
@example("[²]")
def test_header_of_any_text_is_parsed_or_refused(line: str) -> None:
    try:
        header = parse(line)
    except HeaderError as error:
        assert str(error)
        return
    assert header.name is None or header.name.isidentifier()
    assert header.timeout is None or 0 <= header.timeout < float("inf")
    if header.ranks is not None:
        try:
            ranks = ranks_of(header.ranks, 8)
        except HeaderError as error:
            assert "ranks 0 to 7" in str(error)
        else:
            assert ranks and all(0 <= rank < 8 for rank in ranks)


@given(st.lists(st.integers(-12, 12) | st.slices(8), min_size=1), st.just(8))
def test_ranks_of_slices_match_python_lists(chosen: list[int | slice], total: int) -> None:
    everything = list(range(total))
    try:
        wanted: list[int] = []
        for each in chosen:
            wanted.extend(everything[each] if isinstance(each, slice) else [everything[each]])
    except IndexError:
        wanted = []
    if not wanted:
        with pytest.raises(HeaderError, match="ranks 0 to 7"):
            ranks_of(chosen, total)
    else:
        assert ranks_of(chosen, total) == list(dict.fromkeys(wanted))


def test_rank_error_names_a_mesh_of_one_rank() -> None:
    with pytest.raises(HeaderError, match=r"rank 0\b(?! to)"):
        ranks_of([1], 1)


def test_brackets_alone_are_parsed() -> None:
    assert parse_where("gpus = 1 : 3 : 2") == ({"gpus": slice(1, 3, 2)}, None)
    assert parse_where("0,") == (None, [0])
    # A word is a role from %mesh up --roles.
    assert parse("[load]").role == "load" and parse("m[ load ]").role == "load" and not parse("[0]").role
