"""Exceptions from ranks: packed there, raised at the caller, equal ones of many ranks as one."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from monarch._core.shapes.extent import Extent, Point
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.text.advice import advice
from monarch._wire import plain
from monarch._wire.messages import FAILED, RESULT, STOPPED, UNREADABLE, VERSION, Failure, encode
from monarch._wire.pickling import dumps, loads
from monarch.exceptions import ActorError, CollectiveMismatchError, MonarchError, ProtocolError

if TYPE_CHECKING:
    from monarch._core.shapes.value_mesh import ValueMesh

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MAX_TEXT = 100_000
_SHOWN = 50
"""The first and the last exceptions of a long chain that are sent; each takes about a millisecond."""


_LINKS = {name: BaseException.__dict__[name] for name in ("__cause__", "__context__", "__suppress_context__")}
"""The attributes that link exceptions, in the order to set them: a cause suppresses the context."""


class TellsFailure:
    """A value that tells whether its call has failed, such as the result of a cell."""

    @property
    def failed(self) -> bool:
        """Whether the call has failed."""
        raise NotImplementedError

    @property
    def stopped(self) -> bool:
        """Whether it has failed only because it was ended from outside: by an interrupt, or because of other ranks."""
        raise NotImplementedError

    @property
    def status(self) -> int:
        """The status of the Reply."""
        return STOPPED if self.stopped else FAILED if self.failed else RESULT


_unpack = msgspec.msgpack.Decoder(Failure).decode


def unpack_failure(data: bytes) -> Failure:
    """Unpack a failure of ``pack_failure``; for malformed data, return one that raises ProtocolError."""
    try:
        return _unpack(data)
    except UNREADABLE as error:
        text = f"an error arrived as {len(data)} bytes that are not a failure of protocol version {VERSION}: {error}"
        known = ProtocolError(text)
        return Failure("ProtocolError", text, "", f"ProtocolError: {text}", _pickled(known), True)


def pack_failure(error: BaseException, own: bool = False, freed: bool = False) -> bytes:
    """Pack an exception for the wire.

    Parts that cannot be pickled are sent as text. User code in the exception cannot raise here.
    """
    text, where = trace(error)
    kind = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__", "monarch.exceptions"):
        kind = f"{type(error).__module__}.{kind}"
    failure = Failure(_sendable(kind), _text(error), _sendable(where), _sendable(text), _pickled(error), own, freed)
    return encode(failure)


def _sendable(text: str) -> str:
    """Return a text that UTF-8 can encode; other bytes in file names become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def in_cleanup(failure: bytes) -> bytes:
    """Return a packed failure, marked as of ``__cleanup__``."""
    known = unpack_failure(failure)
    if not known.own:
        known.kind = f"__cleanup__() raised {known.kind}"
    return encode(known)


def in_bootstrap(failure: bytes) -> bytes:
    """Return a packed failure, marked as of the bootstrap."""
    known = unpack_failure(failure)
    known.kind = f"bootstrap raised {known.kind}"
    return encode(known)


def _pickled(error: BaseException) -> bytes | None:
    # The traceback and context would drag the rank's frames along and do not survive pickling.
    try:
        body, buffers = dumps(error)
        if buffers or len(body) > 1_000_000:
            return None
        return body if type(_again(body)) is type(error) else None
    except BaseException:
        # Only text: __init__ does not take its own args, an attribute is a lock, or an interrupt came.
        return None


def _again(body: bytes) -> Any:
    """Return the unpickled error. Most Monarch errors are packed in the receiving thread."""
    try:
        return plain.loads_plain(body)
    except ProtocolError:
        if plain.receives_here():
            # It contains user objects.
            raise
        return loads(body)


def _text(error: BaseException) -> str:
    try:
        return _sendable(str(error)[:_MAX_TEXT])
    except BaseException as broken:
        return f"<no text: its str() raised {type(broken).__name__}>"


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to this package."""
    return filename.startswith(_OURS)


def drop_own_frames(error: KeyboardInterrupt) -> None:
    """Drop the frames of the wait that an interrupt has ended, unless code of the user has raised it."""
    if all(is_ours(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)):
        error.__traceback__ = None


def trace(error: BaseException) -> tuple[str, str]:
    """Return the traceback of an exception as text, without frames of this package, and the last line of user code."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not where or not _is_library(frame.f_code.co_filename):
            where = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
        if is_ours(frame.f_code.co_filename):
            where = "" if where.startswith(_OURS) else where
    linecache.checkcache()
    try:
        text = _chain(error)
    except BaseException as broken:
        text = f"{type(error).__name__}: <its traceback cannot be shown: {type(broken).__name__}>"
    return text[-_MAX_TEXT:].rstrip("\n"), where


def _chain(error: BaseException) -> str:
    """Return an exception with its causes as Python prints them, without the middle of a very long chain."""
    causes = _causes(error)
    left_out = len(causes) - 2 * _SHOWN
    if left_out <= 0:
        return _formatted(error, None)
    note = f"\n[{left_out} of the {len(causes)} exceptions of this chain omitted]\n\n"
    return _formatted(causes[-_SHOWN], None) + note + _formatted(error, causes[_SHOWN - 1])


def _causes(error: BaseException) -> list[BaseException]:
    """Return an exception and its causes, the last one first."""
    found, seen = list[BaseException](), set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        found.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return found


def _formatted(error: BaseException, last: BaseException | None) -> str:
    """Return an exception with its causes, down to the last one to show."""
    # Python follows the chain by itself, so it is cut meanwhile.
    with _cut(last) if last is not None else nullcontext():
        shown = traceback.TracebackException.from_exception(error)
    fold_frames(shown)
    return "".join(shown.format())


@contextmanager
def _cut(error: BaseException) -> Generator[None]:
    """Take the causes from an exception meanwhile; not by setattr, which may be user code."""
    before = {name: getattr(error, name) for name in _LINKS}
    try:
        for name in _LINKS:
            _LINKS[name].__set__(error, None if name != "__suppress_context__" else False)
        yield
    finally:
        for name, value in before.items():
            _LINKS[name].__set__(error, value)


def fold_frames(shown: traceback.TracebackException | None) -> None:
    """Remove frames of this package, unless there are no others."""
    seen: set[int] = set()
    while shown is not None and id(shown) not in seen:
        seen.add(id(shown))
        theirs = [frame for frame in shown.stack if not is_ours(frame.filename)]
        shown.stack[:] = theirs
        shown = shown.__cause__ or shown.__context__


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or "dist-packages" in filename or is_ours(filename) or filename.startswith("<fr")


def exception_of(failure: Failure) -> BaseException | None:
    """Return the exception itself; None if it cannot be made here."""
    if failure.pickled is None:
        return None
    try:
        return loads(failure.pickled)
    except Exception:
        return None


def is_consequence(replacement: BaseException | None) -> bool:
    """Return whether a replaced error only reports the effect of other ranks."""
    return replacement is not None and not isinstance(replacement, CollectiveMismatchError)


def group(
    failures: dict[int, Failure],
    extent: Extent,
    call: str,
    results: ValueMesh[Any] | None,
    unanswered: Sequence[int] = (),
    base: Sequence[int] | None = None,
) -> BaseException:
    """Return one error for all failed ranks; equal failures are reported once.

    Args:
        failures: by rank.
        extent: the extent of the addressed view.
        call: its label.
        results: the values of the other ranks.
        unanswered: ranks whose answers were abandoned.
        base: the rank in the mesh of each rank in the view, by which texts name it; None if they are the same.
    """
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for rank, failure in sorted(failures.items()):
        kinds.setdefault((failure.kind, failure.text, failure.where), []).append(rank)
    # Causes come before consequences.
    first = min(failures, key=lambda rank: (failures[rank].freed, rank))
    failure = failures[first]
    original = exception_of(failure)
    if failure.own and isinstance(original, MonarchError):
        if results is not None and hasattr(original, "results"):
            # Any exception of the user can have it.
            original.results = results  # pyright: ignore[reportAttributeAccessIssue]
        return original
    total = extent.nelements
    # The call of one new actor has the extent of its whole mesh.
    whole = base is None or len(base) != total or list(base) == list(range(total))
    numbers = range(total) if base is None or whole else base

    def whose(ranks: Sequence[int]) -> str:
        return _whose(ranks, extent) if whole else describe_ranks([numbers[rank] for rank in ranks])

    lines = [f"{call} failed on {whose(list(failures))}"]
    answered = set(range(total)).difference(failures, unanswered)
    if answered:
        lines[0] += f"; {describe_ranks([numbers[rank] for rank in answered])} answered (see err.results)"
    for ranks in sorted(kinds.values(), key=lambda ranks: failures[ranks[0]].freed)[:8]:
        one = failures[ranks[0]]
        head = f"{whose(ranks)}: {one.kind}: {one.text}" if len(kinds) > 1 else f"{one.kind}: {one.text}"
        lines.append(f"  {head.splitlines()[0]}" + (f"  ({advice().placed(one.where)})" if one.where else ""))
    if len(kinds) > 8:
        lines.append(f"  … and {len(kinds) - 8} more kinds of errors (see err.failures)")
    lines.append(f"Remote traceback of rank {numbers[first]}:")
    lines.extend(f"  {advice().placed(line)}" for line in with_source(failure.trace))
    return ActorError(
        "\n".join(lines),
        original if isinstance(original, Exception) else None,
        rank=first,
        point=Point(first, extent),
        failures={rank: advice().placed(failure.trace) for rank, failure in failures.items()},
        results=results,
        reason=_reason(failure),
    )


def _reason(failure: Failure) -> str:
    return f"{failure.kind}: {failure.text}".splitlines()[0].rstrip(": ")


_FRAME = re.compile(r'  File "(.+)", line (\d+), in ')


def with_source(trace: str) -> list[str]:
    """Return the lines of a traceback, with source lines that only the program has."""
    lines = trace.splitlines()
    whole: list[str] = []
    for index, line in enumerate(lines):
        whole.append(line)
        frame = _FRAME.match(line)
        if frame and not (index + 1 < len(lines) and lines[index + 1].startswith("    ")):
            source = linecache.getline(frame[1], int(frame[2])).strip()
            if source:
                whole.append(f"    {source}")
    return whole


def _whose(ranks: Sequence[int], extent: Extent) -> str:
    text = describe_ranks(ranks, extent.nelements)
    if len(ranks) == 1 and extent.labels:
        point = Point(ranks[0], extent)
        return f"{text} ({', '.join(f'{label}={point[label]}' for label in extent)})"
    return text
