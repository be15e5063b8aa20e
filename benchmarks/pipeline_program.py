"""A 1F1B pipeline of two recorded stages, one rank each: seconds of an iteration, and of each stage alone.

Prints JSON, by number of micro-batches: the seconds of an iteration, those without a bubble, and those of the schedule
if moves took no time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

import monarch
from monarch.distributed import Mesh

WIDTH, ROWS, LAYERS = 768, 256, (3, 5)
"""The last stage runs no op twice, so it has more layers."""


def main() -> None:
    """Measure some numbers of micro-batches, given as arguments after the number of rounds."""
    rounds, counts = int(sys.argv[1]), [int(each) for each in sys.argv[2:]]
    whole = Mesh(shape=(2, 1), mesh_dim_names=("stage", "dp"))
    first, second = whole.slice(stage=0), whole.slice(stage=1)
    front, back = (
        monarch.module_to_mesh(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)]), mesh)
        for count, mesh in zip(LAYERS, (first, second), strict=True)
    )

    @monarch.compile
    def forward(x: Any) -> Any:
        with torch.no_grad():
            return front(x)

    @monarch.compile
    def last(x: Any) -> Any:
        x = x.detach().requires_grad_()
        loss = back(x).square().mean()
        loss.backward()
        return loss.detach(), x.grad

    @monarch.compile
    def backward(x: Any, grad: Any) -> None:
        front(x).backward(grad)

    batches = [monarch.randn(ROWS, WIDTH, mesh=first) for _ in range(max(counts))]
    middles = [monarch.randn(ROWS, WIDTH, mesh=second) for _ in batches]
    grads = [monarch.randn(ROWS, WIDTH, mesh=first) for _ in batches]
    pairs = list(zip(batches, grads, strict=True))
    for model in (front, back):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def ended() -> None:
        for model in (front, back):
            next(model.parameters()).grad.sum().item()

    def iteration(count: int) -> None:
        waiting: list[Any] = []
        for x in batches[:count]:
            _, grad = last(forward(x).to_mesh(second))
            waiting.append((x, grad.to_mesh(first)))
            if len(waiting) > 1:
                backward(*waiting.pop(0))
        for each in waiting:
            backward(*each)

    def timed(work: Any) -> float:
        ended()
        start = time.perf_counter()
        work()
        ended()
        return time.perf_counter() - start

    found: dict[int, list[list[float]]] = {count: [] for count in counts}
    for warm in (True, False):
        for _ in range(2 if warm else rounds):
            for count in counts:
                seconds = timed(lambda count=count: iteration(count))
                parts = [
                    timed(lambda count=count: [forward(x) for x in batches[:count]]) / count,
                    timed(lambda count=count: [last(x) for x in middles[:count]]) / count,
                    timed(lambda count=count: [backward(*each) for each in pairs[:count]]) / count,
                ]
                if not warm:
                    found[count].append([seconds, count * max(parts[0] + parts[2], parts[1]), ideal(count, *parts)])
    print(json.dumps(found))
    whole.stop().get(30)


def ideal(count: int, forward: float, last: float, backward: float) -> float:
    """Return the seconds of the schedule, if moves took none."""
    front = back = 0.0
    ready: list[float] = []
    for number in range(count):
        front += forward
        back = max(front, back) + last
        ready.append(back)
        if number:
            front = max(front, ready[number - 1]) + backward
    return max(front, ready[-1]) + backward


if __name__ == "__main__":
    main()
