"""Named spans of user code: ranges in the traces of ``torch.profiler``, and of NVTX under ``emit_nvtx``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, overload

from monarch._core.kinds import is_a
from monarch.exceptions import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that marks a block in the traces of ``torch.profiler``: ``with span("load"): ...``.

    Args:
        name: the name of the range.

    Raises:
        ArgumentError: the name is not a string.
    """
    if not is_a(name, str):
        raise ArgumentError(f"span: expected a name, got {name!r}")
    # Without torch, or in the middle of its import, nothing can record.
    profiler: Any = getattr(sys.modules.get("torch"), "profiler", None)
    return profiler.record_function(name) if profiler is not None else nullcontext()


@overload
def traced(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def traced(*, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def traced(function: Any = None, /, *, name: str | None = None) -> Any:
    """Decorate a function, sync or async, so that its calls are spans: ``@traced`` or ``@traced(name="step")``.

    Args:
        function: the function.
        name: the name of the spans; None for the name of the function.
    """
    if function is None:
        return functools.partial(_traced, name)
    return _traced(name, function)


def _traced(name: str | None, function: Any) -> Any:
    called: str = name if name is not None else function.__name__
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with span(called):
                return await function(*args, **kwargs)

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with span(called):
            return function(*args, **kwargs)

    return run
