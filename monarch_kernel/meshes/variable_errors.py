"""Errors about variables of ranks, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager

from monarch._kernel_api import (
    ask_soon,
    describe_ranks,
    is_list,
    names_here,
    request,
    split_proc,
    targets_of,
    values_here,
)
from monarch.exceptions import ActorError, SerializationError
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.meshes.mesh import Mesh

_MOST = 12
"""Names that are listed."""


@contextmanager
def one_line(mesh: Mesh, doing: str, name: str = "") -> Generator[None]:
    """Raise errors of ranks as one line about the request that failed.

    Args:
        mesh: the mesh of the ranks.
        doing: the request, as in ``%mesh pull``.
        name: the name of the variable that was requested.
    """
    __tracebackhide__ = True
    try:
        yield
    except ActorError as error:
        raise Usage(f"{doing}: {explain(mesh, error)}") from error
    except SerializationError as error:
        raise Usage(f"{doing}: {unpicklable(error, name)}") from None


def unpicklable(error: SerializationError, name: str) -> str:
    """Return which part of a variable cannot be pickled, and why."""
    # The text begins with the path to the part, from the value on.
    text = error.reason or str(error)
    return name + text.removeprefix("value") if name and text.startswith("value") else text


def explain(mesh: Mesh, error: ActorError) -> str:
    """Return what went wrong on the ranks, without their tracebacks."""
    cause, failed = error.exception, sorted(error.failures)
    where = describe_ranks(failed, len(mesh.cells))
    if not isinstance(cause, NameError):
        # An error that is not an Exception, such as an interrupt, is not sent itself.
        text = f"{type(cause).__name__}: {cause}" if cause is not None else error.reason
        return f"{text} (on {where})"
    name = missing_name(cause)
    ranks_of = variables(mesh)
    holders = ranks_of.get(name, [])
    if holders:
        have, do = "has" if len(failed) == 1 else "have", "does" if len(holders) == 1 else "do"
        return f"{where} {have} no variable {name!r}; {describe_ranks(holders)} {do}"
    known = _some(ranks_of)
    has = f"ranks have {known}" if known else "cells have defined none yet"
    return f"no rank has a variable {name!r}; {has}{did_you_mean(name, ranks_of)}"


def reason(error: BaseException, total: int) -> str:
    """Return an error in one line if it is of ranks, without asking them."""
    if not isinstance(error, ActorError) or error.exception is None:
        return str(error)
    return f"{error.exception} ({describe_ranks(sorted(error.failures), total)} failed)"


def missing_name(error: NameError) -> str:
    """Return the undefined name; pickling keeps only the text of Python's own error."""
    found = re.search(r"(?:name|variable) '(\w+)'", str(error))
    return error.name or (found[1] if found else "")


def variables(mesh: Mesh, service: Callable[[], list[str]] = names_here) -> dict[str, list[int]]:
    """Return the variables of cells, with the ranks that have each, of those that answer soon.

    Args:
        mesh: the mesh.
        service: returns the names of a rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, names in _names_by_rank(mesh, service).items():
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    return dict(sorted(ranks_of.items()))


def lacking(mesh: Mesh, wanted: dict[int, set[str]] | range) -> str:
    """Return a line that names the variables that ranks lack; empty if they lack none, or do not answer soon.

    Args:
        mesh: the mesh of the ranks.
        wanted: by rank, the variables that it should have; or ranks, which should have those that all others have.
    """
    held = _names_by_rank(mesh, values_here)
    others = [set(names) for rank, names in held.items() if rank not in wanted]
    common = others[0].intersection(*others[1:]) if others else set[str]()
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in wanted:
        names = wanted[rank] if isinstance(wanted, dict) else common
        missing = tuple(sorted(names.difference(held[rank]))) if rank in held else ()
        if missing:
            groups.setdefault(missing, []).append(rank)
    if not groups:
        return ""
    texts = [
        f"{describe_ranks(lack)} {'lacks' if len(lack) == 1 else 'lack'} {_some(missing)}"
        for missing, lack in groups.items()
    ]
    them = "them" if len({name for missing in groups for name in missing}) > 1 else "it"
    if not isinstance(wanted, dict):
        # Cells that create models in DistributedDataParallel are collectives of all ranks.
        source = next(rank for rank in held if rank not in wanted)
        return f"{'; '.join(texts)}: %mesh heal {mesh.name} --copy-from {source} copies {them} from rank {source}"
    return f"{'; '.join(texts)}: run the cells that create {them} there"


def _some(names: Collection[str]) -> str:
    return ", ".join([*names][:_MOST]) + (", …" if len(names) > _MOST else "")


def _names_by_rank(mesh: Mesh, service: Callable[[], list[str]]) -> dict[int, list[str]]:
    """Return the answers of the ranks that answer soon, by rank."""
    procs = [peer.proc for peer in targets_of(mesh.cells).peers if peer.dead is None]
    answers = ask_soon(procs, request(service))
    named = {split_proc(proc)[1]: names for proc, names in answers.items() if is_list(names)}
    return dict(sorted(named.items()))
