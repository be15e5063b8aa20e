"""The kubernetes launcher: hosts are pods of an indexed Job or a JobSet, through the system's kubectl.

Pods read their order from a Secret, and report in their log. In the cluster, this program and the pods connect to each
other; elsewhere, kubectl forwards ports.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as default
from datetime import datetime
from typing import Any

import msgspec

from monarch._procs.launch import manifests
from monarch._procs.launch.interface import Failed, HostRequest, HostRoute, Joined, News, Queued, count_of
from monarch._procs.launch.payload import SAFE_PATH, LaunchOrder
from monarch._procs.launch.podports import PodPorts
from monarch._procs.launch.reports import HostTask
from monarch._procs.launch.streams import HostStream, end_streams, poll_streams
from monarch._procs.launch.watchdog import Watchdog
from monarch.exceptions import ArgumentError, SpawnError

_LIMITS = {"connecting": 60.0, "agent": 60.0}
"""Seconds from the start of a pod's container to its first report, and to its agent."""
_ASK_S = 1.0
"""Seconds between questions about the pods."""
_TOOL_S = 30.0
"""Seconds for kubectl to answer."""
_OUTAGE_S = 60.0
"""Seconds for which questions about the pods may fail, as while the API server restarts, before the job is given up."""
_UNCLAIMED_S = 3600.0
"""Seconds for which the first pod waits for the others. Pods of a job may be scheduled far apart, but those that run
hold their GPUs, and no connection tells them that the program has gone with its machine."""
_ATTACH_S = 300.0
"""Further seconds for the program to connect."""
_FINAL = ("(Forbidden)", "(Unauthorized)", "(NotFound)")
"""Answers of the API server that do not change with time."""
_JOBSET = "jobset.jobset.x-k8s.io"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_ADVICE = {
    "ErrImagePull": "",
    "ImagePullBackOff": "check the image name, and that the nodes can pull it",
    "InvalidImageName": "check the name of the image",
    "CreateContainerConfigError": "check that the secrets and config maps of the pod template exist",
    "CreateContainerError": "check the pod template",
    "RunContainerError": "check that the image has the Python given by python=PATH",
}
"""Reasons of Kubernetes why a container does not start, and what to do; it tries again after the first."""
_GIVEN_UP = {*_ADVICE} - {"ErrImagePull"}


@dataclass(frozen=True)
class KubernetesLauncher:
    """Hosts that are pods.

    Attributes:
        image: the image of the containers: a Python with torch and the runtime's other dependencies.
        count: the number of hosts if the request names none.
        namespace, context: as of kubectl; empty for those of its configuration.
        python: the Python in the image.
        resources: requests and limits of each pod, such as ``{"nvidia.com/gpu": 8}``.
        node_selector, tolerations, volumes, volume_mounts: as in a pod.
        labels: further labels of the job and its pods.
        service_account: the service account of the pods.
        pod_template: a pod template with anything else; its first container is the host's.
        job_name: the name of the job, before a number.
        jobset: whether to create a JobSet; None for yes if the cluster has them.
        time_limit: seconds until Kubernetes ends the job; 0 for no limit.
        port: the port of each host's agent; 0 for a free one.
        forward: whether kubectl forwards the ports; None for yes outside the cluster.
        env: environment variables of the hosts, in the Secret with their order.
        kubectl: the client.
    """

    image: str
    count: int = 0
    namespace: str = ""
    context: str = ""
    kubeconfig: str = ""
    python: str = "python3"
    resources: Mapping[str, Any] = default(default_factory=dict[str, Any])
    node_selector: Mapping[str, str] = default(default_factory=dict[str, str])
    tolerations: Sequence[Mapping[str, Any]] = ()
    volumes: Sequence[Mapping[str, Any]] = ()
    volume_mounts: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = default(default_factory=dict[str, str])
    service_account: str = ""
    pod_template: Mapping[str, Any] = default(default_factory=dict[str, Any])
    job_name: str = "monarch"
    jobset: bool | None = None
    time_limit: int = 0
    port: int = 0
    forward: bool | None = None
    env: Mapping[str, str] = default(default_factory=dict[str, str])
    kubectl: str = "kubectl"

    def __post_init__(self) -> None:
        if not self.image:
            raise ArgumentError("kubernetes: expected an image, such as kubernetes:registry/image:tag, got none")
        if not SAFE_PATH.fullmatch(self.python):
            raise ArgumentError(f"python: expected a path of letters, digits and any of '_./~+-', got {self.python!r}")
        if not _NAME.fullmatch(self.job_name):
            raise ArgumentError(
                f"job_name: expected at most 40 characters of a-z, 0-9 and '-', beginning with a letter, got "
                f"{self.job_name!r}"
            )
        if type(self.time_limit) is not int or self.time_limit < 0:
            raise ArgumentError(f"time_limit: expected whole seconds, at least 0, got {self.time_limit!r}")

    def ask(self, request: HostRequest) -> KubernetesLaunch:
        """Ask for the pods.

        Raises:
            SpawnError: there is no kubectl here.
            ArgumentError: no number of hosts is given.
        """
        if shutil.which(self.kubectl) is None:
            raise SpawnError(f"{self.kubectl!r} is not installed on this machine; install the Kubernetes client")
        count = count_of("kubernetes", request.count, self.count)
        return KubernetesLaunch(self, count, request)

    def client(self) -> list[str]:
        """Return kubectl and its options."""
        options = {"namespace": self.namespace, "context": self.context, "kubeconfig": self.kubeconfig}
        return [self.kubectl, *(f"--{name}={value}" for name, value in options.items() if value)]

    def job(self, name: str, count: int, jobset: bool, parts: int) -> dict[str, Any]:
        """Return the Job or JobSet."""
        return manifests.job(
            name,
            count,
            image=self.image,
            python=self.python,
            jobset=jobset,
            resources=self.resources,
            node_selector=self.node_selector,
            tolerations=self.tolerations,
            volumes=self.volumes,
            volume_mounts=self.volume_mounts,
            labels=self.labels,
            service_account=self.service_account,
            pod_template=self.pod_template,
            time_limit=self.time_limit,
            parts=parts,
        )


class _Ended(SpawnError):
    """The job has ended."""


class KubernetesLaunch:
    """Pods of a job.

    Args:
        launcher: its settings.
        count: the number of hosts.
        request: what was asked for.
    """

    def __init__(self, launcher: KubernetesLauncher, count: int, request: HostRequest) -> None:
        self.expected = count
        outside = "KUBERNETES_SERVICE_HOST" not in os.environ
        self.forwarded = self.agent_here = outside if launcher.forward is None else launcher.forward
        self.name = f"{launcher.job_name}-{secrets.token_hex(4)}"
        self._launcher = launcher
        self._client = launcher.client()
        self._kind = ""
        """The kind of the job, as kubectl names it; empty before there is one."""
        agent = msgspec.structs.replace(request.agent, one_port=True, unclaimed=_UNCLAIMED_S + _ATTACH_S)
        self._order = LaunchOrder(agent, "$MONARCH_POD_IP", launcher.port, launcher.env)
        self._streams: dict[str, HostStream] = {}
        self._gone: set[str] = set()
        """Pods that have failed before their container started."""
        self._ports: dict[str, PodPorts] = {}
        self._told: dict[str, str] = {}
        self._asked = 0.0
        self._failing = 0.0
        """When questions about the pods began to fail; 0 if the last was answered."""
        self._joined = 0.0
        """When the first pod joined; 0 before."""
        self._started = 0.0
        """Start of the job, in seconds since the epoch; 0 before."""
        # Of both kinds until it is chosen. One of them may be unknown to the cluster.
        kinds = ["job", *([_JOBSET] if launcher.jobset is not False else [])]
        delete = f"{shlex.join([*self._client, 'delete', '--ignore-not-found', '--wait=false'])} %s {self.name}"
        both = "; ".join(delete % kind for kind in reversed(kinds))
        known = delete % '"$word"'
        self._watchdog = Watchdog(f'if [ "$word" ]; then {known}; else {both}; fi', f"job {self.name}")

    def watch(self, timeout: float) -> Sequence[News]:
        """Return what happened since the last call; wait up to ``timeout`` seconds for it.

        Raises:
            SpawnError: the API server refuses the job, or cannot be reached for long.
        """
        if not self._kind:
            self._create()
        news: list[News] = []
        if len(self._streams) + len(self._gone) < self.expected and time.monotonic() >= self._asked + _ASK_S:
            self._asked = time.monotonic()
            news += self._ask()
        wait = 0.0 if news else min(timeout, max(0.0, self._asked + _ASK_S - time.monotonic()))
        news += poll_streams([*self._streams.values()], wait)
        if not self._joined and any(isinstance(each, Joined) for each in news):
            self._joined = time.monotonic()
        if self._joined and time.monotonic() > self._joined + _UNCLAIMED_S:
            raise SpawnError(
                f"job {self.name}: only {len(self._streams)} of {self.expected} pods are up {_UNCLAIMED_S / 60:g} min "
                f"after the first started; request fewer, or set at_least to start with some of them"
            )
        return news

    def _create(self) -> None:
        jobset = self._launcher.jobset
        if jobset is None:
            listed = self._run("api-resources", "--api-group=jobset.x-k8s.io", "-o", "name", check=False)
            jobset = "jobsets.jobset.x-k8s.io" in listed
        self._kind = _JOBSET if jobset else "job"
        job = self._launcher.job(self.name, self.expected, jobset, len(manifests.runtime_parts(self._order)))
        made: dict[str, Any] = json.loads(self._run("create", "-f", "-", "-o", "json", stdin=json.dumps(job)))
        rest = manifests.dependents(job, made["metadata"]["uid"], self._order)
        self._run("create", "-f", "-", stdin=json.dumps(rest))
        self._run("patch", self._kind, self.name, "--type=merge", "-p", '{"spec":{"suspend":false}}')

    def _run(self, *args: str, stdin: str = "", check: bool = True) -> str:
        """Return what kubectl prints."""
        try:
            done = subprocess.run(
                [*self._client, *args], capture_output=True, text=True, timeout=_TOOL_S, input=stdin, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SpawnError(f"kubectl {args[0]}: no answer in {_TOOL_S:g} s") from error
        except OSError as error:
            raise SpawnError(f"cannot run {self._client[0]!r}: {error.strerror}") from error
        if check and done.returncode:
            why = done.stderr.strip() or f"code {done.returncode}"
            raise SpawnError(f"kubectl {args[0]}: {why}; docs/clusters.md lists the required permissions")
        return done.stdout

    def _get(self, *args: str) -> dict[str, Any]:
        text = self._run("get", *args, "-o", "json")
        try:
            return json.loads(text)
        except ValueError as error:
            raise SpawnError(f"kubectl get: expected JSON, got {text[:100]!r}") from error

    def _ask(self) -> list[News]:
        """Return what is new about the pods. The API server may be out of reach for a while."""
        try:
            news = self._ask_pods()
        except SpawnError as error:
            now = time.monotonic()
            self._failing = self._failing or now
            if isinstance(error, _Ended) or any(each in str(error) for each in _FINAL):
                raise
            if now > self._failing + _OUTAGE_S:
                raise SpawnError(f"no answer about job {self.name} for {_OUTAGE_S:g} s: {error}") from error
            return self._queued(
                f"job {self.name}", f"the API server does not answer, retrying for up to {_OUTAGE_S:g} s: {error}"
            )
        self._failing = 0.0
        return news

    def _ask_pods(self) -> list[News]:
        pods: list[dict[str, Any]] = self._get("pods", "-l", f"{manifests.LABEL}={self.name}")["items"]
        news: list[News] = []
        if not pods:
            news += self._ask_job()
        for pod in pods:
            name = str(pod["metadata"]["name"])
            if name not in self._streams and name not in self._gone:
                news += self._look(name, pod)
        return news

    def _look(self, name: str, pod: Mapping[str, Any]) -> list[News]:
        status: dict[str, Any] = pod.get("status", {})
        self._started = self._started or _epoch(status.get("startTime", ""))
        states: list[dict[str, Any]] = [
            each.get("state", {}) for each in status.get("containerStatuses", []) if each["name"] == manifests.CONTAINER
        ]
        state = states[0] if states else {}
        if "running" in state or "terminated" in state:
            index = int(pod["metadata"].get("annotations", {}).get(manifests.INDEX, len(self._streams)))
            command = [*self._client, "logs", "-f", name, "-c", manifests.CONTAINER]
            self._streams[name] = HostStream(command, None, [HostTask(name, index)], _LIMITS)
            return []
        waiting: dict[str, str] = state.get("waiting", {})
        reason = waiting.get("reason", "")
        if reason in _GIVEN_UP or status.get("phase") == "Failed":
            self._gone.add(name)
            why = waiting.get("message") or status.get("message") or reason or status.get("reason", "it failed")
            return [Failed(name, why.strip(), _ADVICE.get(reason, ""))]
        words = [
            each.get("message") or each.get("reason", "")
            for each in status.get("conditions", [])
            if each.get("type") == "PodScheduled" and each.get("status") == "False"
        ]
        return self._queued(f"pod {name}", words[0] if words else reason or "pending")

    def _ask_job(self) -> list[News]:
        """Return why there are no pods."""
        job = self._get(self._kind, self.name)
        for condition in job.get("status", {}).get("conditions", []):
            if condition.get("type") == "Failed" and condition.get("status") == "True":
                raise _Ended(f"Kubernetes has ended job {self.name}: {condition.get('message', 'no reason given')}")
        return self._queued(
            f"job {self.name}", "suspended" if job["spec"].get("suspend") else "its pods are being created"
        )

    def _queued(self, what: str, reason: str) -> list[News]:
        changed = self._told.get(what) != reason
        self._told[what] = reason
        return [Queued(what, reason)] if changed else []

    def connect(self, joined: Joined, here: Sequence[str]) -> HostRoute:
        """Return how this program and a host reach each other; forward ports outside the cluster.

        Raises:
            SpawnError: the ports cannot be forwarded.
        """
        pod = next(name for name, stream in self._streams.items() if stream.tasks[0].index == joined.index)
        # Its log is of no more use.
        self._streams[pod].process.terminate()
        if not self.forwarded:
            return HostRoute(joined.listening.owner_address)
        ports = self._ports[pod] = PodPorts(self._client, pod, manifests.CONTAINER, self._launcher.python)
        return HostRoute(ports.to_host(joined.listening.owner_address), ports.to_here(here))

    def settle(self) -> None:
        """Do nothing: pods that come later end with the job."""

    def keep_trying(self) -> bool:
        """Return False: Kubernetes itself starts pods again."""
        return False

    def left(self) -> float | None:
        """Return the seconds until Kubernetes ends the job; None if it has no limit or has not started."""
        if not self._launcher.time_limit or not self._started:
            return None
        return max(0.0, self._started + self._launcher.time_limit - time.time())

    def end(self) -> None:
        """Delete the job, and with it all that belongs to it."""
        self._watchdog.end(_TOOL_S, self._kind, report=bool(self._kind))
        for stream in self._streams.values():
            with suppress(ProcessLookupError):
                stream.process.terminate()
        end_streams([*self._streams.values()])
        for ports in self._ports.values():
            ports.end()


def _epoch(text: str) -> float:
    """Return a time of Kubernetes in seconds since the epoch; 0 if it has none."""
    with suppress(ValueError):
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    return 0.0


def make(where: str, count: int, options: Mapping[str, Any]) -> KubernetesLauncher:
    """Return the launcher of ``kubernetes:IMAGE``."""
    known = dict(options)
    known["image"] = where or known.get("image", "")
    return KubernetesLauncher(count=count, **known)
