"""The peak of ``monarch.simulate`` is what ranks on CPUs take from malloc, by model, optimizer, plan and mesh."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from peaks import compared

CASES = {
    2: ["convolution:momentum:shard:128", "transformer:adamw:auto:16"],
    1: ["mlp:momentum:replicate:1024", "convolution:sgd:replicate:64", "transformer:adamw:replicate:16"],
    4: [
        "mlp:sgd:replicate:128",
        "mlp:foreach:replicate:1024",
        "mlp:adamw:shard:2048",
        "convolution:adamw:replicate:128",
        "transformer:momentum:auto:16",
    ],
    8: [
        "mlp:adamw:replicate:1024",
        "mlp:momentum:shard:4096",
        "convolution:sgd:replicate:256",
        "transformer:adamw:shard:32",
    ],
}
"""By number of ranks. Those of the first one run most often."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="counting the bytes of malloc needs a C compiler")
@pytest.mark.parametrize("ranks", CASES)
def test_peak_agrees_with_a_real_run(ranks: int, tmp_path: Path) -> None:
    peaks = compared(ranks, CASES[ranks], tmp_path)
    for case, predicted, real in peaks:
        print(f"{ranks} {case}: {predicted / 1e6:.1f} MB of {real / 1e6:.1f} MB, {predicted / real:.2f}")
    wrong = [each for each in peaks if not 0.95 < each.predicted / each.real < 1.02]
    assert not wrong
