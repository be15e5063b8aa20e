"""Protocols for watching the ranks of calls; the room of supervision implements them."""

from __future__ import annotations

from typing import Any, Protocol


class WatchesCalls(Protocol):
    """Watches the ranks of some calls; see ``monarch._supervision.fail_fast``."""

    @property
    def frees(self) -> bool: ...
    @property
    def cut_generation(self) -> int: ...
    def failed(self, call: Any, position: int, /) -> None: ...
    def completed(self) -> None: ...


class CallWatch(Protocol):
    """Groups calls to watch together; see ``monarch._supervision.watch``."""

    def failed(self, call: Any, position: int, /) -> None: ...
    def sent(self, call: Any, /) -> None: ...
    def ahead(self, call: Any, /) -> str: ...
    def settle(self, uid: str, timeout: float, /) -> None: ...


class NoWatch:
    """For a process without supervision."""

    def failed(self, call: Any, position: int) -> None:
        pass

    def sent(self, call: Any) -> None:
        pass

    def ahead(self, call: Any) -> str:
        return ""

    def settle(self, uid: str, timeout: float) -> None:
        pass
