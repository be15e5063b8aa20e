"""Who watches over the ranks of calls, as protocols: what does it is in the room of supervision."""

from __future__ import annotations

from typing import Any, Protocol


class CallGroup(Protocol):
    """Watches over the ranks of some calls; see ``monarch._supervision.fail_fast``."""

    @property
    def frees(self) -> bool: ...
    @property
    def cut_generation(self) -> int: ...
    def failed(self, call: Any, position: int, /) -> None: ...
    def completed(self) -> None: ...


class CallWatch(Protocol):
    """Knows which calls are watched over together; see ``monarch._supervision.watch``."""

    def failed(self, call: Any, position: int, /) -> None: ...
    def sent(self, call: Any, /) -> None: ...
    def ahead(self, call: Any, /) -> str: ...


class NoWatch:
    """Of a process without supervision."""

    def failed(self, call: Any, position: int) -> None:
        pass

    def sent(self, call: Any) -> None:
        pass

    def ahead(self, call: Any) -> str:
        return ""
