"""A program that compares the peak of ``monarch.simulate`` with the bytes that ranks on CPUs take from malloc.

It runs with heap.c in LD_PRELOAD, is started as ``python peaks.py RANKS MODEL:OPTIMIZER:PLAN:ROWS ...``, and prints a
list of (configuration, predicted, real) in bytes as JSON. ``compared`` starts it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh

HEAP = Path(__file__).with_name("heap.c")
WIDTH, IMAGE, TOKENS, WORDS = 512, 32, 64, 1000
_TRIES, _CLOSE = 5, 1.04


class Peaks(NamedTuple):
    """Peaks of a rank, in bytes.

    Attributes:
        case: model, optimizer, plan and rows.
        predicted: by the simulation.
        real: what the rank with the most took from malloc.
    """

    case: str
    predicted: int
    real: int


def mlp() -> nn.Module:
    """Layers of the same width."""
    return nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def convolution() -> nn.Module:
    """Convolutions whose activations are larger than their parameters."""
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(2))


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        heads = [each.view(batch, length, self.heads, -1).transpose(1, 2)
                 for each in self.project(self.norm(x)).chunk(3, -1)]  # fmt: skip
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer() -> nn.Module:
    """Three layers over words."""
    blocks = [Block(256, 4) for _ in range(3)]
    return nn.Sequential(nn.Embedding(WORDS, 256), *blocks, nn.LayerNorm(256), nn.Linear(256, WORDS))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (mlp, (WIDTH,)),
    "convolution": (convolution, (3, IMAGE, IMAGE)),
    "transformer": (transformer, (TOKENS,)),
}
"""Models, and the shape of a row of their input."""
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
}


def train(mesh: Any, case: str) -> Any:
    """Run two steps, and return what lives after them."""
    model_name, optimizer_name, plan, rows = case.split(":")
    make, shape = MODELS[model_name]
    dtype = torch.int64 if model_name == "transformer" else torch.float32
    spec = ["dp", *[None] * len(shape)]
    x = monarch.zeros(int(rows), *shape, mesh=mesh, spec=spec, dtype=dtype)
    model = monarch.module_to_mesh(make(), mesh, plan)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
    return model, optimizer, x


def _start() -> int:
    gc.collect()
    reset = ctypes.CDLL(None).heap_reset
    reset.restype = ctypes.c_long
    return reset()


def _peak() -> int:
    peak = ctypes.CDLL(None).heap_peak
    peak.restype = ctypes.c_long
    return peak()


def _mesh(ranks: int) -> Any:
    shape, names = ((2, 2), ("dp", "mp")) if ranks == 4 else ((ranks,), ("dp",))
    return Mesh(shape=shape, mesh_dim_names=names)


def _predicted(ranks: int, case: str) -> int:
    with monarch.simulate(hosts=1, gpus=ranks, device="cpu") as simulation:
        train(_mesh(ranks), case)
    forecast = simulation.forecast()
    assert sum(forecast.owners.values()) == forecast.peak
    return forecast.peak


def _real(mesh: Any, case: str, predicted: int) -> int:
    """Return the least peak of a few runs, if the first ones are above the prediction.

    A program that gets no CPU for a moment says late that a tensor is garbage, and its ranks keep it until then.
    """
    # What torch and Python keep from the first run is no memory of the model.
    train(mesh, case)
    peaks: list[int] = []
    while len(peaks) < _TRIES and min(peaks, default=2 * predicted) > _CLOSE * predicted:
        gc.collect()
        before = mesh.execute(_start).values()
        _kept = train(mesh, case)
        peaks.append(max(after - start for after, start in zip(mesh.execute(_peak).values(), before, strict=True)))
        del _kept
    return min(peaks)


def compared(ranks: int, cases: list[str], folder: Path) -> list[Peaks]:
    """Run the program, with heap.c built in a folder, and return what it prints."""
    library = folder / "heap.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(HEAP)], check=True, timeout=60)
    command = [sys.executable, __file__, str(ranks), *cases]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return [Peaks(*each) for each in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    """Print the peaks of the cases in the arguments."""
    ranks, cases = int(sys.argv[1]), sys.argv[2:]
    predicted = [_predicted(ranks, case) for case in cases]
    mesh = _mesh(ranks)
    found = [(case, peak, _real(mesh, case, peak)) for case, peak in zip(cases, predicted, strict=True)]
    mesh.stop().get(60)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
