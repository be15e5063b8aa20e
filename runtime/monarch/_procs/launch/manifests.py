"""Kubernetes objects of a job: an indexed Job or a JobSet, its headless service, and what its pods start with."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, cast

from monarch._procs.launch.payload import BOOT, LaunchOrder

CONTAINER = "host"
LABEL = "monarch-kernel/job"
INDEX = "batch.kubernetes.io/job-completion-index"
FOLDER = "/run/monarch/order"
POD_BOOT = (
    f"import io,os,sys;p='{FOLDER}/';"
    "b=b''.join(open(p+n,'rb').read() for n in sorted(os.listdir(p)) if n[0]!='.');"
    "r,w=os.pipe();os.dup2(r,0);sys.stdin=io.TextIOWrapper(io.BytesIO(b));" + BOOT
)
"""The program of a pod. Its order is in files, not on its standard input, which stays open until it ends."""
_PART = 512 << 10
"""Bytes in a ConfigMap; the API server takes 1 MiB."""
_KEPT_S = 60
"""Seconds for which Kubernetes keeps a job that has ended."""


def job(
    name: str,
    count: int,
    *,
    image: str,
    python: str = "python3",
    jobset: bool = False,
    resources: Mapping[str, Any] | None = None,
    node_selector: Mapping[str, str] | None = None,
    tolerations: Sequence[Mapping[str, Any]] = (),
    volumes: Sequence[Mapping[str, Any]] = (),
    volume_mounts: Sequence[Mapping[str, Any]] = (),
    labels: Mapping[str, str] | None = None,
    service_account: str = "",
    pod_template: Mapping[str, Any] | None = None,
    time_limit: int = 0,
    parts: int = 1,
) -> dict[str, Any]:
    """Return a Job, or a JobSet, that is suspended: its pods start when their order is there.

    Args:
        name: its name.
        count: the number of pods.
        image: the image of the container.
        python: its Python.
        jobset: whether it is a JobSet.
        resources: requests of the container and equal limits, such as ``{"nvidia.com/gpu": 8}``.
        node_selector, tolerations, volumes, volume_mounts: as in a pod.
        labels: further labels of the job and its pods.
        service_account: the service account of the pods.
        pod_template: a pod template with anything else, which the other arguments add to.
        time_limit: seconds until Kubernetes ends the job; 0 for no limit.
        parts: the number of ConfigMaps with the runtime.
    """
    own = {LABEL: name, **(labels or {})}
    amounts = {key: str(amount) for key, amount in (resources or {}).items()}
    sources: list[dict[str, Any]] = [{"secret": {"name": name}}]
    sources += [{"configMap": {"name": f"{name}-{part}"}} for part in range(parts)]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": [python, "-u", "-c", POD_BOOT],
        # Those of the request may be secret, and are in the order: whoever may list pods reads these.
        "env": [{"name": "MONARCH_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "volumeMounts": [
            {"name": "monarch-order", "mountPath": FOLDER, "readOnly": True},
            # The default of 64 MB is little for ranks.
            {"name": "monarch-memory", "mountPath": "/dev/shm"},
            *map(dict, volume_mounts),
        ],
        **({"resources": {"requests": amounts, "limits": amounts}} if amounts else {}),
    }
    template = dict(pod_template or {})
    known = cast("dict[str, Any]", template.get("spec", {}))
    containers = [dict(each) for each in known.get("containers", [])] or [{}]
    spec: dict[str, Any] = {
        **known,
        # As the name of the headless service.
        "subdomain": name,
        "restartPolicy": "Never",
        "containers": [_add(containers[0], container), *containers[1:]],
        "volumes": [
            *known.get("volumes", []),
            {"name": "monarch-order", "projected": {"defaultMode": 0o400, "sources": sources}},
            {"name": "monarch-memory", "emptyDir": {"medium": "Memory"}},
            *map(dict, volumes),
        ],
        "tolerations": [*known.get("tolerations", []), *map(dict, tolerations)],
        "nodeSelector": {**known.get("nodeSelector", {}), **(node_selector or {})},
        # Hosts on different nodes where there are enough.
        "affinity": known.get("affinity") or {"podAntiAffinity": _apart(name)},
    }
    if service_account:
        spec["serviceAccountName"] = service_account
    elif "serviceAccountName" not in spec:
        spec.setdefault("automountServiceAccountToken", False)
    meta = cast("dict[str, Any]", template.get("metadata", {}))
    pods: dict[str, Any] = {
        "metadata": {**meta, "labels": {**meta.get("labels", {}), **own}},
        "spec": {key: value for key, value in spec.items() if value not in ([], {})},
    }
    one: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        # A host that is lost does not end the others.
        "backoffLimitPerIndex": 0,
        "template": pods,
        **({"activeDeadlineSeconds": time_limit} if time_limit else {}),
    }
    if not jobset:
        outer: dict[str, Any] = {**one, "suspend": True, "ttlSecondsAfterFinished": _KEPT_S}
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": own}, "spec": outer}
    outer = {
        "suspend": True,
        "ttlSecondsAfterFinished": _KEPT_S,
        # Ours, since it has the name that the pods know.
        "network": {"enableDNSHostnames": False},
        "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": one}}],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": own},
        "spec": outer,
    }


def _add(container: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container of the user's template with our fields."""
    lists = ("env", "volumeMounts")
    return {**container, **ours, **{key: [*container.get(key, []), *ours[key]] for key in lists}}


def _apart(name: str) -> dict[str, Any]:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {LABEL: name}}}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}


def runtime_parts(order: LaunchOrder) -> list[bytes]:
    """Return the runtime in pieces that fit into ConfigMaps."""
    _, archive = order.halves()
    return [archive[at : at + _PART] for at in range(0, len(archive), _PART)]


def dependents(owner: Mapping[str, Any], uid: str, order: LaunchOrder) -> dict[str, Any]:
    """Return what belongs to a job, and is removed with it: the service, a Secret with the order, and the runtime.

    Args:
        owner: the job.
        uid: the uid of the job.
        order: what the pods start with.
    """
    name = owner["metadata"]["name"]
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": name, "uid": uid}
    head, _ = order.halves()

    def made(kind: str, own: str, **body: Any) -> dict[str, Any]:
        metadata = {"name": own, "labels": {LABEL: name}, "ownerReferences": [reference]}
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **body}

    service = {"clusterIP": "None", "selector": {LABEL: name}, "publishNotReadyAddresses": True}
    maps = [
        made("ConfigMap", f"{name}-{number}", binaryData={f"1-{number:03}": base64.b64encode(part).decode()})
        for number, part in enumerate(runtime_parts(order))
    ]
    secret = made("Secret", name, type="Opaque", data={"0": base64.b64encode(head).decode()})
    return {"apiVersion": "v1", "kind": "List", "items": [made("Service", name, spec=service), secret, *maps]}
