"""The keys of torchmonarch's ``configure``: their defaults, and the values that they take."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any


class Encoding(Enum):
    """The encodings of messages that torchmonarch has; here it has no effect."""

    Bincode = "Bincode"
    Json = "Json"
    Multipart = "Multipart"

    def __repr__(self) -> str:
        return str(self)


DEFAULTS: dict[str, Any] = {
    "default_encoding": Encoding.Multipart,
    "default_transport": "ipc",
    "message_latency_sampling_rate": 0.01,
    "rdma_max_nics_per_buffer": None,
    "tokio_worker_threads": None,
}
"""All keys, with torchmonarch's defaults; durations are texts."""
_OFF = """enable_file_capture enable_log_forwarding enable_sqlite_tracing
    enable_unawaited_python_task_traceback force_file_log rdma_disable_ibverbs rdma_host_odp
    scuba_log_enter_exit use_direct_spawn"""
DEFAULTS.update(dict.fromkeys(_OFF.split(), False))
_ON = """actor_queue_dispatch enable_dest_actor_reordering_buffer enable_otel_metrics enable_otel_tracing
    enable_recorder_tracing mesh_bootstrap_enable_pdeathsig prefix_with_rank rdma_allow_tcp_fallback
    rdma_cq_poller_per_device"""
DEFAULTS.update(dict.fromkeys(_ON.split(), True))
_TEXTS = """channel_tcp_congestion file_log_level monarch_log_suffix proc_launcher_kind pyspy_bin
    rdma_ibverbs_target rdma_peer_device_affinity"""
DEFAULTS.update(dict.fromkeys(_TEXTS.split(), ""))
DEFAULTS["mesh_admin_addr"] = "[::]:1729"
_COUNTS = """codec_max_frame_length=10737418240 max_cast_dimension_size=16 max_cast_fanout=16
    mesh_admin_max_concurrent_resolves=2 mesh_terminate_concurrency=16 message_ack_every_n_messages=1000
    message_ttl_default=64 rdma_max_chunk_size_mb=64 rdma_min_stripe_size_kb=512 rdma_qps_per_cq=64 rdma_qps_per_peer=4
    rdma_runtime_worker_threads=4 rdma_tcp_fallback_parallelism=1 read_log_buffer=100 sequencer_max_locked_keys=128
    small_write_threshold=256 split_max_buffer_size=5 tail_log_lines=10 terminated_snapshot_retention=100"""
DEFAULTS.update({key: int(count) for key, _, count in (pair.partition("=") for pair in _COUNTS.split())})
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
DEFAULTS.update(_DURATIONS)
AS_IT_IS = {"enable_log_forwarding": True, "prefix_with_rank": True, "enable_dest_actor_reordering_buffer": True}
"""Values that ask for what this package always does, besides the defaults."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def accept(key: str, value: Any) -> Any:
    """Return a value in the form in which it is stored; ValueError for an unknown key, TypeError for a wrong value."""
    if key not in DEFAULTS:
        raise ValueError(f"unknown setting {key!r}; get_global_config() lists the settings")
    default = DEFAULTS[key]
    if key in _DURATIONS:
        return duration_of(seconds_of(key, value))
    if key == "default_transport" or default is None:
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise TypeError(f"{key}: expected {type(default).__name__}, got {value!r}")
    return value


def seconds_of(key: str, text: Any) -> float:
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


def duration_of(seconds: float) -> str:
    """Return seconds as text: ``1m 30s``."""
    rest, parts = round(seconds * 1e9), list[str]()
    for name in ("d", "h", "m", "s", "ms", "us", "ns"):
        count, rest = divmod(rest, round(_UNITS[name] * 1e9))
        parts += [f"{count}{name}"] if count else []
    return " ".join(parts) or "0s"
