"""Hosts from Kubernetes: manifests against the published schemas, and the real kubectl against a simulated server."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kube
from leaks import wait_until
from light import LIGHT
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch import kubernetes, manifests, podports
from monarch._procs.launch.interface import HostRequest
from monarch._procs.launch.kubernetes import KubernetesLauncher
from monarch._procs.launch.payload import LaunchOrder
from monarch._procs.launch.podports import PodPorts
from monarch._procs.launch.registry import make_launcher
from monarch._session.launching.launching import launch_hosts
from monarch.exceptions import ArgumentError, SpawnError
from monarch.job import KubernetesJob, job_loads

ORDER = LaunchOrder(AgentConfig("", "", "", 0, 0, [], owner_public="public"), "$MONARCH_POD_IP", 0, {})
FULL: dict[str, Any] = {
    "resources": {"nvidia.com/gpu": 8, "memory": "64Gi"},
    "node_selector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volume_mounts": [{"name": "data", "mountPath": "/data"}],
    "labels": {"team": "us"},
    "service_account": "trainer",
    "time_limit": 3600,
    "pod_template": {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "hostNetwork": True,
            "containers": [
                {"name": "x", "imagePullPolicy": "Always", "env": [{"name": "A", "value": "1"}]},
                {"name": "sidecar", "image": "side:1"},
            ],
        },
    },
}
USE = """
import os, sys
from monarch.actor import Actor, endpoint
from monarch.job import KubernetesJob

class Worker(Actor):
    @endpoint
    def ask(self, others) -> list:
        return sorted(others.home.call().get(30).values())

    @endpoint
    def home(self) -> str:
        return os.environ["OF_THE_POD"]

if __name__ == "__main__":
    how, python = sys.argv[1:]
    job = KubernetesJob({"trainers": 2}, "image:1", python_exe=python, forward="forward" in how, time_limit=600,
                        env={"OF_THE_POD": "pod"})
    procs = job.told_by(lambda line: None).state().trainers.spawn_procs({"gpus": 1}, name="far")
    actors, others = procs.spawn("actors", Worker), procs.spawn("others", Worker)
    print(actors.ask.call(others).get(60).values(), 0 < job.seconds_left <= 600, flush=True)
    if "killed" in how:
        os.kill(os.getpid(), 9)
    job.kill()
    print(job.active)
"""


def objects(jobset: bool = False, **more: Any) -> list[dict[str, Any]]:
    job = manifests.job("monarch-1", 4, image="image:1", jobset=jobset, parts=2, **more)
    return [job, *manifests.dependents(job, "uid-1", ORDER)["items"]]


@pytest.mark.parametrize("more", [{}, FULL], ids=["least", "full"])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_manifests_fit_the_published_schemas(more: dict[str, Any], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="install the package kubernetes-validate")
    for each in objects(**more):
        validate.validate(each, version, strict=True)
    (jobset, *rest) = objects(jobset=True, **more)
    for each in rest:
        validate.validate(each, version, strict=True)
    # The schema of JobSets is in no package; what they contain is a Job.
    inner = jobset["spec"]["replicatedJobs"][0]["template"]
    validate.validate({"apiVersion": "batch/v1", "kind": "Job", **inner}, version, strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({"apiVersion": "batch/v1", "kind": "Job", "spec": {"colour": "red"}}, version, strict=True)


def test_pods_have_what_was_asked_for() -> None:
    job = objects(**FULL)[0]
    assert job["spec"]["activeDeadlineSeconds"] == 3600 and job["spec"]["suspend"]
    template = job["spec"]["template"]
    assert template["metadata"] == {
        "annotations": {"a": "b"},
        "labels": {manifests.LABEL: "monarch-1", "team": "us"},
    }
    spec = template["spec"]
    assert spec["hostNetwork"] and spec["nodeSelector"] == {"pool": "gpu"} and spec["serviceAccountName"] == "trainer"
    ours, side = spec["containers"]
    assert side["name"] == "sidecar" and ours["name"] == "host" and ours["imagePullPolicy"] == "Always"
    assert ours["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "64Gi"}
    assert [each["name"] for each in ours["env"]] == ["A", "MONARCH_POD_IP"]
    assert {"name": "data", "mountPath": "/data"} in ours["volumeMounts"]


def test_environment_is_in_the_secret_alone() -> None:
    launcher = KubernetesLauncher("image:1", 1, env={"HF_TOKEN": "hf_secret"})
    order = LaunchOrder(ORDER.agent, ORDER.listen, 0, launcher.env)
    job = launcher.job("monarch-1", 1, jobset=False, parts=1)
    assert "hf_secret" not in json.dumps(job) and "HF_TOKEN" not in json.dumps(job)
    by_kind = {each["kind"]: each for each in manifests.dependents(job, "uid-1", order)["items"]}
    assert b"hf_secret" in base64.b64decode(by_kind.pop("Secret")["data"]["0"])
    assert "hf_secret" not in json.dumps(by_kind)


def test_order_is_in_a_secret_and_in_no_command_line() -> None:
    (secret,) = [each for each in objects() if each["kind"] == "Secret"]
    assert "public" not in json.dumps(objects()[0]) and secret["data"].keys() == {"0"}
    owners = {json.dumps(each["metadata"]["ownerReferences"]) for each in objects()[1:]}
    assert len(owners) == 1 and '"uid": "uid-1"' in owners.pop()
    # Less than the API server takes.
    assert all(len(json.dumps(each)) < 1 << 20 for each in objects())


@pytest.fixture(params=[False, True], ids=["job", "jobset"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[kube.SimulatedCluster]:
    if kube.why_none():
        pytest.skip(kube.why_none())
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = kube.SimulatedCluster(folder, jobsets=request.param)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["direct", "forward", "direct killed"])
def test_ranks_of_pods_answer_each_other(
    cluster: kube.SimulatedCluster, program: Callable[..., Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{cluster.folder}:{__import__('os').environ['PATH']}")
    done = program(LIGHT + USE, how, sys.executable)
    lines = done.out.splitlines()
    assert lines[:1] == [str([["pod", "pod"]] * 2) + " True"], done.err
    if "killed" in how:
        assert done.code == -9
        assert wait_until(lambda: not cluster.objects, 20)
    else:
        assert done.code == 0 and lines[1] == "False"
        assert not cluster.objects
    assert wait_until(lambda: all(pod.poll() is not None for pod in cluster.pods.values()), 20)
    kinds = {each["kind"] for each in cluster.created}
    assert kinds == {"JobSet" if "jobsets" in str(cluster.kinds) else "Job", "Service", "Secret", "ConfigMap"}
    # With ports of its own on this machine only where it cannot do without.
    assert ("port-forward" in cluster.log.read_text()) == ("forward" in how)


@pytest.mark.slow
def test_pods_that_cannot_start_are_named(cluster: kube.SimulatedCluster, host: Any) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    cluster.unable = {"phase": "Pending", "containerStatuses": [{"name": "host", "state": {"waiting": waiting}}]}
    launcher = KubernetesLauncher("image:1", 2, kubectl=str(cluster.kubectl))
    with pytest.raises(SpawnError, match=r"host monarch-\w+-0-x: Back-off pulling image; check the image name"):
        launch_hosts(launcher)
    assert not cluster.objects
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: Insufficient cpu"}
    cluster.unable = {"phase": "Pending", "conditions": [condition]}
    lines: list[str] = []
    with pytest.raises(SpawnError, match="0 of 2 hosts joined within 3 s"):
        launch_hosts(launcher, timeout=3, tell=lambda line, keep: lines.append(line))
    assert "(0/3 nodes are available: Insufficient cpu)" in lines[0] and "queued" in lines[0]
    assert not cluster.objects


FAILING = """#!/bin/sh
# Fails to answer questions about pods as the file says, while there is one.
case "$*" in *"get pods"*) if [ -e {answer} ]; then cat {answer} >&2; exit 1; fi;; esac
exec {kubectl} "$@"
"""


@pytest.mark.slow
def test_outage_of_the_api_server_does_not_end_the_request(
    cluster: kube.SimulatedCluster, host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, tool = tmp_path / "answer", tmp_path / "kubectl"
    tool.write_text(FAILING.format(answer=answer, kubectl=cluster.kubectl))
    tool.chmod(0o755)
    launcher = KubernetesLauncher("image:1", 1, kubectl=str(tool))
    condition = {"type": "PodScheduled", "status": "False", "message": "Insufficient cpu"}
    cluster.unable = {"phase": "Pending", "conditions": [condition]}
    answer.write_text("The connection to the server was refused")
    lines: list[str] = []

    def tell(line: str, keep: bool) -> None:
        lines.append(line)
        answer.unlink(missing_ok=True)

    with pytest.raises(SpawnError, match="0 of 1 hosts joined within 5 s"):
        launch_hosts(launcher, timeout=5, tell=tell)
    assert "retrying for up to 60 s: kubectl get: The connection to the server was refused" in lines[0], lines
    assert lines[1].startswith("queued: pod monarch-") and "Insufficient cpu" in lines[1] and len(lines) == 2
    monkeypatch.setattr(kubernetes, "_OUTAGE_S", 1.5)
    answer.write_text("The connection to the server was refused")
    with pytest.raises(SpawnError, match=r"no answer about job monarch-\w+ for 1.5 s: .*refused"):
        launch_hosts(launcher, timeout=60)
    # What no time changes is not asked again.
    monkeypatch.setattr(kubernetes, "_OUTAGE_S", 1000.0)
    answer.write_text("Error from server (Forbidden): pods is forbidden")
    with pytest.raises(SpawnError, match=r"^kubectl get: Error from server \(Forbidden\)"):
        launch_hosts(launcher, timeout=60)
    assert not cluster.objects


def test_kubectl_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    tool = tmp_path / "kubectl"
    tool.write_text("#!/no/such/interpreter\n")
    tool.chmod(0o755)
    launch = KubernetesLauncher("image:1", kubectl=str(tool)).ask(HostRequest(1, ORDER.agent))
    with pytest.raises(SpawnError, match=r"cannot run .*kubectl"):
        launch.watch(1)
    launch.end()


@pytest.mark.slow
def test_refusals_of_the_api_server_are_told(cluster: kube.SimulatedCluster, host: Any) -> None:
    cluster.server.shutdown()
    cluster.server.server_close()
    with pytest.raises(SpawnError, match=r"kubectl create: .*refused"):
        launch_hosts(KubernetesLauncher("image:1", 1, kubectl=str(cluster.kubectl)))


@pytest.mark.slow
def test_kubectl_reads_the_manifests(cluster: kube.SimulatedCluster) -> None:
    for each in objects(jobset="jobsets" in str(cluster.kinds)):
        command = [str(cluster.kubectl), "create", "--dry-run=client", "--validate=false", "-f", "-", "-o", "name"]
        done = subprocess.run(command, input=json.dumps(each), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and each["metadata"]["name"] in done.stdout, done.stderr


def test_port_of_a_pod_that_cannot_be_forwarded_is_named(tmp_path: Path) -> None:
    refuse = tmp_path / "kubectl"
    refuse.write_text("#!/bin/sh\necho 'error: pods is forbidden' >&2; exit 1\n")
    refuse.chmod(0o755)
    ports = PodPorts([str(refuse)], "pod-1", "host", sys.executable)
    with pytest.raises(SpawnError, match=r"pod pod-1: kubectl cannot forward port 7: error: pods is forbidden"):
        ports.to_host("tcp://10.0.0.1:7")
    with pytest.raises(SpawnError, match=r"pod pod-1: kubectl cannot run a command in it: .*pods is forbidden"):
        ports.to_here(["tcp://127.0.0.1:7"])
    ports.end()


CHATTY = """#!/bin/sh
echo $$ > {folder}/pid-$1
case $1 in
    port-forward) echo 'Forwarding from 127.0.0.1:5 -> 7';;
    exec) [ -e {folder}/silent ] && exec sleep 1000; shift; while [ $1 != -- ]; do shift; done; shift; exec "$@";;
esac
yes 'Handling connection for 7' | head -c 300000
yes 'an error' | head -c 300000 >&2
touch {folder}/printed
exec sleep 1000
"""
FORKED = """
import os, signal, sys
from monarch._procs.launch.podports import PodPorts
ports = PodPorts([sys.argv[1]], "pod-1", "host", sys.executable)
print(ports.to_host("tcp://10.0.0.1:7"), len(ports.to_here(["tcp://127.0.0.1:7"])), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
child = os.fork()
if not child:
    signal.pause()
ports.end()
os.kill(child, 9)
"""


def ended(folder: Path, verb: str) -> bool:
    return not Path("/proc", (folder / f"pid-{verb}").read_text().strip()).exists()


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_forwards_print_freely_and_end_with_the_program(tmp_path: Path, how: str) -> None:
    tool = tmp_path / "kubectl"
    tool.write_text(CHATTY.format(folder=tmp_path))
    tool.chmod(0o755)
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", FORKED, tool, how], capture_output=True, text=True, timeout=60)
    assert done.stdout == "tcp://127.0.0.1:5 1\n" and done.returncode == (-9 if how == "killed" else 0), done.stderr
    # Before it would have been killed.
    assert how == "killed" or time.monotonic() - begun < podports._END_S
    assert wait_until(lambda: ended(tmp_path, "port-forward") and ended(tmp_path, "exec"), 10)


def test_output_of_a_forward_does_not_block_it(tmp_path: Path) -> None:
    tool = tmp_path / "kubectl"
    tool.write_text(CHATTY.format(folder=tmp_path))
    tool.chmod(0o755)
    ports = PodPorts([str(tool)], "pod-1", "host", sys.executable)
    assert ports.to_host("tcp://10.0.0.1:7") == "tcp://127.0.0.1:5"
    assert wait_until((tmp_path / "printed").exists, 20)
    ports.end()
    assert wait_until(lambda: ended(tmp_path, "port-forward"), 10)


def test_pod_without_answer_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "kubectl"
    tool.write_text(CHATTY.format(folder=tmp_path))
    tool.chmod(0o755)
    (tmp_path / "silent").touch()
    monkeypatch.setattr(podports, "_PATIENCE_S", 2.0)
    ports = PodPorts([str(tool)], "pod-1", "host", sys.executable)
    with pytest.raises(SpawnError, match="pod-1: kubectl cannot run a command in it: no answer in 2 s"):
        ports.to_here(["tcp://127.0.0.1:7"])
    assert wait_until(lambda: ended(tmp_path, "exec"), 10)
    ports.end()


def test_arguments_of_kubernetes_jobs_are_checked() -> None:
    job = KubernetesJob({"a": 1, "b": 2}, "image:1", **{**FULL, "env": {"NCCL_DEBUG": "WARN"}, "namespace": "ours"})
    again = job_loads(job.dumps())
    assert isinstance(again, KubernetesJob) and again.options == job.options
    wrong: dict[str, dict[str, Any]] = {
        "an image": {"image": ""},
        "python": {"python_exe": "python; rm"},
        "job_name": {"job_name": "Not a name"},
        "time_limit": {"time_limit": -1},
    }
    for match, each in wrong.items():
        with pytest.raises(ArgumentError, match=match):
            KubernetesJob({"a": 1}, **{"image": "image:1", **each})
    launcher = make_launcher("kubernetes:registry/image:1", 2)
    assert isinstance(launcher, KubernetesLauncher) and launcher.image == "registry/image:1"
