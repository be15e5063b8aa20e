"""The two wheels: what is in each, and that a worker and a program run on the runtime's dependencies alone."""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import Workers

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "runtime"

pytestmark = pytest.mark.slow

NOTEBOOK = {
    "IPython",
    "anywidget",
    "comm",
    "debugpy",
    "ipykernel",
    "ipywidgets",
    "jupyter_client",
    "jupyter_core",
    "jupyterlab",
    "matplotlib_inline",
    "monarch_kernel",
    "nbformat",
    "notebook",
    "traitlets",
}
"""Packages that only a notebook needs."""

PROGRAM = """
import json, sys
from monarch.actor import Actor, attach_to_workers, endpoint

class Probe(Actor):
    @endpoint
    def add(self, tensor):
        import torch.distributed as dist
        from monarch.distributed import group
        total = tensor.clone()
        dist.all_reduce(total, group=group())
        return float(total.sum()), sorted({name.partition(".")[0] for name in sys.modules})

if __name__ == "__main__":
    import torch
    with attach_to_workers(ca=sys.argv[1], workers=[sys.argv[2]]) as hosts:
        with hosts.spawn_procs(per_host={"gpus": 2}) as procs:
            answers = list(procs.spawn("probes", Probe).add.call(torch.ones(3)).get().values())
    here = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"sums": [each[0] for each in answers], "modules": [here, *(each[1] for each in answers)]}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without what the environment says of imports; return its stdout."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    ran = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def build(source: Path, out: Path) -> Path:
    """Build the wheel of a folder."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(*pip, "wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", out, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def kernel_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="module")
def runtime_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(RUNTIME, tmp_path_factory.mktemp("runtime"))


EXTENSION = "data/share/jupyter/labextensions/@monarch-kernel/labextension/"


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def check_is_whole(wheel: Path, source: Path) -> None:
    """Check that a wheel has all source of one package with its marker of types, and nothing of another."""
    names = names_in(wheel)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {source.name}
    assert f"{source.name}/py.typed" in names
    assert not [name for name in names if "test_" in name or name.startswith("tests/")]
    expected = {str(path.relative_to(source.parent)) for path in source.rglob("*.py")}
    assert not expected - names, "the wheel lacks a part of the source"
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_runtime_wheel_has_the_package_monarch_only(runtime_wheel: Path) -> None:
    assert runtime_wheel.name.startswith("monarch_kernel_runtime-")
    check_is_whole(runtime_wheel, RUNTIME / "monarch")


def test_kernel_wheel_has_the_kernel_and_its_kernelspec(kernel_wheel: Path) -> None:
    check_is_whole(kernel_wheel, ROOT / "monarch_kernel")
    data = {name.partition(".data/")[2] for name in names_in(kernel_wheel) if ".data/" in name}
    # Where Jupyter finds it.
    assert "data/share/jupyter/kernels/monarch/kernel.json" in data


def test_wheel_of_a_clean_clone_has_the_front_end(tmp_path: Path) -> None:
    """The widget and the JupyterLab extension are built, and JupyterLab finds the extension enabled."""
    run("git", "clone", "--quiet", ROOT, "clone", cwd=tmp_path)
    names = names_in(wheel := build(tmp_path / "clone", tmp_path))
    assert "monarch_kernel/views/static/meshview.js" in names
    (data,) = {name.partition("/")[0] for name in names if ".data/" in name}
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in names if EXTENSION in name])
        info = json.loads(archive.read(f"{data}/{EXTENSION}package.json"))
    assert f"{data}/{EXTENSION}{info['jupyterlab']['_build']['load']}" in names
    assert f"{data}/{EXTENSION}schemas/@monarch-kernel/labextension/plugin.json" in names
    assert not [name for name in names if "node_modules" in name or name.startswith("monarch_kernel/labextension")]

    environment = {**os.environ, "JUPYTER_PATH": str(tmp_path / data / "data" / "share" / "jupyter")}
    command = [sys.executable, "-m", "jupyterlab.labextensions", "list"]
    listed = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.search(r"@monarch-kernel/labextension v\S+ .*enabled.*OK", listed.stdout + listed.stderr)


def test_lockfile_names_no_address_of_a_registry() -> None:
    packages = json.loads((ROOT / "package-lock.json").read_text())["packages"]
    assert not [name for name, each in packages.items() if "resolved" in each]
    assert all("integrity" in each for name, each in packages.items() if name)


def test_wheels_work_where_they_are_installed(kernel_wheel: Path, runtime_wheel: Path, tmp_path: Path) -> None:
    python, site = make_venv(tmp_path / "venv")
    install(kernel_wheel, site)
    install(runtime_wheel, site)
    borrow(declared(kernel_wheel) | declared(runtime_wheel), site)

    code = """
import monarch, monarch.actor, monarch_kernel
for module in monarch, monarch.actor, monarch_kernel:
    print(module.__file__)
print(monarch_kernel.__version__)
"""
    *files, version = run(python, "-I", "-c", code, cwd=tmp_path).splitlines()
    assert len(files) == 3
    assert all(Path(file).is_relative_to(site) for file in files), files
    assert kernel_wheel.name.split("-")[1] == runtime_wheel.name.split("-")[1] == version


# An environment with nothing but the runtime and what it depends on


def make_venv(home: Path) -> tuple[Path, Path]:
    """Make an empty environment; return its interpreter and its folder of packages."""
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return python, Path(run(python, "-I", "-c", where, cwd=home).strip())


def install(wheel: Path, site: Path) -> None:
    """Install a wheel without its dependencies."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=site)


def requirements_of(name: str, seen: dict[str, importlib.metadata.Distribution] | None = None) -> set[str]:
    """The installed distributions that one needs, itself among them; those for extras are left out."""
    seen = {} if seen is None else seen
    if name in seen:
        return set(seen)
    try:
        seen[name] = found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        # For another Python or system.
        return set(seen)
    for requirement in found.requires or []:
        if "extra ==" not in requirement:
            requirements_of(re.split(r"[\s\[\](<>=!~;]", requirement, maxsplit=1)[0], seen)
    return set(seen)


def tops_of(name: str) -> Iterator[Path]:
    """The files and folders of a distribution at the top of its installation."""
    found = importlib.metadata.distribution(name)
    tops = {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}
    return (Path(str(found.locate_file(top))) for top in tops)


def borrow(names: set[str], site: Path) -> None:
    """Install distributions of this environment into another one, by links."""
    for top in {top for name in names for top in tops_of(name)}:
        link = site / top.name
        if not link.exists():
            link.symlink_to(top)


def declared(wheel: Path) -> set[str]:
    """The distributions that a wheel needs according to its metadata, with all that those need."""
    (metadata,) = (name for name in names_in(wheel) if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        needs = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    names = [re.split(r"[<>=]", each, maxsplit=1)[0] for each in needs if "extra ==" not in each]
    return {each for name in names if not name.startswith("monarch") for each in requirements_of(name)}


@pytest.fixture(scope="module")
def minimal(runtime_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the runtime and what it declares."""
    python, site = make_venv(tmp_path_factory.mktemp("minimal") / "venv")
    install(runtime_wheel, site)
    borrow(declared(runtime_wheel), site)
    return python


def test_minimal_environment_has_no_notebook(minimal: Path, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([n for n in {sorted(NOTEBOOK)} if u.find_spec(n)])"
    assert run(minimal, "-I", "-c", code, cwd=tmp_path).strip() == "[]"


def test_program_and_worker_run_without_a_notebook(minimal: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    workers = Workers(tmp_path, str(minimal))
    try:
        process, address = workers.start()
        assert address in workers.wait(process)
        answer = json.loads(run(minimal, "program.py", workers.key, address, cwd=tmp_path).splitlines()[-1])
    finally:
        workers.close()
    assert answer["sums"] == [6.0, 6.0]
    assert len(answer["modules"]) == 3
    for modules in answer["modules"]:
        assert "torch" in modules
        assert not NOTEBOOK & set(modules)
