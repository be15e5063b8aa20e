"""The kernelspec: installed by a command, with all that a front end asks for."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import monarch_kernel

SOURCE = Path(monarch_kernel.__file__).parent / "kernelspec"


def install(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "monarch_kernel", "install", *words], capture_output=True, text=True, timeout=60
    )


def test_the_command_installs_the_kernelspec(tmp_path: Path) -> None:
    done = install("--prefix", str(tmp_path), "--name", "other")
    where = tmp_path / "share" / "jupyter" / "kernels" / "other"
    assert done.returncode == 0 and "'other'" in done.stdout and str(where) in done.stdout
    assert {path.name for path in where.iterdir()} == {path.name for path in SOURCE.iterdir()}
    # Again, over the one that is there.
    assert install("--prefix", str(tmp_path), "--name", "other").returncode == 0


def test_the_interpreter_is_the_one_that_installed_it(tmp_path: Path) -> None:
    install("--prefix", str(tmp_path))
    spec = json.loads((tmp_path / "share" / "jupyter" / "kernels" / "monarch" / "kernel.json").read_text())
    # Where another environment's Jupyter finds it, `python` would be another one.
    assert spec["argv"][0] == sys.executable


def test_the_fields_of_the_kernelspec() -> None:
    spec = json.loads((SOURCE / "kernel.json").read_text())
    assert spec["argv"][1:] == ["-m", "monarch_kernel", "-f", "{connection_file}"]
    assert spec["display_name"] == "Monarch" and spec["language"] == "python"
    assert spec["interrupt_mode"] == "signal" and spec["metadata"]["debugger"] is True


@pytest.mark.parametrize("size", [32, 64])
def test_the_logos(size: int) -> None:
    data = (SOURCE / f"logo-{size}x{size}.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) < 20_000
    assert struct.unpack(">II", data[16:24]) == (size, size)


def test_the_logo_is_drawn_as_vectors_too() -> None:
    assert (SOURCE / "logo-svg.svg").read_text().lstrip().startswith("<svg")


@pytest.mark.parametrize("words", [["--nonsense"], ["--prefix"], ["--user", "--prefix", "x"], ["--name", "no/name"]])
def test_what_cannot_be_meant_is_refused(words: list[str]) -> None:
    done = install(*words)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr and done.stderr.strip()
