"""Passes over the graph of a recorded step: which ops are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from monarch._engine.rank.programs.passes import drop_dead


def ops_left(function: Callable[..., Any], *tensors: torch.Tensor) -> list[str]:
    """Return the names of the ops of a function that are left in its graph; it must still compute the same."""
    graph = make_fx(function, tracing_mode="fake")(*tensors)
    drop_dead(graph.graph)
    graph.recompile()
    given, same = [each.clone() for each in tensors], [each.clone() for each in tensors]
    expected, found = function(*given), graph(*same)
    torch.testing.assert_close((found, same), (expected, given))
    return [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]


def changes_a_stand_in(x: torch.Tensor) -> torch.Tensor:
    torch.empty_like(x).mul_(2).add_(1)
    return x + 1


def changes_its_input(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return torch.zeros(2)


def changes_its_input_by_a_view(x: torch.Tensor) -> torch.Tensor:
    x[0].view(-1).mul_(2)
    return torch.zeros(2)


def changes_what_it_reads(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(3)
    made[1:].add_(1)
    return made[:2] + x[:2]


def changes_what_it_has_read(x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(3)
    result = made + x
    made.add_(1)
    return result


def changes_by_a_fused_op(x: torch.Tensor) -> torch.Tensor:
    stand_ins, inputs = [torch.empty_like(x), torch.empty_like(x)], [x, x]
    torch.ops.aten._foreach_add_.List(stand_ins, inputs)
    return x * 2


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (changes_a_stand_in, ["add.Tensor"]),
        (changes_its_input, ["mul_.Tensor", "zeros.default"]),
        (changes_its_input_by_a_view, ["select.int", "view.default", "mul_.Tensor", "zeros.default"]),
        (
            changes_what_it_reads,
            ["new_zeros.default", "slice.Tensor", "add_.Tensor", "slice.Tensor", "slice.Tensor", "add.Tensor"],
        ),
        (changes_what_it_has_read, ["new_zeros.default", "add.Tensor"]),
        (changes_by_a_fused_op, ["mul.Tensor"]),
    ],
)
def test_ops_that_change_what_nobody_reads_are_dropped(function: Callable[..., Any], left: list[str]) -> None:
    assert ops_left(function, torch.arange(3.0)) == left


def test_an_assert_stays() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_async.default(x[0] == 0)
        return x + 1

    assert "_assert_async.default" in ops_left(checked, torch.arange(3.0))
