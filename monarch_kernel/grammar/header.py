"""The first line of a ``%%mesh`` cell: which mesh, which of its ranks, which options."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any, NamedTuple

from monarch_kernel.grammar.suggest import did_you_mean

_HEAD = re.compile(r"(?P<name>[A-Za-z_]\w*)?\s*(?:\[(?P<where>[^\]]*)\])?\s*(?P<rest>--.*)?", re.S)
_RANGE = re.compile(r"\s*(-?[0-9]{1,9})?\s*(?::\s*(-?[0-9]{1,9})?\s*(?::\s*([0-9]{1,9})?\s*)?)?\s*")
_BARE = re.compile(r"[0-9]{1,9}([-:,][0-9]{1,9})*")
"""Ranks without brackets."""
_PAIR = re.compile(r"([0-9]+)-([0-9]+)")
HERE = "%%here"
"""First line of a cell that runs in the notebook, in either mode."""
VALUED = ("--timeout", "--out", "--world")
"""Options that take a value."""
_LONGEST = 1e9
"""Seconds; longer than anybody waits, and within the range of clocks."""


class HeaderError(ValueError):
    """A header or magic line that is wrong; the text says where."""


@dataclass
class Header:
    """The parsed first line of a cell."""

    name: str | None = None
    """The mesh; None for the one in use."""
    axes: dict[str, int | slice] | None = None
    """Ranks by axis."""
    ranks: list[int | slice] | None = None
    """Ranks by number, in row-major order."""
    role: str = ""
    """The role of the ranks, as named by ``%mesh up --roles``."""
    nowait: bool = False
    timeout: float | None = None
    out: str | None = None
    stream: bool = True
    quiet: bool = False
    define: bool = False
    """Whether new ranks run the whole cell again."""
    here: bool = False
    """Whether the notebook runs the cell too, before the ranks."""
    once: bool = False
    """Whether new ranks run none of it."""
    in_frame: bool = False
    """Whether it runs in the selected frame of paused ranks."""
    force: bool = False
    """Whether it may call functions that wait for other ranks, in a frame."""
    dry_run: bool = False
    """Whether it is simulated instead of run."""
    world: str | None = None
    """The devices of the simulation, as in 16x8:h100."""


OPTIONS = {
    "--nowait": "do not wait for the cell; return a handle",
    "--here": "run the cell in the notebook too, before the ranks",
    "--timeout": "SECONDS before the ranks are interrupted; none for no limit",
    "--out": "NAME of a notebook variable for the results",
    "--collect": "show the output when the cell ends",
    "--stream": "show the output as it arrives (default)",
    "--quiet": "show neither output nor results",
    "--define": "run the whole cell on new ranks (heal, resize), not only what it defines",
    "--once": "never run this cell on new ranks",
    "--in-frame": "run the cell in the selected frame of paused ranks; see %mesh frame",
    "--dry-run": "simulate the cell: memory per rank, collectives and time; nothing runs on the ranks",
    "--world": "HOSTSxGPUS:DEVICE of a dry run, as in 16x8:h100; the ranks of the mesh if omitted",
    "--force": "with --in-frame: also call functions that wait for other ranks",
}


class Defaults(NamedTuple):
    """The meaning of a header where it is silent."""

    ranks: str = ""
    """The text in brackets, for a header without a mesh and brackets."""
    options: Mapping[str, str | None] = {}
    """The options, each with its value."""


NO_DEFAULTS = Defaults()
_NOT_IN_FRAME = {"--nowait", "--here", "--timeout", "--out", "--define", "--once", "--collect"}
"""Options that mean nothing for statements in a frame."""
_NOT_IN_DRY_RUN = {"--nowait", "--here", "--timeout", "--define", "--once", "--in-frame", "--force"}
"""Options that mean nothing for a cell that does not run."""
_RANKS = {"--rank", "--ranks", "-r", "--target", "--targets", "-t"}
"""Options of other notebook magics for what brackets are here."""
_REPLACED = {"--collect": {"--stream", "--nowait"}, "--timeout": {"--nowait"}}
"""Options that take the place of a default one."""


def parse(line: str, defaults: Defaults = NO_DEFAULTS) -> Header:
    """Parse the first line of a cell.

    Args:
        line: the text after ``%%mesh``.
        defaults: the defaults of the notebook.

    Raises:
        HeaderError: it is invalid.
    """
    match = _HEAD.fullmatch(line.strip())
    if match is None and line.count("[") > line.count("]"):
        raise HeaderError(f"the bracket in {line.strip()!r} is not closed; write for example %%mesh [0:2]")
    if match is None or "[" in (match["rest"] or ""):
        usual = "%%mesh [MESH][SLICE] [options], as in %%mesh trainers[gpus=0:4] --timeout 10"
        raise HeaderError(f"cannot parse {line.strip()!r}; write {_arranged(line) or usual}")
    header = Header(name=match["name"])
    brackets = match["where"]
    if brackets is None and header.name is None and defaults.ranks:
        brackets = defaults.ranks
    where = (brackets or "").strip()
    if where.isidentifier():
        header.role = where
    elif brackets is not None:
        header.axes, header.ranks = parse_where(where)
    given = _options(header, _split(match["rest"] or ""))
    for option, value in defaults.options.items():
        if option not in given and not given.intersection(_REPLACED.get(option, ())):
            _options(header, [option, *([value] if value is not None else [])])
    if header.nowait and (header.timeout is not None or not header.stream):
        raise HeaderError("--nowait cannot be combined with --timeout or --collect; "
                          "handle.result(SECONDS) waits for the cell with a timeout")  # fmt: skip
    if header.define and header.once:
        raise HeaderError("--define and --once contradict each other; give only one")
    if header.in_frame and given & _NOT_IN_FRAME:
        raise HeaderError(f"--in-frame cannot be combined with {', '.join(sorted(given & _NOT_IN_FRAME))}")
    if header.dry_run and given & _NOT_IN_DRY_RUN:
        raise HeaderError(f"--dry-run cannot be combined with {', '.join(sorted(given & _NOT_IN_DRY_RUN))}")
    return header


def _arranged(line: str) -> str:
    """Return the line with its parts in their order, mesh, ranks in brackets and options; empty if that is no line."""
    brackets = re.findall(r"\[[^\]]*\]", line)
    head, dashes, options = re.sub(r"\[[^\]]*\]", " ", line).partition("--")
    words = [word for word in head.split() if word not in ("rank", "ranks")]
    names = [word for word in words if word.isidentifier()]
    ranks = [word for word in words if _BARE.fullmatch(word)]
    brackets += [f"[{_PAIR.sub(lambda pair: f'{pair[1]}:{int(pair[2]) + 1}', word)}]" for word in ranks]
    if len(names) > 1 or len(brackets) != 1 or len(names) + len(ranks) < len(words):
        return ""
    arranged = f"%%mesh {''.join(names)}{brackets[0]} {dashes}{options}".split()
    return " ".join(arranged)


def check_option(option: str, value: str) -> None:
    """Check the value of an option.

    Raises:
        HeaderError: it is invalid.
    """
    _options(Header(), [option, value])


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise HeaderError(f"cannot parse {text.strip()!r}: {error}") from None


def _options(header: Header, words: list[str]) -> set[str]:
    """Set the options of a header; return those that were given."""
    given: set[str] = set()
    while words:
        word, equals, value = words.pop(0).partition("=")
        if equals and word in VALUED:
            words.insert(0, value)
        elif equals or word not in OPTIONS:
            if word in _RANKS:
                ranks = value or (words[0] if words else "")
                example = ranks if _BARE.fullmatch(ranks) and "-" not in ranks else "0:2"
                raise HeaderError(f"unknown option {word!r}; write the ranks in brackets, as in %%mesh [{example}]")
            word = word + equals + value
            expected = ": expected one of " + ", ".join(OPTIONS)
            guess = did_you_mean(word, OPTIONS)
            raise HeaderError(f"unknown option {word!r}{guess or expected}")
        given.add(word)
        if word in VALUED:
            if not words:
                raise HeaderError(f"{word} needs a value: {OPTIONS[word]}")
            value = words.pop(0)
            if word == "--out":
                if not value.isidentifier() or iskeyword(value):
                    raise HeaderError(f"--out: expected a variable name, got {value!r}")
                header.out = value
            elif word == "--world":
                header.world = value
            else:
                header.timeout = _seconds(value)
        elif word == "--collect":
            header.stream = False
        elif word == "--stream":
            header.stream = True
        else:
            setattr(header, word[2:].replace("-", "_"), True)
    return given


def _seconds(text: str) -> float | None:
    """Return the timeout that an option gives; None for none, which replaces a default."""
    if text == "none":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _LONGEST:
        raise HeaderError(f"--timeout: expected seconds from 0 to {_LONGEST:g}, or none; got {text!r}")
    return seconds


def parse_where(text: str) -> tuple[dict[str, int | slice] | None, list[int | slice] | None]:
    """Parse the text in the brackets: axes, as in ``gpus=0:4, hosts=1``, or ranks, as in ``0,3`` and ``::2``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise HeaderError("the brackets are empty; name axes, as in [gpus=0:4], or ranks, as in [0,3] or [::2]")
    if all("=" in part for part in parts):
        axes: dict[str, int | slice] = {}
        for part in parts:
            label, _, value = part.partition("=")
            if not label.strip().isidentifier():
                raise HeaderError(f"{part!r} names no axis; write for example [gpus=0:4]")
            if label.strip() in axes:
                raise HeaderError(f"the axis {label.strip()!r} appears twice in [{text}]")
            if not value.strip():
                raise HeaderError(f"{part!r} has no value; write an index or a range, as in [gpus=0:4]")
            axes[label.strip()] = _index(value)
        return axes, None
    if any("=" in part for part in parts):
        raise HeaderError(f"[{text}] mixes axes and ranks; use one or the other")
    return None, [_index(part) for part in parts]


def _index(text: str) -> int | slice:
    match = _RANGE.fullmatch(text)
    if match is None or not text.strip():
        raise HeaderError(f"expected a number or a range such as 0:4 or ::2, got {text.strip()[:80]!r}")
    start, stop, step = (int(part) if part else None for part in match.groups())
    if ":" not in text:
        assert start is not None
        return start
    if step == 0:
        raise HeaderError(f"the step of {text.strip()!r} is 0; expected at least 1")
    return slice(start, stop, step)


def ranks_of(chosen: list[int | slice], total: int) -> list[int]:
    """Return the ranks of some numbers and ranges, in that order, each once.

    Raises:
        HeaderError: a rank does not exist.
    """
    ranks: dict[int, Any] = {}
    for each in chosen:
        if isinstance(each, slice):
            ranks.update(dict.fromkeys(_whole(each, total)))
        elif -total <= each < total:
            ranks[each % total] = None
        else:
            raise HeaderError(f"no rank {each}: {_size(total)}")
    if not ranks:
        raise HeaderError(f"the slice selects no rank: {_size(total)}")
    return list(ranks)


def check_axes(axes: dict[str, int | slice], sizes: dict[str, int]) -> None:
    """Check that ranges do not go past the end of their axes; other mistakes are found by the slice itself."""
    for label, chosen in axes.items():
        size = sizes.get(label)
        if isinstance(chosen, slice) and size is not None and (chosen.stop or 0) > size:
            raise HeaderError(f"no rank {label}={chosen.stop - 1}: this mesh has {label}=0 to {size - 1}")


def _whole(chosen: slice, total: int) -> range:
    """Return the ranks of a range. A range of Python would leave out those that do not exist."""
    if chosen.stop is not None and chosen.stop > total:
        missing = [rank for rank in range(*chosen.indices(chosen.stop)) if rank >= total]
        if len(missing) > 1 and missing[-1] - missing[0] == len(missing) - 1:
            raise HeaderError(f"no ranks {missing[0]}-{missing[-1]}: {_size(total)}")
        if missing:
            raise HeaderError(f"no rank{'s' if missing[1:] else ''} {','.join(map(str, missing))}: {_size(total)}")
    return range(*chosen.indices(total))


def _size(total: int) -> str:
    return f"this mesh has ranks 0 to {total - 1}" if total > 1 else "this mesh has rank 0 only"
