"""The first line of a ``%%mesh`` cell: which mesh, which of its ranks, which options."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

_HEAD = re.compile(r"(?P<name>[A-Za-z_]\w*)?\s*(?:\[(?P<where>[^\]]*)\])?\s*(?P<rest>--.*)?", re.S)
_RANGE = re.compile(r"\s*(-?[0-9]{1,9})?\s*(?::\s*(-?[0-9]{1,9})?\s*(?::\s*([0-9]{1,9})?\s*)?)?\s*")
_VALUED = ("--timeout", "--out")
_LONGEST = 1e9
"""Seconds; more than anybody waits, and less than clocks take."""


class HeaderError(ValueError):
    """The first line cannot be understood; the text says where."""


@dataclass
class Header:
    """What the first line of a cell says."""

    name: str | None = None
    """The mesh; None for the one in use."""
    axes: dict[str, int | slice] | None = None
    """Ranks by axis."""
    ranks: list[int | slice] | None = None
    """Ranks by number, in the mesh laid out in one row."""
    role: str = ""
    """Ranks by what ``%mesh up --roles`` has called them."""
    nowait: bool = False
    timeout: float | None = None
    out: str | None = None
    stream: bool = True
    quiet: bool = False
    rank_prefix: bool | None = None
    define: bool = False
    """Whether all of the cell is run again on ranks that come later."""
    once: bool = False
    """Whether nothing of it is."""


OPTIONS = {
    "--nowait": "go on with the notebook while the cell runs; gives a handle",
    "--timeout": "SECONDS to wait at most; the ranks are interrupted then",
    "--out": "NAME of a variable of the notebook for the results",
    "--collect": "show what is printed when the cell has ended",
    "--stream": "show what is printed as it comes (as usual)",
    "--quiet": "show nothing that is printed or returned",
    "--rank-prefix": "name the rank on each line even if the cell runs on one only",
    "--define": "run all of the cell again on ranks that come later, by heal and resize, not only what it defines",
    "--once": "run nothing of the cell again there",
}


def parse(line: str) -> Header:
    """Understands the first line of a cell.

    Raises:
        HeaderError: it is none.
    """
    match = _HEAD.fullmatch(line.strip())
    if match is None:
        raise HeaderError(f"cannot understand {line.strip()!r}; write %%mesh [MESH][SLICE] [options], as in "
                          f"%%mesh trainers[gpus=0:4] --timeout 10")  # fmt: skip
    header = Header(name=match["name"])
    where = (match["where"] or "").strip()
    if where.isidentifier():
        header.role = where
    elif match["where"] is not None:
        header.axes, header.ranks = parse_where(where)
    _options(header, match["rest"] or "")
    if header.nowait and (header.timeout is not None or not header.stream):
        raise HeaderError("--nowait gives a handle that is asked for the end: it goes with neither --timeout nor "
                          "--collect; handle.result(SECONDS) waits so long at most")  # fmt: skip
    if header.define and header.once:
        raise HeaderError("--define has the cell run again on ranks that come later, and --once has not; give one")
    return header


def _options(header: Header, text: str) -> None:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise HeaderError(f"cannot understand {text.strip()!r}: {error}") from None
    while words:
        word, equals, given = words.pop(0).partition("=")
        if equals and word in _VALUED:
            words.insert(0, given)
        elif equals or word not in OPTIONS:
            word = word + equals + given
            raise HeaderError(f"there is no option {word!r}; there are {', '.join(OPTIONS)}")
        if word in _VALUED:
            if not words:
                raise HeaderError(f"{word} needs a value: {OPTIONS[word]}")
            value = words.pop(0)
            if word == "--out":
                if not value.isidentifier() or iskeyword(value):
                    raise HeaderError(f"--out needs the name of a variable, and {value!r} is none")
                header.out = value
            else:
                try:
                    header.timeout = float(value)
                except ValueError:
                    header.timeout = math.nan
                if not 0 <= header.timeout <= _LONGEST:
                    raise HeaderError(f"--timeout needs a number of seconds, and {value!r} is none")
        elif word == "--collect":
            header.stream = False
        elif word == "--stream":
            header.stream = True
        else:
            setattr(header, word[2:].replace("-", "_"), True)


def parse_where(text: str) -> tuple[dict[str, int | slice] | None, list[int | slice] | None]:
    """What stands in the brackets: axes, as in ``gpus=0:4, hosts=1``, or ranks, as in ``0,3`` and ``::2``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise HeaderError("the brackets are empty; name axes, as in [gpus=0:4], or ranks, as in [0,3] or [::2]")
    if all("=" in part for part in parts):
        axes: dict[str, int | slice] = {}
        for part in parts:
            label, _, value = part.partition("=")
            if not label.strip().isidentifier():
                raise HeaderError(f"{part!r} names no axis; write it as in [gpus=0:4]")
            if label.strip() in axes:
                raise HeaderError(f"the axis {label.strip()!r} is there twice in [{text}]")
            if not value.strip():
                raise HeaderError(f"{part!r} names no ranks; write a number or a range, as in [gpus=0:4]")
            axes[label.strip()] = _index(value)
        return axes, None
    if any("=" in part for part in parts):
        raise HeaderError(f"[{text}] has both axes and ranks; use the one or the other")
    return None, [_index(part) for part in parts]


def _index(text: str) -> int | slice:
    match = _RANGE.fullmatch(text)
    if match is None or not text.strip():
        raise HeaderError(f"{text.strip()[:80]!r} is neither a number nor a range such as 0:4 or ::2")
    start, stop, step = (int(part) if part else None for part in match.groups())
    if ":" not in text:
        assert start is not None
        return start
    if step == 0:
        raise HeaderError(f"the step of {text.strip()!r} is 0, so it goes nowhere; the least is 1")
    return slice(start, stop, step)


def ranks_of(chosen: list[int | slice], total: int) -> list[int]:
    """The ranks that numbers and ranges name, in the order given, each once.

    Raises:
        HeaderError: there is no such rank.
    """
    ranks: dict[int, Any] = {}
    for each in chosen:
        if isinstance(each, slice):
            ranks.update(dict.fromkeys(range(*each.indices(total))))
        elif -total <= each < total:
            ranks[each % total] = None
        else:
            raise HeaderError(f"there is no rank {each}; {_there(total)}")
    if not ranks:
        raise HeaderError(f"this names no rank at all; {_there(total)}")
    return list(ranks)


def _there(total: int) -> str:
    return f"this mesh has ranks 0 to {total - 1}" if total > 1 else "this mesh has rank 0 only"
