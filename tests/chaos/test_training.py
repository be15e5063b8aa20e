"""A training loop while its processes, connections and links are killed, suspended and cut at random.

At the end each call was answered or failed, once; the state is the same on all ranks, and losses and parameters match a
run without faults; nothing is left behind. ``MONARCH_CHAOS_SEED`` repeats a seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leaks import processes, session_folders, wait_until
from namespaces import why_none

SECONDS = os.environ.get("MONARCH_CHAOS_SECONDS", "")
SEED = int(os.environ.get("MONARCH_CHAOS_SEED", "1"))
TESTS = str(Path(__file__).resolve().parent.parent)


def chaos(where: str, usual: float, *prefix: str) -> None:
    """Run the program for some seconds, and check its records and leftovers."""
    seconds = float(SECONDS or usual)
    before, folders = processes(), session_folders()
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "chaos.training_loop", where, str(SEED), str(seconds)],
        capture_output=True,
        text=True,
        timeout=seconds * 4 + 170,
        env={**os.environ, "PYTHONPATH": TESTS},
    )
    report = f"MONARCH_CHAOS_SEED={SEED} MONARCH_CHAOS_SECONDS={seconds:g}: {done.stdout}\n{done.stderr[-20000:]}"
    assert done.returncode == 0, report
    found = json.loads(done.stdout)
    assert not found["wrong"], report
    # It was a test of something.
    assert found["attempts"] >= found["done"] > 5 and found["calls"]["answered"] > 20, report
    left: list[str] = []

    def nothing() -> bool:
        left[:] = [f"{pid} {name}" for pid, name in processes().items() if pid not in before]
        left.extend(session_folders() - folders)
        return not left

    assert wait_until(nothing, 5), f"left behind: {left}\n{report}"


@pytest.mark.slow
@pytest.mark.timeout(float(SECONDS or 15) * 4 + 200)
def test_training_on_one_host_survives_faults() -> None:
    chaos("one", 5)


@pytest.mark.slow
@pytest.mark.timeout(float(SECONDS or 15) * 4 + 200)
def test_training_on_several_hosts_survives_faults() -> None:
    chaos("several", 8)


@pytest.mark.slow
@pytest.mark.timeout(float(SECONDS or 15) * 4 + 200)
def test_training_survives_cut_links() -> None:
    reason = why_none()
    if reason:
        pytest.skip(reason)
    chaos("namespaces", 8, "unshare", "-Urn")
