"""The types that users see: their programs check in the strict modes of pyright and mypy, and mistakes are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "typing"
PROGRAMS = [HERE / "program.py", HERE / "mistakes.py"]

pytestmark = pytest.mark.slow


def check(*command: str | Path) -> None:
    ran = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_programs_check_under_strict_pyright() -> None:
    check("pyright", "--project", HERE, "--pythonpath", sys.executable)


def test_programs_check_under_strict_mypy(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    # What it knows of torch serves the next run of the tests.
    cache = getattr(pytestconfig, "cache", None)
    check("mypy", "--cache-dir", cache.mkdir("mypy") if cache is not None else tmp_path, *PROGRAMS)
