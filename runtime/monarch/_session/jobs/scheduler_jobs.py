"""Jobs on the hosts of a scheduler: Slurm, Ray, Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monarch._procs.launch.interface import Launcher
from monarch._procs.launch.payload import GRACE_S
from monarch._procs.launch.registry import make_launcher
from monarch._session.jobs.cluster_jobs import LauncherJob


class SchedulerJob(LauncherJob):
    """A job of a launcher that is made by name from options."""

    scheduler = ""

    def __init__(
        self, meshes: Mapping[str, int], options: Mapping[str, Any], at_least: int | None, timeout: float | None
    ) -> None:
        super().__init__(meshes, at_least=at_least, timeout=timeout)
        self.options = dict(options)
        # Errors in the options are raised here, not when the hosts are wanted.
        self.launcher()

    def launcher(self) -> Launcher:
        """Return the launcher of the hosts."""
        return make_launcher(self.scheduler, sum(self.meshes.values()), self.options)


class SlurmJob(SchedulerJob):
    """A job on hosts that Slurm grants, from a login node or inside an allocation.

    Args:
        meshes: the number of hosts of each mesh, by name.
        python_exe: the Python of the hosts.
        slurm_args: further arguments of ``salloc``, as they are.
        job_name: its name in the queue.
        time_limit: such as ``"02:00:00"``.
        partition: the partition.
        account: the account.
        qos: the quality of service.
        gres: generic resources, such as ``"gpu:8"``.
        constraint: features of the hosts.
        gpus_per_node: GPUs of each host.
        cpus_per_task: cores of each host.
        mem: memory of each host, such as ``"64G"``.
        exclusive: whether no other job shares the hosts.
        monarch_port: the port of each host's agent; 0 for a free one.
        env: environment variables of the hosts.
        grace: seconds that a host still has after SIGTERM.
        notice: a command that succeeds when the host is about to be taken back, such as a loop that asks the cloud.
        packages: a lock file to install on each host: requirements.txt, pylock.toml or uv.lock; or a packed environment
            of the hosts, such as env.tar.gz.
        at_least: start with this many hosts, if the others fail or take longer, and see ``late_hosts()``; None for
            all. For one mesh only.
        job_start_timeout: the most seconds in the queue and for the start; None to wait without a limit.

    Raises:
        ArgumentError: an argument is invalid.
    """

    scheduler = "slurm"

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str = "",
        slurm_args: Sequence[str] = (),
        monarch_port: int = 0,
        job_name: str = "monarch",
        *,
        time_limit: str | None = None,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        gres: str | None = None,
        constraint: str | None = None,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        exclusive: bool = False,
        env: Mapping[str, str] | None = None,
        grace: float = GRACE_S,
        notice: str = "",
        packages: str = "",
        at_least: int | None = None,
        job_start_timeout: float | None = None,
    ) -> None:
        options = {
            "python": python_exe,
            "args": tuple(slurm_args),
            "port": monarch_port,
            "job_name": job_name,
            "time": time_limit,
            "partition": partition,
            "account": account,
            "qos": qos,
            "gres": gres,
            "constraint": constraint,
            "gpus_per_node": gpus_per_node,
            "cpus_per_task": cpus_per_task,
            "mem": mem,
            "exclusive": exclusive,
            "env": dict(env or {}),
            "grace": grace,
            "notice": notice,
            "packages": packages,
        }
        super().__init__(meshes, options, at_least, job_start_timeout)


class RayJob(SchedulerJob):
    """A job on the hosts of a Ray cluster, each on a different node.

    Args:
        meshes: the number of hosts of each mesh, by name.
        address: the address of the cluster: ``"auto"`` for the one of this machine or of ``RAY_ADDRESS``, and a new
            one if there is none; ``"head:6379"`` from a node; ``"ray://head:10001"`` from elsewhere; or
            ``"local"`` for a new one here.
        cpus_per_host: CPUs to reserve on each host.
        gpus_per_host: GPUs to reserve on each host.
        resources: further resources to reserve on each host, by name.
        env: environment variables of the hosts.
        grace: seconds that a host still has after SIGTERM.
        notice: a command that succeeds when the host is about to be taken back, such as a loop that asks the cloud.
        packages: a lock file to install on each host: requirements.txt, pylock.toml or uv.lock; or a packed environment
            of the hosts, such as env.tar.gz.
        at_least: start with this many hosts, if the others fail or take longer, and see ``late_hosts()``; None for
            all. For one mesh only.
        timeout: the most seconds to wait for the hosts; None to wait without a limit.

    Raises:
        ArgumentError: an argument is invalid.
    """

    scheduler = "ray"

    def __init__(
        self,
        meshes: Mapping[str, int],
        address: str = "auto",
        *,
        cpus_per_host: float = 1,
        gpus_per_host: float = 0,
        resources: Mapping[str, float] | None = None,
        env: Mapping[str, str] | None = None,
        grace: float = GRACE_S,
        notice: str = "",
        packages: str = "",
        at_least: int | None = None,
        timeout: float | None = None,
    ) -> None:
        options = {
            "address": address,
            "cpus": cpus_per_host,
            "gpus": gpus_per_host,
            "resources": dict(resources or {}),
            "env": dict(env or {}),
            "grace": grace,
            "notice": notice,
            "packages": packages,
        }
        super().__init__(meshes, options, at_least, timeout)


class KubernetesJob(SchedulerJob):
    """A job on pods of a Kubernetes cluster: an indexed Job, or a JobSet. Needs ``kubectl``.

    Args:
        meshes: the number of hosts of each mesh, by name.
        image: the image of the containers: a Python with torch and the runtime's other dependencies.
        namespace: the namespace of the job; by default that of kubectl's configuration.
        context: the context of kubectl's configuration; by default the current one.
        kubeconfig: the file of kubectl's configuration; empty for its default.
        python_exe: the Python in the image.
        resources: requests and limits of each pod, such as ``{"nvidia.com/gpu": 8, "memory": "64Gi"}``.
        node_selector: labels that the nodes must have.
        tolerations: taints of nodes that the pods tolerate, as in a pod.
        volumes: volumes of the pods, as in a pod.
        volume_mounts: where the container has them, as in a pod.
        labels: further labels of the job and its pods.
        service_account: the service account of the pods.
        pod_template: a pod template with anything else, as a mapping; its first container is the host's.
        job_name: the name of the job, before a number.
        jobset: whether to create a JobSet; None for yes if the cluster has them.
        time_limit: seconds until Kubernetes ends the job; 0 for no limit.
        monarch_port: the port of each host's agent; 0 for a free one.
        forward: whether kubectl forwards the ports; None for yes outside the cluster.
        env: environment variables of the hosts.
        at_least: start with this many hosts, if the others fail or take longer, and see ``late_hosts()``; None for
            all. For one mesh only.
        timeout: the most seconds to wait for the hosts; None to wait without a limit.

    Raises:
        ArgumentError: an argument is invalid.
    """

    scheduler = "kubernetes"

    def __init__(
        self,
        meshes: Mapping[str, int],
        image: str,
        *,
        namespace: str = "",
        context: str = "",
        kubeconfig: str = "",
        python_exe: str = "python3",
        resources: Mapping[str, Any] | None = None,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] = (),
        volumes: Sequence[Mapping[str, Any]] = (),
        volume_mounts: Sequence[Mapping[str, Any]] = (),
        labels: Mapping[str, str] | None = None,
        service_account: str = "",
        pod_template: Mapping[str, Any] | None = None,
        job_name: str = "monarch",
        jobset: bool | None = None,
        time_limit: int = 0,
        monarch_port: int = 0,
        forward: bool | None = None,
        env: Mapping[str, str] | None = None,
        at_least: int | None = None,
        timeout: float | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "image": image,
            "namespace": namespace,
            "context": context,
            "kubeconfig": kubeconfig,
            "python": python_exe,
            "resources": dict(resources or {}),
            "node_selector": dict(node_selector or {}),
            "tolerations": tuple(map(dict, tolerations)),
            "volumes": tuple(map(dict, volumes)),
            "volume_mounts": tuple(map(dict, volume_mounts)),
            "labels": dict(labels or {}),
            "service_account": service_account,
            "pod_template": dict(pod_template or {}),
            "job_name": job_name,
            "jobset": jobset,
            "time_limit": time_limit,
            "port": monarch_port,
            "forward": forward,
            "env": dict(env or {}),
        }
        super().__init__(meshes, options, at_least, timeout)
