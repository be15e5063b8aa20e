"""A simulation of Kubernetes' API server, as far as ``kubectl`` asks it here. It is no cluster: pods are processes.

Its answers are written after the published API, not recorded from a cluster. The real ``kubectl`` talks to it, except
for ``exec`` and ``port-forward``, whose protocols it does not have: a script does these on this machine.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from monarch._procs.launch.manifests import FOLDER, LABEL

_GROUPS = {"batch": "v1", "jobset.x-k8s.io": "v1alpha2"}
_KINDS = {
    "v1": [("pods", "Pod"), ("services", "Service"), ("secrets", "Secret"), ("configmaps", "ConfigMap")],
    "batch/v1": [("jobs", "Job")],
    "jobset.x-k8s.io/v1alpha2": [("jobsets", "JobSet")],
}
_WRAPPER = """#!{python}
# Does here what the simulated API server cannot: exec and port-forward.
import json, os, re, sys
args = sys.argv[1:]
words = [word for word in args if not word.startswith("-")]
with open({log!r}, "a") as log:
    log.write(" ".join(args[:2]) + "\\n")
if words[0] == "exec":
    command = args[args.index("--") + 1:]
    os.execvp(command[0], command)
if words[0] == "port-forward":
    import asyncio
    async def pipe(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()
    async def accepted(reader, writer):
        there = await asyncio.open_connection("127.0.0.1", int(words[2].strip(":")))
        await asyncio.gather(pipe(reader, there[1]), pipe(there[0], writer), return_exceptions=True)
    async def main():
        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        print("Forwarding from 127.0.0.1:%d -> %s" % (server.sockets[0].getsockname()[1], words[2]), flush=True)
        await server.serve_forever()
    asyncio.run(main())
if words[0] == "create":
    # The simulated server has no schemas to check by.
    args.append("--validate=false")
os.execv({kubectl!r}, [{kubectl!r}, "--server={url}", *args])
"""


def why_none() -> str:
    """Return why kubectl cannot be used here; empty if it can."""
    return "" if shutil.which("kubectl") else "kubectl is not installed"


class SimulatedCluster:
    """An API server on loopback, whose pods are processes of this machine.

    Args:
        folder: for what pods mount, and their logs.
        jobsets: whether it has JobSets.
    """

    def __init__(self, folder: Path, jobsets: bool = False) -> None:
        self.folder = folder
        self.kinds = {group: each for group, each in _KINDS.items() if jobsets or "jobset" not in group}
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        self.pods: dict[str, subprocess.Popen[bytes]] = {}
        self.unable: dict[str, Any] = {}
        """Status of pods that do not start; empty for pods that do."""
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                cluster.get(self)

            def do_POST(self) -> None:
                self.answer(cluster.create(self.body()), 201)

            def do_PATCH(self) -> None:
                self.answer(cluster.patch(self.path.partition("?")[0].rpartition("/")[2], self.body()))

            def do_DELETE(self) -> None:
                cluster.delete(self.path.partition("?")[0].rpartition("/")[2])
                self.answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})

            def body(self) -> dict[str, Any]:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return cast("dict[str, Any]", json.loads(data)) if data else {}

            def answer(self, value: dict[str, Any], code: int = 200) -> None:
                data = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.handler = Handler
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.log = folder / "kubectl.log"
        self.kubectl = folder / "kubectl"
        self.kubectl.write_text(
            _WRAPPER.format(python=sys.executable, log=str(self.log), kubectl=shutil.which("kubectl"), url=self.url)
        )
        self.kubectl.chmod(0o755)

    def get(self, handler: Any) -> None:
        """Answer one question."""
        path, _, query = handler.path.partition("?")
        asked = dict(urllib.parse.parse_qsl(query))
        parts = path.strip("/").split("/")
        if path == "/api":
            handler.answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            handler.answer(self._groups())
        elif path.endswith("/log"):
            self._send_log(handler, parts[-2])
        elif "/".join(parts[1:]) in self.kinds:
            handler.answer(self._resources("/".join(parts[1:])))
        elif parts[-1] == "pods":
            handler.answer({"kind": "PodList", "apiVersion": "v1", "items": self._pods(asked["labelSelector"])})
        elif parts[-2:-1] == ["pods"]:
            handler.answer(next(pod for pod in self._pods("") if pod["metadata"]["name"] == parts[-1]))
        else:
            with self.lock:
                found = [each for (_, name), each in self.objects.items() if name == parts[-1]]
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            handler.answer(found[0] if found else status, 200 if found else 404)

    def _groups(self) -> dict[str, Any]:
        groups: list[dict[str, Any]] = []
        for group in (each for each in self.kinds if "/" in each):
            name, _, version = group.partition("/")
            one = {"groupVersion": group, "version": version}
            groups.append({"name": name, "versions": [one], "preferredVersion": one})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def _resources(self, group: str) -> dict[str, Any]:
        verbs = ["create", "delete", "get", "list", "patch"]
        listed = [
            {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            for name, kind in self.kinds[group]
        ]
        return {"kind": "APIResourceList", "groupVersion": group, "resources": listed}

    def create(self, made: dict[str, Any]) -> dict[str, Any]:
        """Store an object; jobs are suspended."""
        with self.lock:
            self.created.append(json.loads(json.dumps(made)))
            made["metadata"].update(uid=f"uid-{len(self.created)}", namespace="default")
            self.objects[made["kind"], made["metadata"]["name"]] = made
        return made

    def patch(self, name: str, change: dict[str, Any]) -> dict[str, Any]:
        """Change a job, and start its pods if it is no longer suspended."""
        with self.lock:
            job = next(each for (kind, own), each in self.objects.items() if own == name and "Job" in kind)
            job["spec"].update(change["spec"])
            spec = job["spec"] if job["kind"] == "Job" else job["spec"]["replicatedJobs"][0]["template"]["spec"]
            for index in range(spec["completions"]):
                self._start(name, index, spec["template"]["spec"])
        return job

    def _start(self, job: str, index: int, spec: dict[str, Any]) -> None:
        pod = f"{job}-{index}-x"
        mounted = self.folder / pod
        mounted.mkdir()
        for source in next(each for each in spec["volumes"] if "projected" in each)["projected"]["sources"]:
            kind, field = ("Secret", "data") if "secret" in source else ("ConfigMap", "binaryData")
            for key, data in self.objects[kind, next(iter(source.values()))["name"]][field].items():
                (mounted / key).write_bytes(base64.b64decode(data))
        if self.unable:
            return
        container = spec["containers"][0]
        env = {each["name"]: each.get("value", "127.0.0.1") for each in container["env"]}
        with open(self.folder / f"{pod}.log", "wb") as log:
            self.pods[pod] = subprocess.Popen(
                [word.replace(FOLDER, str(mounted)) for word in container["command"]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def _pods(self, selector: str) -> list[dict[str, Any]]:
        pods: list[dict[str, Any]] = []
        with self.lock:
            for folder in sorted(self.folder.glob("*-x")):
                job, index, _ = folder.name.rsplit("-", 2)
                meta = {
                    "name": folder.name,
                    "namespace": "default",
                    "labels": {LABEL: job},
                    "annotations": {"batch.kubernetes.io/job-completion-index": index},
                }
                running = {"startedAt": "2026-01-01T00:00:00Z"}
                status = self.unable or {
                    "phase": "Running",
                    "startTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "containerStatuses": [{"name": "host", "state": {"running": running}}],
                }
                spec = {"containers": [{"name": "host"}]}
                if selector in ("", f"{LABEL}={job}") and any(name == job for _, name in self.objects):
                    pods.append({"kind": "Pod", "apiVersion": "v1", "metadata": meta, "spec": spec, "status": status})
        return pods

    def _send_log(self, handler: Any, pod: str) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/plain")
        handler.send_header("Connection", "close")
        handler.end_headers()
        process, at = self.pods[pod], 0
        with suppress(OSError), open(self.folder / f"{pod}.log", "rb") as log:
            ended = False
            while not ended:
                ended = process.poll() is not None
                log.seek(at)
                data = log.read()
                at += len(data)
                handler.wfile.write(data)
                # The log of a pod has no end to wait for.
                time.sleep(0.02)
        handler.close_connection = True

    def delete(self, name: str) -> None:
        """Remove a job and what it owns; its pods are asked to end."""
        with self.lock:
            for key, each in [*self.objects.items()]:
                owners = [owner["name"] for owner in each["metadata"].get("ownerReferences", [])]
                if name in (key[1], *owners):
                    del self.objects[key]
            for pod, process in self.pods.items():
                if pod.startswith(f"{name}-"):
                    process.terminate()

    def close(self) -> None:
        """End the server and the pods."""
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        for process in self.pods.values():
            process.kill()
            process.wait()
