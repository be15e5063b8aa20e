"""A job on pods whose meshes are added one by one, as in torchmonarch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch._core.kinds import is_a
from monarch._session.jobs.jobs import JobState, JobTrait
from monarch._session.jobs.scheduler_jobs import KubernetesJob as PodJob
from monarch.exceptions import ArgumentError

_POD_RANK = "apps.kubernetes.io/pod-index"
_PORT = 26600


@dataclass(frozen=True)
class ImageSpec:
    """The image of pods: a Python with torch and the runtime's other dependencies."""

    image: str
    resources: Mapping[str, Any] | None = None
    """Requests and limits of each pod, such as ``{"nvidia.com/gpu": 4}``."""


@dataclass(frozen=True)
class KubeConfig:
    """The configuration of kubectl; without one, its own defaults."""

    local: Path | None = None

    @classmethod
    def from_path(cls, path: str) -> KubeConfig:
        """Return the configuration of a file."""
        return cls(Path(path).expanduser())


class KubernetesJob(JobTrait):
    """A job on pods of a Kubernetes cluster, which this package starts as a Job or a JobSet by ``kubectl``.

    Args:
        namespace: the namespace of the pods.
        timeout: the most seconds to wait for them; None to wait without a limit.
        kubeconfig: the path of the configuration of kubectl; None for the one that kubectl uses itself.
        attach_to: ignored: outside the cluster, kubectl forwards the ports.
    """

    def __init__(
        self,
        namespace: str,
        timeout: int | None = None,
        kubeconfig: KubeConfig | None = None,
        attach_to: str | None = None,
    ) -> None:
        super().__init__()
        self.namespace = namespace
        self.timeout = timeout
        self.kubeconfig = kubeconfig or KubeConfig()
        self.meshes: dict[str, int] = {}
        self.pod: dict[str, Any] = {}
        """Image, resources, template and port of all pods."""
        self.labels: dict[str, str] = {}
        self._job: PodJob | None = None

    def add_mesh(
        self,
        name: str,
        num_replicas: int,
        label_selector: str | None = None,
        pod_rank_label: str = _POD_RANK,
        image_spec: ImageSpec | None = None,
        port: int = _PORT,
        pod_template: Any = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Add a mesh of hosts, each in a pod.

        Args:
            name: the name of the mesh.
            num_replicas: its number of hosts.
            label_selector: must be None, since pods of others are not supported.
            pod_rank_label: likewise the default.
            image_spec: the image of the pods; the same for all meshes of a job.
            port: the port of each host's agent; likewise.
            pod_template: in place of an image, a template of the pods, as a mapping; likewise.
            labels: further labels of the job and its pods.
            annotations: must be None; a template has those of the pods.

        Raises:
            ArgumentError: an argument is invalid or not supported; a ValueError.
        """
        if label_selector is not None or pod_rank_label != _POD_RANK or annotations is not None:
            raise ArgumentError(
                "add_mesh: label_selector, pod_rank_label and annotations are not supported, because the job starts "
                "its pods; give image_spec or pod_template, or run 'python -m monarch.worker' in your own pods and use "
                "monarch.actor.attach_to_workers"
            )
        if (image_spec is None) == (pod_template is None):
            raise ArgumentError(
                "add_mesh: expected exactly one of image_spec and pod_template, as in "
                'image_spec=ImageSpec("registry/image:tag")'
            )
        if name in self.meshes:
            raise ArgumentError(f"add_mesh: the job already has a mesh {name!r}")
        if type(num_replicas) is not int or num_replicas < 1:
            raise ArgumentError(f"add_mesh: expected a number of hosts of at least 1, got {num_replicas!r}")
        pod = _pod_of(image_spec, pod_template, port)
        if self.pod and pod != self.pod:
            raise ArgumentError(
                f"add_mesh({name!r}): all meshes of a job use the same pods; use a second job for other images"
            )
        self.pod = pod
        self.meshes[name] = num_replicas
        self.labels.update(labels or {})

    def pod_job(self) -> PodJob:
        """Return the job of this package that it stands for.

        Raises:
            ArgumentError: it has no mesh.
        """
        if not self.meshes:
            raise ArgumentError("the job has no mesh; call add_mesh() first")
        config = str(self.kubeconfig.local) if self.kubeconfig.local is not None else ""
        return PodJob(
            self.meshes,
            namespace=self.namespace,
            kubeconfig=config,
            labels=self.labels,
            timeout=self.timeout,
            **self.pod,
        )

    def _start(self, client_script: str | None = None) -> JobState:
        self._job = self.pod_job()
        return self._job.state()

    def _end(self, running: JobState) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.kill()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_job": None}


def _pod_of(image: ImageSpec | None, template: Any, port: int) -> dict[str, Any]:
    if image is not None:
        return {"image": image.image, "resources": dict(image.resources or {}), "monarch_port": port}
    if not is_a(template, Mapping):
        raise ArgumentError(
            f"pod_template: expected a dict, got {type(template).__name__}; convert a Kubernetes client object with "
            f"kubernetes.client.ApiClient().sanitize_for_serialization(template)"
        )
    made: dict[str, Any] = dict(template)
    spec: dict[str, Any] = made.get("spec") or {}
    containers: list[dict[str, Any]] = spec.get("containers") or [{}]
    if not containers[0].get("image"):
        raise ArgumentError("pod_template: expected an image in its first container")
    return {"image": containers[0]["image"], "pod_template": made, "monarch_port": port}
