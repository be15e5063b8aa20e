"""Settings of a program: environment variables, read at use; and those of torchmonarch's ``configure``."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import product
from typing import Any

from monarch._config.keys import AS_IT_IS, DEFAULTS, Encoding, accept, seconds_of
from monarch._config.settings import (
    BREAK_ALONE,
    CHECK_COLLECTIVES,
    COLLECTIVE_WAIT,
    FAILED_CALL_WAIT,
    ISOLATE_GPUS,
    STEP_AT_ONCE,
    STOP_CANCEL,
    STOP_CLEANUP,
    STOP_DRAIN,
    STOP_OWNED,
    STOP_REACT,
    STUCK_WAIT,
    TAIL_LINES,
    TREE_HOSTS,
    Count,
    Flag,
    Seconds,
)
from monarch._config.settings import is_on as is_on

__all__ = [
    "BREAK_ALONE",
    "CHECK_COLLECTIVES",
    "COLLECTIVE_WAIT",
    "FAILED_CALL_WAIT",
    "ISOLATE_GPUS",
    "STEP_AT_ONCE",
    "STOP_CANCEL",
    "STOP_CLEANUP",
    "STOP_DRAIN",
    "STOP_OWNED",
    "STOP_REACT",
    "STUCK_WAIT",
    "TAIL_LINES",
    "TREE_HOSTS",
    "Count",
    "Encoding",
    "Flag",
    "Seconds",
    "clear_runtime_config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
    "parametrize_config",
    "parametrize_config_pointwise",
]

_MAPPED: dict[str, Seconds | Count] = {
    "cleanup_timeout": STOP_CLEANUP,
    "process_exit_timeout": STOP_REACT,
    "stop_actor_timeout": STOP_DRAIN,
    "tail_log_lines": TAIL_LINES,
}
"""The keys that have an effect here, with defaults of this package."""
_runtime: dict[str, Any] = {}
"""The settings of ``configure``. Changed by the program's threads by single operations only."""
_warned: set[str] = set()
"""Keys that were warned about. As ``_runtime``."""


def configure(**settings: Any) -> None:
    """Set torchmonarch's settings for this program and the processes that it spawns from now on.

    ``cleanup_timeout``, ``process_exit_timeout``, ``stop_actor_timeout`` and ``tail_log_lines`` have an effect here;
    each other key warns once. Durations are texts such as ``"30s"``.

    Raises:
        ValueError: torchmonarch has no such key.
        TypeError: the value has a wrong type, or is no duration.
    """
    accepted = {key: accept(key, value) for key, value in settings.items()}
    for key, value in accepted.items():
        _runtime[key] = value
        setting = _MAPPED.get(key)
        if setting is not None:
            os.environ[setting.variable] = str(seconds_of(key, value) if isinstance(setting, Seconds) else value)
        elif value not in (DEFAULTS[key], AS_IT_IS.get(key, DEFAULTS[key])) and key not in _warned:
            _warned.add(key)
            warnings.warn(f"configure({key}={value!r}) has no effect in this package", stacklevel=2)


@contextmanager
def configured(**settings: Any) -> Generator[dict[str, Any], None, None]:
    """Set torchmonarch's settings during a ``with`` block, which gets all settings as a dict; see ``configure``."""
    before = dict(_runtime)
    variables = {setting.variable: os.environ.get(setting.variable) for setting in _MAPPED.values()}
    configure(**settings)
    try:
        yield get_global_config()
    finally:
        _runtime.clear()
        _runtime.update(before)
        for variable, text in variables.items():
            _put(variable, text)


def get_global_config() -> dict[str, Any]:
    """Return all settings that torchmonarch has, with the values in force; see ``configure``."""
    return {**DEFAULTS, **_runtime}


def get_runtime_config() -> dict[str, Any]:
    """Return the settings that ``configure`` has set."""
    return dict(_runtime)


def clear_runtime_config() -> None:
    """Undo all calls of ``configure``."""
    for key in list(_runtime):
        if key in _MAPPED:
            _put(_MAPPED[key].variable, None)
    _runtime.clear()


def parametrize_config(**options: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test of pytest once for each combination of settings: ``@parametrize_config(tail_log_lines={0, 9})``."""
    if not options:
        raise ValueError("parametrize_config: expected at least one setting")
    keys = list(options)
    return _parametrized([dict(zip(keys, values, strict=True)) for values in product(*options.values())])


def parametrize_config_pointwise(**options: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test of pytest once for the first values of all settings, once for the second ones, and so on."""
    columns = {key: list(values) for key, values in options.items()}
    if not columns or len({len(values) for values in columns.values()}) > 1:
        raise ValueError("parametrize_config_pointwise: expected the same number of values for each setting")
    return _parametrized([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])


def _parametrized(cases: list[dict[str, Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        import pytest

        @wraps(test)
        async def run_async(*args: Any, monarch_config: Mapping[str, Any], **kwargs: Any) -> Any:
            with configured(**monarch_config):
                return await test(*args, **kwargs)

        @wraps(test)
        def run_sync(*args: Any, monarch_config: Mapping[str, Any], **kwargs: Any) -> Any:
            with configured(**monarch_config):
                return test(*args, **kwargs)

        run: Any = run_async if inspect.iscoroutinefunction(test) else run_sync
        known = inspect.signature(test)
        added = inspect.Parameter("monarch_config", inspect.Parameter.KEYWORD_ONLY)
        # pytest passes what the signature names.
        vars(run)["__signature__"] = known.replace(parameters=[*known.parameters.values(), added])
        names = ["-".join(f"{key}={value}" for key, value in case.items()) for case in cases]
        mark: Any = pytest.mark.parametrize("monarch_config", cases, ids=names)
        return mark(run)

    return decorate


def _put(variable: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = text
