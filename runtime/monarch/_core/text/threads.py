"""The stacks of the threads of ranks as text: equal ones are shown once, with all their ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from monarch._core.position import IDLE, RUNNING, ThreadPosition
from monarch._core.shapes.ranks import describe_ranks

_NUMBER = re.compile(r"\d+")
"""Python numbers the names of threads, differently on each rank."""


def describe_threads(found: Mapping[int, Sequence[ThreadPosition] | str]) -> str:
    """Return the stacks of the threads of ranks.

    Args:
        found: by rank, its threads, or why they are not known.
    """
    groups: dict[tuple[object, ...], tuple[list[int], str, str]] = {}
    for rank, threads in sorted(found.items()):
        if isinstance(threads, str):
            groups.setdefault((threads,), ([], "", threads))[0].append(rank)
            continue
        alike: dict[tuple[object, ...], list[ThreadPosition]] = {}
        for each in threads:
            alike.setdefault((_NUMBER.sub("", each.name), *each[1:]), []).append(each)
        for key, several in alike.items():
            text = "\n".join(map(str, several[0].frames)) or several[0].state
            groups.setdefault((*key, len(several)), ([], _named(several), text))[0].append(rank)
    return "\n".join(_block(describe_ranks(ranks), label, text) for ranks, label, text in groups.values())


def _named(threads: Sequence[ThreadPosition]) -> str:
    first = threads[0]
    state = f" ({first.state})" if first.state not in (RUNNING, IDLE) else ""
    if first.is_main:
        return f"main thread{state}"
    if len(threads) == 1:
        return f"thread {first.name!r}{state}"
    return f"{len(threads)} threads such as {first.name!r}{state}"


def _block(ranks: str, label: str, text: str) -> str:
    head = f"{ranks}, {label}" if label else ranks
    if "\n" not in text:
        return f"{head}: {text}"
    return "\n".join([f"{head}:", *(f"  {line}" for line in text.splitlines())])
