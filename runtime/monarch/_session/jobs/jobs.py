"""Jobs on this machine, by torchmonarch's names: named meshes of hosts, started and ended together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from monarch._meshes.host_mesh import HostMesh, this_host
from monarch._session.jobs.job_telemetry import MeshAdminConfig, TelemetryConfig, advice
from monarch._session.workers import WorkerHosts
from monarch.exceptions import ArgumentError, MonarchError

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"
"""Where torchmonarch keeps the state of a job. Jobs of this package end with their program, so nothing is kept."""

_SERVICES = ("admin_url", "query_engine")


class JobState:
    """The meshes of hosts of a running job, as attributes: ``job.state().trainers``.

    ``admin_url`` and ``query_engine``, which torchmonarch has for its telemetry, are None.
    """

    def __init__(self, hosts: Mapping[str, HostMesh]) -> None:
        self._hosts = dict(hosts)

    def __getattr__(self, name: str) -> Any:
        if name in _SERVICES and name not in self._hosts:
            return None
        if name.startswith("_") or name not in self._hosts:
            raise AttributeError(f"the job has no mesh {name!r}; it has {', '.join(sorted(vars(self)['_hosts']))}")
        return self._hosts[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._hosts})


class JobTrait:
    """Base of jobs: starts hosts at the first ``state()`` or ``apply()``, and ends them at ``kill()``.

    A job of your own has three methods: ``_create(client_script)`` starts its hosts, ``_state()`` returns the JobState
    with their meshes, for example of ``attach_to_workers``, and ``_kill()`` ends them.
    """

    def __init__(self) -> None:
        # Used by the thread of the program that owns the job.
        self._running: JobState | None = None
        self._telemetry: TelemetryConfig | None = None
        """Of a program that asked for it, and is told how to look."""

    def enable_telemetry(
        self, config: TelemetryConfig | None = None, *, mesh_admin_config: MeshAdminConfig | None = None, **options: Any
    ) -> Self:
        """Let the start of the hosts tell how to look at them; return the job. Telemetry itself is always on.

        Args:
            config: has no effect, as its values are those of torchmonarch's dashboard.
            mesh_admin_config: likewise.
            options: the fields of a TelemetryConfig, in place of ``config``.
        """
        self._telemetry = config if config is not None else TelemetryConfig(**options)
        return self

    def enable_admin(self, config: MeshAdminConfig | None = None, **options: Any) -> Self:
        """Do as ``enable_telemetry``; there is no admin server, so ``state().admin_url`` is None.

        Args:
            config: has no effect.
            options: the fields of a MeshAdminConfig, in place of ``config``.
        """
        MeshAdminConfig(**options)
        self._telemetry = self._telemetry or TelemetryConfig()
        return self

    @property
    def active(self) -> bool:
        """Whether the hosts run."""
        return self._running is not None

    def apply(self, client_script: str | None = None) -> None:
        """Start the hosts, unless they run.

        Args:
            client_script: for ``_create`` of your own job; must be None for jobs of this package, which end with
                the program that started them.

        Raises:
            ArgumentError: a script is given.
            SpawnError: a host could not be started.
        """
        if client_script is not None and type(self)._create is JobTrait._create:
            raise ArgumentError("client_script: jobs on this machine end with their program; run the script itself")
        if self._running is None:
            self._running = self._start(client_script)
            # A class of the user may not call our __init__, or come from a pickle of an earlier version.
            asked: TelemetryConfig | None = getattr(self, "_telemetry", None)
            if asked is not None:
                print(advice(asked.include_dashboard), file=sys.stderr, flush=True)

    def state(self, cached_path: str | None = None) -> JobState:
        """Return the meshes of hosts, which are started unless they run.

        Args:
            cached_path: ignored: hosts of an earlier program are not reused, since they end with it.
        """
        self.apply()
        assert self._running is not None
        return self._running

    def kill(self) -> None:
        """End the hosts and all their processes; ``state()`` starts new ones."""
        running, self._running = self._running, None
        if running is not None:
            self._end(running)

    def can_run(self, spec: JobTrait) -> bool:
        """Return whether this job is running and equals another one."""
        return self.active and type(spec) is type(self) and spec.__getstate__() == self.__getstate__()

    def dumps(self) -> bytes:
        """Return the job as bytes, without its hosts; see ``job_loads``."""
        return pickle.dumps(self)

    def dump(self, filename: str) -> None:
        """Write the job to a file, without its hosts; see ``job_load``."""
        with open(filename, "wb") as file:
            file.write(self.dumps())

    def _start(self, client_script: str | None = None) -> JobState:
        """Start the hosts: by the methods of a job of the user, unless a subclass of this package does."""
        self._create(client_script)
        try:
            return self._state()
        except BaseException:
            # Nobody else knows that there are hosts to end.
            self._kill()
            raise

    def _end(self, running: JobState) -> None:
        """End the hosts."""
        self._kill()

    def _create(self, client_script: str | None) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} must implement _create(client_script), and start its hosts there"
        )

    def _state(self) -> JobState:
        raise NotImplementedError(f"{type(self).__name__} must implement _state(), and return a JobState of its hosts")

    def _kill(self) -> None:
        """End the hosts; nothing by default."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_running"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _running=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class LocalJob(JobTrait):
    """A job whose meshes of hosts all are this host.

    Args:
        hosts: the names of the meshes.
    """

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        self.hosts = tuple(hosts)

    def _start(self, client_script: str | None = None) -> JobState:
        return JobState({name: this_host() for name in self.hosts})


class ProcessJob(JobTrait):
    """A job of simulated hosts: each is a process of its own on this machine, with an agent as on another machine.

    Args:
        meshes: the number of hosts of each mesh, by name. Their axis is ``hosts``.
        env: additional environment variables of the hosts.

    Raises:
        ArgumentError: no mesh is named, or a number of hosts is not positive.
    """

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        super().__init__()
        wrong = [name for name, count in meshes.items() if type(count) is not int or count < 1]
        if not meshes or wrong:
            raise ArgumentError(f"meshes: expected a number of hosts for each name, got {dict(meshes)!r}")
        self.meshes = dict(meshes)
        self.env = dict(env or {})

    def _start(self, client_script: str | None = None) -> JobState:
        started: dict[str, HostMesh] = {}
        try:
            for name, count in self.meshes.items():
                started[name] = WorkerHosts(count, env=self.env).mesh
        except BaseException:
            self._end(JobState(started))
            raise
        return JobState(started)

    def _end(self, running: JobState) -> None:
        for name in self.meshes:
            # The program may have shut it down itself, or not have come to start it.
            with suppress(MonarchError, AttributeError):
                getattr(running, name).shutdown().get(30)


def job_loads(data: bytes) -> JobTrait:
    """Return the job of ``JobTrait.dumps``; it runs nothing yet. The data must come from you, since it is unpickled.

    Raises:
        ArgumentError: the data is of something else.
    """
    job = pickle.loads(data)
    if not isinstance(job, JobTrait):
        raise ArgumentError(f"expected a pickled job, got a pickled {type(job).__name__}")
    return job


def job_load(filename: str = DEFAULT_JOB_PATH) -> JobTrait:
    """Return the job of a file of ``JobTrait.dump``; see ``job_loads``."""
    with open(filename, "rb") as file:
        return job_loads(file.read())
