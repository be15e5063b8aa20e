"""Telemetry of jobs by torchmonarch's names: it is always on here, and a job that asks for it tells how to look."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TelemetryConfig:
    """Settings of torchmonarch's telemetry, for ``JobTrait.enable_telemetry``. They have no effect here.

    Attributes:
        retention_secs: seconds to keep messages and traces.
        include_dashboard: whether to serve a dashboard.
        dashboard_port: its port.
        snapshot_interval_secs: seconds between two snapshots.
    """

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0


@dataclass
class MeshAdminConfig:
    """Settings of torchmonarch's admin server, for ``JobTrait.enable_admin``. They have no effect here.

    Attributes:
        admin_addr: the address to listen on.
    """

    admin_addr: str | None = None


def advice(dashboard: bool) -> str:
    """Return a line about how to look at a job.

    Args:
        dashboard: whether the program expects a dashboard.
    """
    instead = "; this package has no web dashboard" if dashboard else ""
    return f"monarch: 'monarch top' shows the ranks of this program, and 'monarch debug' attaches to them{instead}"
