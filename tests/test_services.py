"""Services are typed functions: each has a name of its own, is found by it, and none is named by a string elsewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from monarch._node.services import registry
from monarch._services import SERVICES
from sources import parsed

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "runtime").rglob("*.py"), *(ROOT / "monarch_kernel").rglob("*.py")])
ENTRIES = {
    "monarch._session.rank.rank_process:main",
    "monarch._procs.zygote.main:stand_by",
    "monarch._procs.agent.launched:main",
}
"""Where processes begin, which are named as in the metadata of a package."""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    for module in SERVICES.values():
        importlib.import_module(module)


def test_service_is_where_its_name_says() -> None:
    assert {service.name: service.function.__module__ for service in registry._services.values()} == {
        name: SERVICES[name.partition(".")[0]] for name in registry._services
    }
    assert all(service.function.__name__ == service.name.partition(".")[2] for service in registry._services.values())


def test_each_place_has_services() -> None:
    assert {name.partition(".")[0] for name in registry._services} == set(SERVICES)


def test_declared_signatures_are_those_of_the_functions() -> None:
    stubs = {
        name: stub
        for stub, name in registry._names.items()
        if name in registry._services and hasattr(stub, "__wrapped__")
    }
    assert stubs.keys() == {
        "arguments.rref",
        "asking_why.why",
        "attached.serve",
        "checking.set_all",
        "collector.begin",
        "collector.events_of",
        "collector.progress",
        "differences.diff",
        "evaluate.evaluate",
        "evaluate.evaluate_here",
        "executing.execute_here",
        "exports.cancel",
        "exports.export",
        "local.activate",
        "local.rank_tensor",
        "looking.variables_at",
        "pausing.pause",
        "pausing.resume",
        "pausing.where",
        "rank.assume",
        "reporter.begin",
        "source.lines_here",
        "telling.tell_left",
        "telling.tell_paused",
        "telling.tell_resumed",
        "telling.tell_stopped",
        "threads.threads",
    }
    for name, stub in stubs.items():
        found = inspect.signature(registry.service_of(name).function).parameters
        assert list(found) == list(inspect.signature(stub).parameters)


def test_no_function_of_this_package_is_named_by_a_string() -> None:
    named: list[str] = []
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            text = node.value
            if re.fullmatch(r"monarch[\w.]*:\w+", text) and text not in ENTRIES:
                named.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert not named


def test_unknown_service_is_an_error() -> None:
    with pytest.raises(registry.ArgumentError, match=r"'groups.none' is not a service"):
        registry.service_of("groups.none")
    with pytest.raises(registry.ArgumentError, match=r"'os.system' is not a service"):
        registry.service_of("os.system")
    with pytest.raises(registry.ArgumentError, match="of kind 'quick', not 'actor'"):
        registry.function_of("liveness.here")
    with pytest.raises(TypeError, match="is not declared as a service"):
        registry.name_of(len)
