"""Models and steps that the tests of recorded steps share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import monarch


class MLP(nn.Module):
    """Two layers with dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(p), nn.Linear(32, 4))

    def forward(self, x: Any) -> Any:
        return self.net(x)


class Convolution(nn.Module):
    """A convolution with the running statistics of a batch norm."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(p), nn.Linear(64, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.drop(F.relu(self.norm(self.conv(x.view(-1, 1, 4, 4))))).flatten(1))


class Transformer(nn.Module):
    """One layer with attention."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 8, dropout=p, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.layer(x.view(-1, 4, 4)).mean(1))


def batch(mesh: Any, seed: int, size: int = 8) -> tuple[Any, Any]:
    """Return inputs and targets, sharded along dp."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(size, 16, generator=generator), torch.randint(4, (size,), generator=generator)
    return monarch.distribute(x, mesh, ["dp", None]), monarch.distribute(y, mesh, ["dp"])


def trained(mesh: Any, kind: Any, optimizer: Callable[..., Any], wrap: Callable[[Any], Any], steps: int) -> Any:
    """Return losses, parameters, buffers and the step after a training."""
    torch.manual_seed(1)
    model = monarch.module_to_mesh(kind(0.3), mesh)
    opt = optimizer(model.parameters())

    def step(x: Any, y: Any) -> Any:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    run = wrap(step)
    losses = [run(*batch(mesh, at)).item() for at in range(steps)]
    values = [each.detach().full_tensor() for each in (*model.parameters(), *model.buffers())]
    return losses, values, run
