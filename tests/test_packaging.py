"""The wheel: what is in it, and that it can be used once it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without what the environment says of imports; return its stdout."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    ran = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(*pip, "wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", out, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_both_packages_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.startswith("monarch_kernel-")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"monarch/actor.py", "monarch/py.typed", "monarch_kernel/__init__.py"} <= names
    tops = {name.partition("/")[0] for name in names}
    data = {top for top in tops if top.endswith(".data")}
    assert {top for top in tops if not top.endswith(".dist-info")} - data == {"monarch", "monarch_kernel"}
    # The kernel, where Jupyter finds it.
    assert {name.partition(".data/")[2] for name in names if ".data/" in name} >= {
        "data/share/jupyter/kernels/monarch/kernel.json"
    }
    assert not [name for name in names if "test_" in name or name.startswith("tests/")]
    source = {str(path.relative_to(ROOT / "runtime")) for path in (ROOT / "runtime/monarch").rglob("*.py")}
    assert not source - names, "the wheel lacks a part of the source"


def test_the_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "--quiet", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # The dependencies come from the environment of this test, behind the new one's own packages. They are
    # named after the installation, or pip would find the package in that environment and install nothing.
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", where, cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    code = """
import monarch, monarch.actor, monarch_kernel
for module in monarch, monarch.actor, monarch_kernel:
    print(module.__file__)
print(monarch_kernel.__version__)
"""
    *files, version = run(python, "-I", "-c", code, cwd=tmp_path).splitlines()
    assert len(files) == 3
    assert all(Path(file).is_relative_to(site) for file in files), files
    assert wheel.name.split("-")[1] == version
