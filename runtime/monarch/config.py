"""Settings of a program: environment variables, read at use; and those of torchmonarch's ``configure``."""

from __future__ import annotations

import inspect
import math
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from itertools import product
from typing import Any

__all__ = [
    "CHECK_COLLECTIVES",
    "COLLECTIVE_WAIT",
    "FAILED_CALL_WAIT",
    "ISOLATE_GPUS",
    "STOP_CANCEL",
    "STOP_CLEANUP",
    "STOP_DRAIN",
    "STOP_OWNED",
    "STOP_REACT",
    "TAIL_LINES",
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


class Seconds:
    """A time limit in seconds.

    Args:
        variable: the environment variable that overrides the default.
        default: seconds, if the variable is unset or not a positive number.
    """

    def __init__(self, variable: str, default: float) -> None:
        self.variable = variable
        self.default = default

    def __call__(self) -> float:
        """Return the current limit in seconds."""
        text = os.environ.get(self.variable)
        if text is None:
            return self.default
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if seconds > 0 and math.isfinite(seconds):
            return seconds
        warnings.warn(
            f"{self.variable}: expected a positive number of seconds, got {text!r}; using {self.default:g}",
            stacklevel=2,
        )
        return self.default

    def __repr__(self) -> str:
        return f"Seconds({self.variable!r}, {self.default:g})"


def is_on(text: str | None) -> bool:
    """Return whether the text of a variable means on, as in ``Flag``."""
    return (text or "").strip().lower() not in ("", "0", "false", "no", "off")


class Flag:
    """A switch that is off unless its variable is set.

    Args:
        variable: the environment variable; empty, ``0``, ``false``, ``no`` and ``off`` mean off, any other value on.
    """

    def __init__(self, variable: str) -> None:
        self.variable = variable

    def __call__(self) -> bool:
        """Return whether it is on now."""
        return is_on(os.environ.get(self.variable))

    def __repr__(self) -> str:
        return f"Flag({self.variable!r})"


class Count:
    """A number of things.

    Args:
        variable: the environment variable that overrides the default.
        default: the number, if the variable is unset or not a whole number of at least 0.
    """

    def __init__(self, variable: str, default: int) -> None:
        self.variable = variable
        self.default = default

    def __call__(self) -> int:
        """Return the current number."""
        text = os.environ.get(self.variable, "").strip()
        return int(text) if text.isdecimal() else self.default

    def __repr__(self) -> str:
        return f"Count({self.variable!r}, {self.default})"


STOP_REACT = Seconds("MONARCH_STOP_REACT_S", 3.0)
"""For a stopped process to report that it is stopping; one that does not, because C code holds the GIL, is then
killed."""
STOP_DRAIN = Seconds("MONARCH_STOP_DRAIN_S", 3.0)
"""For a stopped actor to handle earlier messages; then its calls are cancelled, or interrupted."""
STOP_CANCEL = Seconds("MONARCH_STOP_CANCEL_S", 1.0)
"""For cancelled or interrupted code to end, including its ``finally``; then the actor goes on without it."""
STOP_OWNED = Seconds("MONARCH_STOP_OWNED_S", 10.0)
"""For the meshes of an actor to stop, all together, before its ``__cleanup__`` runs."""
STOP_CLEANUP = Seconds("MONARCH_STOP_CLEANUP_S", 5.0)
"""For ``__cleanup__``; then it is cancelled, or interrupted."""
COLLECTIVE_WAIT = Seconds("MONARCH_COLLECTIVE_WAIT_S", 2.0)
"""For a rank to wait in a collective for finished ranks before that is reported; this ends nothing."""
FAILED_CALL_WAIT = Seconds("MONARCH_FAILED_CALL_WAIT_S", 300.0)
"""For a call sent before a failure was known to wait for older calls to end, before it raises; read in the rank."""
ISOLATE_GPUS = Flag("MONARCH_ISOLATE_GPUS")
"""In the environment of a mesh: whether each rank sees only its own GPU, instead of all."""
CHECK_COLLECTIVES = Flag("MONARCH_CHECK_COLLECTIVES")
"""Whether ranks compare operation, shapes and dtypes before each collective; read when a rank starts."""
TAIL_LINES = Count("MONARCH_TAIL_LINES", 10)
"""How many lines of stderr of a dead process its report has."""


class Encoding(Enum):
    """The encodings of messages that torchmonarch has; here it has no effect."""

    Bincode = "Bincode"
    Json = "Json"
    Multipart = "Multipart"

    def __repr__(self) -> str:
        return str(self)


_DEFAULTS: dict[str, Any] = {
    "default_encoding": Encoding.Multipart,
    "default_transport": "ipc",
    "message_latency_sampling_rate": 0.01,
    "rdma_max_nics_per_buffer": None,
    "tokio_worker_threads": None,
}
_OFF = """enable_file_capture enable_log_forwarding enable_sqlite_tracing
    enable_unawaited_python_task_traceback force_file_log rdma_disable_ibverbs rdma_host_odp
    scuba_log_enter_exit use_direct_spawn"""
_DEFAULTS.update(dict.fromkeys(_OFF.split(), False))
_ON = """actor_queue_dispatch enable_dest_actor_reordering_buffer enable_otel_metrics enable_otel_tracing
    enable_recorder_tracing mesh_bootstrap_enable_pdeathsig prefix_with_rank rdma_allow_tcp_fallback
    rdma_cq_poller_per_device"""
_DEFAULTS.update(dict.fromkeys(_ON.split(), True))
_TEXTS = """channel_tcp_congestion file_log_level monarch_log_suffix proc_launcher_kind pyspy_bin
    rdma_ibverbs_target rdma_peer_device_affinity"""
_DEFAULTS.update(dict.fromkeys(_TEXTS.split(), ""))
_DEFAULTS["mesh_admin_addr"] = "[::]:1729"
_COUNTS = """codec_max_frame_length=10737418240 max_cast_dimension_size=16 max_cast_fanout=16
    mesh_admin_max_concurrent_resolves=2 mesh_terminate_concurrency=16 message_ack_every_n_messages=1000
    message_ttl_default=64 rdma_max_chunk_size_mb=64 rdma_min_stripe_size_kb=512 rdma_qps_per_cq=64 rdma_qps_per_peer=4
    rdma_runtime_worker_threads=4 rdma_tcp_fallback_parallelism=1 read_log_buffer=100 sequencer_max_locked_keys=128
    small_write_threshold=256 split_max_buffer_size=5 tail_log_lines=10 terminated_snapshot_retention=100"""
_DEFAULTS.update({key: int(count) for key, _, count in (pair.partition("=") for pair in _COUNTS.split())})
_TIMES = """actor_spawn_max_idle=30s channel_net_rx_buffer_full_check_interval=5s channel_reconnect_timeout=1m
    channel_tcp_keepalive_idle=1m cleanup_timeout=5s forwarder_flush_timeout=5s get_actor_state_max_idle=30s
    get_proc_state_max_idle=1m host_spawn_ready_timeout=30s mesh_admin_config_dump_bridge_timeout=5s
    mesh_admin_pyspy_bridge_timeout=13s mesh_admin_pyspy_client_timeout=20s mesh_admin_pyspy_max_profile_duration=5m
    mesh_admin_pyspy_timeout=10s mesh_admin_query_child_timeout=100ms mesh_admin_resolve_actor_timeout=200ms
    mesh_admin_single_host_timeout=3s mesh_admin_tree_timeout=10s mesh_attach_config_timeout=1m mesh_orphan_timeout=1m
    mesh_proc_spawn_max_idle=30s mesh_terminate_timeout=10s message_ack_time_interval=500ms
    message_delivery_timeout=30s otel_metric_export_interval=1s pending_actor_delivery_timeout=30s
    proc_stop_max_idle=30s process_exit_timeout=3s process_memory_metric_interval=5m rdma_qp_init_timeout=30s
    server_heartbeat_interval=1s split_max_buffer_age=50ms stop_actor_timeout=3s stop_grace_period=10s
    supervision_watchdog_timeout=2m"""
_DURATIONS = {key: time for key, _, time in (pair.partition("=") for pair in _TIMES.split())}
_DEFAULTS.update(_DURATIONS)
_MAPPED: dict[str, Seconds | Count] = {
    "cleanup_timeout": STOP_CLEANUP,
    "process_exit_timeout": STOP_REACT,
    "stop_actor_timeout": STOP_DRAIN,
    "tail_log_lines": TAIL_LINES,
}
"""The keys that mean something here. Their defaults are ours."""
_AS_IT_IS = {"enable_log_forwarding": True, "prefix_with_rank": True, "enable_dest_actor_reordering_buffer": True}
"""Values that ask for what is always so here."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
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
    checked = {key: _checked(key, value) for key, value in settings.items()}
    for key, value in checked.items():
        _runtime[key] = value
        setting = _MAPPED.get(key)
        if setting is not None:
            os.environ[setting.variable] = str(_seconds(key, value) if isinstance(setting, Seconds) else value)
        elif value not in (_DEFAULTS[key], _AS_IT_IS.get(key, _DEFAULTS[key])) and key not in _warned:
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
    return {**_DEFAULTS, **_runtime}


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
        raise ValueError("parametrize_config_pointwise: expected settings with equally many values")
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


def _checked(key: str, value: Any) -> Any:
    """Return a value as it is kept; ValueError for an unknown key, TypeError for a wrong value."""
    if key not in _DEFAULTS:
        raise ValueError(f"there is no setting {key!r}")
    default = _DEFAULTS[key]
    if key in _DURATIONS:
        return _duration(_seconds(key, value))
    if key == "default_transport" or default is None:
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise TypeError(f"{key}: expected {type(default).__name__}, got {value!r}")
    return value


def _seconds(key: str, text: Any) -> float:
    """Return the seconds of a duration such as ``1h 30m``."""
    if not isinstance(text, str):
        raise TypeError(f"{key}: expected a duration such as '30s', got {text!r}")
    parts = re.findall(r"([0-9.]+)\s*([a-z]+)", text)
    units = [_unit(unit) for _, unit in parts]
    if not parts or re.sub(r"[0-9.]+\s*[a-z]+|\s", "", text) or None in units:
        raise TypeError(f"{key}: Invalid duration format {text!r}; expected one such as '30s', '5m' or '1h 30m'")
    return sum(float(number) * (unit or 0.0) for (number, _), unit in zip(parts, units, strict=True))


def _unit(name: str) -> float | None:
    """Return the seconds of a unit, which may be spelled out."""
    if name in _UNITS:
        return _UNITS[name]
    short = {"sec": "s", "second": "s", "min": "m", "minute": "m", "hr": "h", "hour": "h", "day": "d", "msec": "ms"}
    return _UNITS.get(short.get(name.removesuffix("s"), ""))


def _duration(seconds: float) -> str:
    """Return seconds as text: ``1m 30s``."""
    rest, parts = round(seconds * 1e9), list[str]()
    for name in ("d", "h", "m", "s", "ms", "us", "ns"):
        count, rest = divmod(rest, round(_UNITS[name] * 1e9))
        parts += [f"{count}{name}"] if count else []
    return " ".join(parts) or "0s"


def _put(variable: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = text
