"""Jobs and commands on hosts; and meshes that outlive their program, which another program attaches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monarch._procs.agent.detached_records import records
from monarch._session.detached.attaching import attach, end
from monarch._session.detached.keeping import keep
from monarch._session.detached.meshes import DetachedMesh

if TYPE_CHECKING:
    from monarch._session.commands.execution import exec_command
    from monarch._session.commands.forwarding import PortForwarder
    from monarch._session.commands.shells import shell
    from monarch._session.draining import HostNotice
    from monarch._session.jobs.cluster_jobs import SSHJob
    from monarch._session.jobs.current_job import hosts_from_config, load_current_job, set_current_job
    from monarch._session.jobs.job_telemetry import MeshAdminConfig, TelemetryConfig
    from monarch._session.jobs.jobs import (
        DEFAULT_JOB_PATH,
        JobState,
        JobTrait,
        LocalJob,
        ProcessJob,
        job_load,
        job_loads,
    )
    from monarch._session.jobs.scheduler_jobs import KubernetesJob, RayJob, SlurmJob
    from monarch._state.drain import drain

_LATER = {
    "monarch._session.jobs.cluster_jobs": "SSHJob",
    "monarch._session.commands.execution": "exec_command",
    "monarch._session.jobs.current_job": "hosts_from_config load_current_job set_current_job",
    "monarch._session.draining": "HostNotice",
    "monarch._session.jobs.scheduler_jobs": "KubernetesJob RayJob SlurmJob",
    "monarch._session.commands.forwarding": "PortForwarder",
    "monarch._session.jobs.job_telemetry": "MeshAdminConfig TelemetryConfig",
    "monarch._session.jobs.jobs": "DEFAULT_JOB_PATH JobState JobTrait LocalJob ProcessJob job_load job_loads",
    "monarch._session.commands.shells": "shell",
    "monarch._state.drain": "drain",
}
_HOME = {name: module for module, names in _LATER.items() for name in names.split()}

__all__ = [
    "DEFAULT_JOB_PATH",
    "DetachedMesh",
    "HostNotice",
    "JobState",
    "JobTrait",
    "KubernetesJob",
    "LocalJob",
    "MeshAdminConfig",
    "PortForwarder",
    "ProcessJob",
    "RayJob",
    "SSHJob",
    "SlurmJob",
    "TelemetryConfig",
    "attach",
    "drain",
    "end",
    "exec_command",
    "hosts_from_config",
    "job_load",
    "job_loads",
    "keep",
    "load_current_job",
    "records",
    "set_current_job",
    "shell",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'monarch.job' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
