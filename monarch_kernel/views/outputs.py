"""The output of the last cells, kept for a page that opens, or opens again, while a cell runs or after it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from monarch_kernel.views.protocol import CellOutputs

MOST_CELLS = 32
"""Cells whose output is kept."""
MOST_TEXT = 4 << 20
"""Characters kept of the output of one cell: the newest."""
_SHOWN = ("display_data", "execute_result", "error")
_LEFT_OUT = "… earlier output of this cell was dropped; %mesh log shows what ranks printed\n"


class _Record:
    """The output of one cell. Guarded by the lock of ``CellRecords``."""

    def __init__(self, cell: str, request: str, number: int) -> None:
        self.cell = cell
        self.request = request
        self.number = number
        self.ended = False
        self.outputs: list[dict[str, Any]] = []
        self.size = 0
        self.cut = False
        self.clears = False
        """Whether the next output clears those before it."""

    def add(self, output: dict[str, Any]) -> None:
        """Append an output; text is added to the one before it."""
        if self.clears:
            self.clear()
        last: dict[str, Any] = self.outputs[-1] if self.outputs else {}
        if output["output_type"] == "stream" and last.get("name") == output["name"]:
            last["text"].extend(output["text"])
        else:
            self.outputs.append(output)
        self.size += _size_of(output)
        while self.size > MOST_TEXT and self._drop():
            self.cut = True

    def _drop(self) -> bool:
        """Drop the oldest piece; return whether there was one besides the newest."""
        first = self.outputs[0]
        if first["output_type"] == "stream" and len(first["text"]) > 1:
            self.size -= len(first["text"].pop(0))
            return True
        if len(self.outputs) < 2:
            return False
        self.size -= _size_of(self.outputs.pop(0))
        return True

    def clear(self) -> None:
        """Drop all."""
        self.outputs, self.size, self.clears, self.cut = [], 0, False, False

    def update(self, content: Mapping[str, Any]) -> None:
        """Replace what displays of an id show."""
        for output in self.outputs:
            transient: dict[str, Any] = output.get("transient") or {}
            if transient.get("display_id") == content["transient"]["display_id"]:
                self.size -= _size_of(output)
                output.update(data=content["data"], metadata=content.get("metadata") or {})
                self.size += _size_of(output)

    def as_message(self) -> CellOutputs:
        """Return it as it is now."""
        outputs = [{**each, "text": "".join(each["text"])} if "text" in each else dict(each) for each in self.outputs]
        if self.cut:
            outputs.insert(0, {"output_type": "stream", "name": "stdout", "text": _LEFT_OUT})
        return CellOutputs(self.cell, self.request, self.number, outputs, self.ended)


class CellRecords:
    """The output of the last cells of front ends that have cells. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: OrderedDict[str, _Record] = OrderedDict()
        """By request. Guarded by ``_lock``."""

    def take(self, kind: str, content: dict[str, Any], parent: dict[str, Any]) -> None:
        """Record a message to front ends; see ``watch_output``."""
        header = parent.get("header") or parent
        request: str = header.get("msg_id", "")
        with self._lock:
            if kind == "execute_input":
                metadata: dict[str, Any] = parent.get("metadata") or {}
                self._begin(request, content, metadata.get("cellId") or "")
            elif kind == "update_display_data":
                for each in self._records.values():
                    each.update(content)
            elif (record := self._records.get(request)) is not None:
                _add(record, kind, content)

    def _begin(self, request: str, content: dict[str, Any], cell: str) -> None:
        if not cell:
            return
        for each in [each for each in self._records.values() if each.cell == cell]:
            del self._records[each.request]
        self._records[request] = _Record(cell, request, content.get("execution_count") or 0)
        while len(self._records) > MOST_CELLS:
            self._records.popitem(last=False)

    def is_only(self, request: str, display: str) -> bool:
        """Return whether a cell has shown nothing but one display."""
        with self._lock:
            record = self._records.get(request)
            if record is None or record.cut or record.clears:
                return False
            places: list[dict[str, Any]] = [each.get("transient") or {} for each in record.outputs]
            return [place.get("display_id") for place in places] == [display]

    def read(self, request: str = "") -> list[CellOutputs]:
        """Return the output of the cells, oldest first; with a request, of the cell that it runs."""
        with self._lock:
            records = self._records.values()
            return [each.as_message() for each in records if request in ("", each.request)]


def _add(record: _Record, kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        record.add({"output_type": "stream", "name": content["name"], "text": [content["text"]]})
    elif kind in _SHOWN:
        record.add({"output_type": kind, **content})
    elif kind == "clear_output" and content.get("wait"):
        record.clears = True
    elif kind == "clear_output":
        record.clear()
    elif kind == "status" and content.get("execution_state") == "idle":
        record.ended = True


def _size_of(output: Mapping[str, Any]) -> int:
    if "text" in output:
        return sum(map(len, output["text"]))
    parts: list[Any] = [*(output.get("data") or {}).values(), *(output.get("traceback") or ())]
    return 100 + sum(len(each) if isinstance(each, (str, bytes)) else 1000 for each in parts)
