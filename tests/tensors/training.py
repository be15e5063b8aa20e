"""A small training for the tests: a network, batches, and the results of a single process.

All in double precision, so that sums in another order differ far less than mistakes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

STEPS = 4
ROWS = 8
"""Of the whole batch of one step."""


class Net(nn.Module):
    """Two layers. No gradient is exactly zero, which Adam would amplify."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, rows: Any) -> Any:
        return self.second(torch.tanh(self.first(rows)))


def make_net() -> Net:
    """The same in every process."""
    torch.manual_seed(7)
    return Net().double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One with a state of its own."""
    return torch.optim.Adam(model.parameters(), lr=0.05)


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and targets of a step: all of them, or one of some equal parts."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randn(ROWS, 6, dtype=torch.double, generator=generator)
    targets = torch.sin(rows[:, :4] + rows[:, 2:])
    return rows.chunk(parts)[part], targets.chunk(parts)[part]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int], part: int = 0, parts: int = 1
) -> list[float]:
    """Trains on one part of each step's batch; the losses on that part."""
    losses: list[float] = []
    for step in steps:
        rows, targets = batch(step, part, parts)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(rows), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def golden(steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and parameters of one process that trains on whole batches."""
    model = make_net()
    losses = train(model, make_optimizer(model), range(steps))
    return losses, model.state_dict()


def assert_golden(losses: Sequence[Sequence[float]]) -> None:
    """Check that the losses of all ranks, each on its equal part of the batches, average to those of one process."""
    mean = torch.tensor(list(losses), dtype=torch.double).mean(0)
    expected = torch.tensor(golden(len(mean))[0], dtype=torch.double)
    assert expected.unique().numel() == len(expected)
    torch.testing.assert_close(mean, expected, rtol=1e-9, atol=1e-12)


def assert_same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that two sets of parameters are equal up to the order of sums."""
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: name + text)
