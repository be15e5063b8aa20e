"""``%%mesh --dry-run``: the forecast of a cell, and what cannot be simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.grammar.header import HeaderError, parse

TRAIN = """
from torch.nn.parallel import DistributedDataParallel
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)
    def forward(self, x):
        return self.down(self.up(x).relu())
def mean(loss):
    dist.all_reduce(loss)
    return loss / world_size
model = Net().to(device)
big = torch.ones(1 << 20)
"""
STEP = """
net = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(2):
    loss = net(torch.randn(64, 256, device=device)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("ranks", world_size, big.sum().item())
mean(loss.detach())
model.changed = 1
"""


@pytest.mark.slow
def test_dry_run_forecasts_a_cell_and_changes_nothing(own: Any, tmp_path: Path) -> None:
    book = own()
    # Without a mesh, on the devices that are asked for.
    cell = book.mesh(
        "import torch\nx = torch.ones(1 << 28, device='cuda')\ny = x + x", "--dry-run --world 4x8:a100"
    ).ok()
    assert "peak memory of a rank: 2.15 GB, fits in 80 GB of a100 (32 devices)" in cell.bundles[-1]["text/plain"]
    assert "<svg" in cell.bundles[-1]["text/html"]
    book.run("%mesh up --procs 2").ok()
    book.mesh(TRAIN).ok()
    # Parameters are 2.1 MB, and so are gradients and buckets; AdamW has twice that.
    size = 4 * (2 * 256 * 1024 + 1024 + 256)
    cell = book.mesh(STEP, "--dry-run --out forecast").ok()
    text = cell.bundles[-1]["text/plain"]
    assert "(2 devices)" in text and "of cpu" in text and "ranks 2 nan" in cell.text
    assert "all_reduce along all ranks" in text and "]:7" in text
    book.run(f"assert forecast.owners['parameters'] == {size} and forecast.owners['optimizer'] >= 2 * {size}").ok()
    book.run(f"assert forecast.owners['gradients'] == {size}, forecast.owners").ok()
    # The big tensor of the ranks is an input, and 128 devices have the same parameters.
    book.run("assert forecast.owners['inputs'] == 4 << 20, forecast.owners").ok()
    trace = str(tmp_path / "trace.json")
    book.run(f"assert 'backward' in str(forecast.chrome_trace({trace!r}).read_text())").ok()
    text = book.mesh(STEP, "--dry-run --world 16x8:h100").ok().bundles[-1]["text/plain"]
    assert "(128 devices)" in text and "of h100" in text
    # The ranks have run nothing of it.
    assert "[ranks 0-1] (False, 2)" in book.mesh("hasattr(model, 'changed'), dist.get_world_size()").ok().shown


@pytest.mark.slow
def test_dry_run_says_what_cannot_be_simulated(notebook: Any) -> None:
    notebook.mesh("import threading, torch\nlock = threading.Lock()\npart = [1]").ok()

    def failed(body: str, line: str = "--dry-run") -> str:
        cell = notebook.mesh(body, line)
        assert cell.status == "error"
        return cell.text

    text = failed("x = torch.randn(5)\nx[x > 0]")
    assert "line 3 cannot be simulated, because it needs the values of tensors" in text and "x[x > 0]" in text
    assert "line 2 cannot be simulated" in failed("torch.ones(3).numpy().sum()")
    text = failed("a = torch.ones(3, 4)\na @ a")
    assert "line 3 raises RuntimeError in the simulation" in text and "a @ a" in text
    assert "cannot simulate the variable 'lock' of the ranks: TypeError: cannot pickle" in failed("with lock: pass")
    assert "raises NameError" in failed("unknown + 1")
    assert "SyntaxError" in failed("a = = 1")
    assert "expected one of a100" in failed("1", "--dry-run --world 1x8:tpu")
    assert "--world applies only to cells with --dry-run" in failed("1", "--world 1x8")
    assert "expected hosts, GPUs and a device" in failed("1", "--dry-run --world 8")
    assert "[ranks 0-3] 2" in notebook.mesh("1 + 1").ok().shown


def test_options_of_a_dry_run_are_checked() -> None:
    header = parse("--dry-run --world=16x8:h100")
    assert header.dry_run and header.world == "16x8:h100"
    with pytest.raises(HeaderError, match="--dry-run cannot be combined with --here, --nowait"):
        parse("--dry-run --nowait --here")
