"""The events of a mesh as a table: a list of typed entries, and columns of them for pandas and Arrow."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, get_args, overload

from monarch._core.kinds import is_a
from monarch._core.telemetry.events import CallAnswered, CallStarted, Entry, Event, Metrics, Progress, RankReport
from monarch._core.text.tables import html_table, text_table
from monarch.exceptions import ArgumentError, MonarchError

SHOWN = 40
"""Events that a table shows: the first and the last."""
_TAGS = {kind: str(kind.__struct_config__.tag) for kind in get_args(Event)}
"""The kind of each event, as in ``rank died``."""
COLUMNS = {
    "number": "int64", "time": "float64", "kind": "string", "rank": "int64", "ranks": "string", "call": "int64",
    "title": "string", "cell": "int64", "state": "string", "place": "string", "reason": "string", "error": "string",
    "name": "string", "step": "int64", "value": "float64", "total": "float64", "queue": "int64", "cpu": "float64",
    "rss": "int64", "gpu_memory": "int64", "gpu_load": "float64", "collective": "string",
}  # fmt: skip
"""The columns for pandas and Arrow with their types; a field that a kind lacks is missing."""


def kind_of(entry: Entry) -> str:
    """Return the kind of an entry, as in ``rank died``."""
    return _TAGS[type(entry.event)]


class EventTable(Sequence[Entry]):
    """Events of a mesh, oldest first.

    Args:
        name: the name of the mesh.
        entries: the entries of its log.
    """

    def __init__(self, name: str, entries: Iterable[Entry]) -> None:
        self.name = name
        self._entries = list(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> EventTable: ...
    def __getitem__(self, index: int | slice) -> Entry | EventTable:
        found = self._entries[index]
        return EventTable(self.name, found) if isinstance(found, list) else found

    def of_kind(self, *kinds: str) -> EventTable:
        """Return the events of some kinds.

        Args:
            kinds: as in ``rank died``; see ``kinds``.

        Raises:
            ArgumentError: a kind is unknown.
        """
        for kind in kinds:
            if kind not in _TAGS.values():
                raise ArgumentError(f"of_kind: expected one of {', '.join(sorted(_TAGS.values()))}, got {kind!r}")
        return self._where(lambda entry: kind_of(entry) in kinds)

    def of_ranks(self, *ranks: int) -> EventTable:
        """Return the events that concern some ranks, with those of calls to them.

        Raises:
            ArgumentError: something else than the number of a rank was passed.
        """
        for rank in ranks:
            if not is_a(rank, int):
                raise ArgumentError(f"of_ranks: expected rank numbers, got {rank!r}")
        return self._where(lambda entry: not ranks_of(entry).isdisjoint(ranks))

    def kinds(self) -> dict[str, int]:
        """Return the number of events of each kind."""
        return dict(Counter(map(kind_of, self._entries)))

    def _where(self, holds: Callable[[Entry], bool]) -> EventTable:
        return EventTable(self.name, filter(holds, self._entries))

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each event, and one for each value of a metric.

        Raises:
            MonarchError: pandas is not installed.
        """
        pandas = _need("pandas", "to_pandas")
        types = {"string": "string", "int64": "Int64", "float64": "Float64"}
        columns = {name: pandas.array(values, dtype=types[COLUMNS[name]]) for name, values in self._columns().items()}
        columns["time"] = pandas.to_datetime(columns["time"], unit="s", utc=True)
        return pandas.DataFrame(columns)

    def to_arrow(self) -> Any:
        """Return the same as an Arrow table, with times in seconds since the epoch.

        Raises:
            MonarchError: pyarrow is not installed.
        """
        arrow = _need("pyarrow", "to_arrow")
        schema = arrow.schema([(name, getattr(arrow, kind)()) for name, kind in COLUMNS.items()])
        return arrow.table(self._columns(), schema=schema)

    def _columns(self) -> dict[str, list[Any]]:
        rows = [row for entry in self._entries for row in rows_of(entry)]
        return {name: [row.get(name) for row in rows] for name in COLUMNS}

    def __repr__(self) -> str:
        return f"{self._title()}\n{text_table(_HEADERS, self._rows(), SHOWN)}" if self else self._title()

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows(), SHOWN, title=self._title())

    def _title(self) -> str:
        return f"{len(self)} event{'' if len(self) == 1 else 's'} of {self.name}"

    def _rows(self) -> Sequence[Sequence[object]]:
        return _Rows(self._entries)


_HEADERS = ("", "time", "event", "rank", "")


class _Rows(Sequence[Sequence[object]]):
    """The rows of the shown table, made as they are read: a table shows few of its rows."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Sequence[object]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[object]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[object] | Sequence[Sequence[object]]:
        found = self._entries[index]
        return [_shown(each) for each in found] if isinstance(found, list) else _shown(found)


def _shown(entry: Entry) -> Sequence[object]:
    ranks = sorted(ranks_of(entry))
    where = ",".join(map(str, ranks)) if len(ranks) < 5 else f"{ranks[0]}…{ranks[-1]}"
    when = time.strftime("%H:%M:%S", time.localtime(entry.time)) + f".{int(entry.time % 1 * 100):02d}"
    return entry.number, when, kind_of(entry), where, _text(entry.event)


def _text(event: Event) -> str:
    """Describe an event in a few words."""
    if isinstance(event, Metrics):
        last = f"{event.name} = {event.values[-1]:g}" if event.values else event.name
        before = len(event.values) - 1
        return last if before < 1 else f"{last} and {before} {'value' if before == 1 else 'values'} before"
    if isinstance(event, Progress):
        return f"{event.bar}: {event.done:g}" + (f" of {event.total:g}" if event.total > 0 else "")
    if isinstance(event, RankReport):
        return f"{event.state.value} {event.place}".strip()
    if isinstance(event, CallAnswered):
        return f"call {event.call} {event.error}".strip()
    if isinstance(event, CallStarted):
        return f"call {event.call} {event.title}"
    fields = ("name", "reason", "count", "pid")
    parts = [str(getattr(event, field, "") or "") for field in fields]
    return " ".join(part for part in parts if part)


def ranks_of(entry: Entry) -> set[int]:
    """Return the ranks that an entry concerns; none for the mesh as a whole."""
    event: Any = entry.event
    found: tuple[int, ...] = getattr(event, "ranks", ()) or (getattr(event, "rank", -1),)
    return {rank for rank in found if rank >= 0}


def rows_of(entry: Entry) -> Iterator[dict[str, Any]]:
    """Yield the rows of an entry, by column."""
    event: Any = entry.event
    row: dict[str, Any] = {"number": entry.number, "time": entry.time, "kind": kind_of(entry)}
    row.update({name: getattr(event, name, None) for name in COLUMNS if name not in row})
    if isinstance(event, Metrics):
        for step, value in zip(event.steps, event.values, strict=False):
            yield {**row, "step": step, "value": value}
        return
    if row["ranks"] is not None:
        row["ranks"] = ",".join(map(str, event.ranks))
    if isinstance(event, Progress):
        row.update(name=event.bar, value=event.done)
    elif isinstance(event, RankReport):
        usage, waits = event.usage, event.collective
        row.update(cpu=usage.cpu, rss=usage.rss, gpu_memory=usage.gpu_memory, gpu_load=usage.gpu_load)
        row.update(state=event.state.value, collective=waits.name if waits is not None else None)
    yield row


def _need(module: str, method: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MonarchError(f"{method}() needs {module}, which is not installed; run: pip install {module}") from error
