"""The page that says which programs for torchmonarch run here is held to what there is."""

from __future__ import annotations

import importlib
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import monarch._telemetry.meters as meters
import monarch.config as config
from monarch._session.torchmonarch import transport
from monarch.actor import ChannelTransport, enable_transport, get_meter
from monarch.config import configure, configured, get_global_config, get_runtime_config, parametrize_config
from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob
from monarch.job.spmd import serve

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "torchmonarch.md").read_text(encoding="utf-8")
PARTS = dict(zip(*[iter(re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))


def names_of(part: str) -> list[tuple[str, str]]:
    rows = re.findall(r"^\| `(monarch[.\w]*)` \| (`.*) \|$", PARTS[part], flags=re.MULTILINE)
    return [(module, name) for module, names in rows for name in re.findall(r"`(\w+)`", names)]


def resolve(dotted: str) -> Any:
    found: Any = importlib.import_module("monarch")
    for index, name in enumerate(dotted.split(".")[1:], 2):
        try:
            found = getattr(found, name)
        except AttributeError:
            found = importlib.import_module(".".join(dotted.split(".")[:index]))
    return found


@pytest.mark.parametrize(("module", "name"), names_of("Runs unchanged"))
def test_names_that_run_unchanged_exist(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize(("module", "name"), names_of("Missing"))
def test_names_that_are_missing_are_missing(module: str, name: str) -> None:
    assert not hasattr(importlib.import_module(module), name)


def test_names_with_a_difference_exist() -> None:
    found = re.findall(r"^\| `(monarch\.[.\w]*)` \| [^`\n]*", PARTS["Runs with a difference"], flags=re.MULTILINE)
    rows = re.findall(r"^\| `(monarch\.[.\w]*)` \|", PARTS["Runs with a difference"], flags=re.MULTILINE)
    assert rows and set(found) <= set(rows) and all(resolve(name) is not None for name in rows)


def test_mapped_settings_have_an_effect_and_others_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_warned", set())
    with configured(cleanup_timeout="1m 30s", tail_log_lines=3) as settings:
        assert settings["cleanup_timeout"] == "1m 30s" and config.STOP_CLEANUP() == 90.0 and config.TAIL_LINES() == 3
        assert get_runtime_config() == {"cleanup_timeout": "1m 30s", "tail_log_lines": 3}
    assert config.STOP_CLEANUP() == 5.0 and get_runtime_config() == {} and config.TAIL_LINES() == 10
    with pytest.warns(UserWarning, match="max_cast_fanout=2"), configured(max_cast_fanout=2):
        pass
    with warnings.catch_warnings(), configured(max_cast_fanout=3, enable_log_forwarding=True):
        warnings.simplefilter("error")
        assert get_global_config()["max_cast_fanout"] == 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [("30s", "30s"), ("300s", "5m"), ("90s", "1m 30s"), ("1h30m", "1h 30m"), ("100ms", "100ms"), ("5sec", "5s")],
)
def test_durations_are_shown_in_their_units(text: str, shown: str) -> None:
    with configured(stop_actor_timeout=text) as settings:
        assert settings["stop_actor_timeout"] == shown


@pytest.mark.parametrize("wrong", [{"cleanup_timeout": 3}, {"cleanup_timeout": "3"}, {"tail_log_lines": "x"}])
def test_settings_of_wrong_types_are_type_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        configure(**wrong)
    with pytest.raises(ValueError, match="zork"):
        configure(zork=1)
    assert get_runtime_config() == {}


@parametrize_config(tail_log_lines={1, 2})
def test_parametrized_tests_run_with_their_settings(tmp_path: Path) -> None:
    assert config.TAIL_LINES() in (1, 2) and tmp_path.exists()


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("monarch._rust_bindings.monarch_hyperactor.supervision", "; SupervisionError is in monarch.exceptions; docs/"),
        ("monarch.mesh_controller", "catch monarch.exceptions.TensorError instead of RemoteException"),
        ("monarch.timer", "monarch.timer is a torchmonarch module that is missing here; docs/torchmonarch.md lists"),
    ],
)
def test_missing_modules_name_their_counterpart(module: str, hint: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=re.escape(hint)):
        importlib.import_module(module)


def test_unknown_modules_are_reported_as_by_python() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'monarch\.nosuch'$"):
        importlib.import_module("monarch.nosuch")


TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node", "2", "--max-restarts=0"]


@pytest.mark.parametrize(
    ("command", "script", "processes"),
    [
        ([*TORCHRUN, "train.py", "--nnodes", "2", "-m"], ["train.py", "--nnodes", "2", "-m"], 2),
        (["python3", "-m", "torch.distributed.run", "-m", "pkg.train"], ["-m", "pkg.train"], 1),
        (["/usr/bin/python3.12", "train.py", "x"], ["train.py", "x"], 1),
    ],
)
def test_torchrun_commands_are_read_as_by_torchrun(command: list[str], script: list[str], processes: int) -> None:
    job = serve(command, scheduler="local_cwd")
    assert (job.script, job.processes) == (script, processes)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["torchrun", "--nnodes=2", "train.py"], "--nnodes=2: expected 1"),
        (["torchrun", "--nproc-per-node=gpu", "train.py"], "got 'gpu'"),
        (["torchrun", "--zork", "train.py"], "unrecognized arguments: --zork"),
        (["bash", "train.sh"], "expected a command such as"),
        ("torchrun train.py", "as a list of words, got str"),
    ],
)
def test_commands_that_cannot_be_served_say_why(command: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        serve(command)


def test_meshes_of_pods_are_added_one_by_one() -> None:
    job = KubernetesJob("ours", timeout=9, kubeconfig=KubeConfig.from_path("/else/config"))
    with pytest.raises(ValueError, match="has no mesh"):
        job.state()
    image = ImageSpec("image:1", resources={"nvidia.com/gpu": 4})
    job.add_mesh("trainers", 2, image_spec=image, labels={"team": "a"})
    job.add_mesh("generators", 1, image_spec=image)
    made = job.pod_job()
    assert made.meshes == {"trainers": 2, "generators": 1} and made.timeout == 9
    wanted = {
        "image": "image:1",
        "namespace": "ours",
        "kubeconfig": "/else/config",
        "labels": {"team": "a"},
        "port": 26600,
    }
    assert wanted.items() <= made.options.items() and made.options["resources"] == {"nvidia.com/gpu": 4}
    assert made.launcher().client()[1:] == ["--namespace=ours", "--kubeconfig=/else/config"]  # pyright: ignore
    for more, text in (
        ({"image_spec": ImageSpec("image:2")}, "all meshes of a job use the same pods"),
        ({"label_selector": "app=x"}, "label_selector, pod_rank_label and annotations are not supported"),
        ({}, "expected exactly one of image_spec and pod_template"),
        ({"image_spec": image, "num_replicas": 0}, "got 0"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            job.add_mesh("late", **{"num_replicas": 1, **more})
    assert pickle.loads(pickle.dumps(job)).meshes == job.meshes


def test_instruments_of_a_meter_are_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, float]] = []
    monkeypatch.setattr(meters, "has_node", lambda: True)
    monkeypatch.setattr(meters, "log_metric", lambda name, value: logged.append((name, value)))
    counter = get_meter().create_counter("steps")
    counter.add(1)
    counter.add(2)
    counter.add(5, {"kind": "b"})
    get_meter().create_histogram("loss").record(0.5)
    get_meter().create_up_down_counter("open").add(-1)
    assert logged == [("steps", 1), ("steps", 3), ("steps[kind=b]", 5), ("loss", 0.5), ("open", -1)]
    with pytest.raises(ValueError, match="at least 0, got -1"):
        counter.add(-1)
    with pytest.raises(NotImplementedError, match="create_gauge"):
        get_meter().create_gauge("x")


def test_instruments_without_a_mesh_do_nothing() -> None:
    get_meter().create_counter("steps").add(1)


def test_choice_of_a_transport_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_chosen", None)
    for _ in range(2):
        enable_transport("tcp")
        enable_transport(ChannelTransport.TcpWithHostname)
    with pytest.raises(RuntimeError, match="cannot switch to"):
        enable_transport("ipc")
    for wrong in ("metatls", "udp", ChannelTransport.Tls):
        with pytest.raises(ValueError, match="choose 'ipc', 'tcp'"):
            enable_transport(wrong)
