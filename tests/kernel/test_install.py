"""The kernelspec: installed by a command, with all that front ends need."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import monarch_kernel

SOURCE = Path(monarch_kernel.__file__).parent / "kernelspec"


def install(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch_kernel", "install", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


def test_install_command_installs_the_kernelspec(tmp_path: Path) -> None:
    done = install("--prefix", str(tmp_path), "--name", "other")
    where = tmp_path / "share" / "jupyter" / "kernels" / "other"
    assert done.returncode == 0 and "'other'" in done.stdout and str(where) in done.stdout
    assert {path.name for path in where.iterdir()} == {path.name for path in SOURCE.iterdir()}
    # Install again, over the existing one.
    assert install("--prefix", str(tmp_path), "--name", "other").returncode == 0


def test_kernelspec_names_the_installing_interpreter(tmp_path: Path) -> None:
    install("--prefix", str(tmp_path))
    spec = json.loads((tmp_path / "share" / "jupyter" / "kernels" / "monarch" / "kernel.json").read_text())
    # For the Jupyter of another environment, `python` would be a different one.
    assert spec["argv"][0] == sys.executable


def test_kernelspec_has_the_expected_fields() -> None:
    spec = json.loads((SOURCE / "kernel.json").read_text())
    assert spec["argv"][1:] == ["-m", "monarch_kernel", "-f", "{connection_file}"]
    assert spec["display_name"] == "Monarch" and spec["language"] == "python"
    assert spec["interrupt_mode"] == "signal" and spec["metadata"]["debugger"] is True


def test_kernel_starts_beside_modules_named_like_those_of_python(tmp_path: Path) -> None:
    for name in ("argparse", "copy", "json", "logging", "monarch", "queue", "random", "shutil", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a module of the notebook')\n")
    command = [sys.executable, "-m", "monarch_kernel", "--help-all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0 and "IPKernelApp" in done.stdout, done.stderr


@pytest.mark.parametrize("size", [32, 64])
def test_kernelspec_has_logos(size: int) -> None:
    data = (SOURCE / f"logo-{size}x{size}.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) < 20_000
    assert struct.unpack(">II", data[16:24]) == (size, size)


def test_kernelspec_has_a_vector_logo() -> None:
    assert (SOURCE / "logo-svg.svg").read_text().lstrip().startswith("<svg")


@pytest.mark.parametrize("words", [["--nonsense"], ["--prefix"], ["--user", "--prefix", "x"], ["--name", "no/name"]])
def test_install_command_refuses_wrong_options(words: list[str]) -> None:
    done = install(*words)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr and done.stderr.strip()


def test_install_says_if_jupyter_will_not_find_it(tmp_path: Path) -> None:
    done = install("--prefix", str(tmp_path))
    assert f"set JUPYTER_PATH={tmp_path}/share/jupyter" in done.stdout
    assert "JUPYTER_PATH" not in install("--user", HOME=str(tmp_path)).stdout


def test_display_name_is_that_of_the_list(tmp_path: Path) -> None:
    install("--prefix", str(tmp_path), "--display-name", "Monarch (nightly)")
    spec = json.loads((tmp_path / "share" / "jupyter" / "kernels" / "monarch" / "kernel.json").read_text())
    assert spec["display_name"] == "Monarch (nightly)"


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_is_that_of_this_kernel(word: str) -> None:
    done = subprocess.run([sys.executable, "-m", "monarch_kernel", word], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "monarch_kernel install" in done.stdout and "IPython" not in done.stdout
