"""The base of meshes that can be stopped: they are context managers and awaitable."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from monarch._node.current import is_fork

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch._node.future import Future


class AsyncResource:
    """Mixin: ``with mesh:`` and ``async with mesh:`` stop the mesh at the end; ``await mesh`` waits until it is up."""

    if TYPE_CHECKING:

        def stop(self) -> Future[None]: ...
        @property
        def initialized(self) -> Future[Any]: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A fork of the program leaves the block too, and must end as its code says.
        if not is_fork():
            self.stop().get()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not is_fork():
            await self.stop()

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self.initialized.__await__()
        return self
