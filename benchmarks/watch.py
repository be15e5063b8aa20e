"""The cost of ``monarch.debug.watch`` for small models on the CPU: CPU seconds of the training thread, of steps with
and without a sample, so that other load of the machine matters little.

python benchmarks/watch.py
"""

from __future__ import annotations

import statistics
import time

import torch

from monarch.actor import Actor, endpoint, this_host
from monarch.debug import watch

STEPS, EVERY = 1000, 10


class Trainer(Actor):
    """Trains a small model."""

    @endpoint
    def times(self, width: int) -> tuple[int, float, float]:
        """Return the number of parameters, the median CPU seconds of steps without a sample, and of those with one."""
        torch.set_num_threads(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width), torch.nn.GELU(),
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(32, width)
        watch(model, every=EVERY)
        plain: list[float] = []
        sampled: list[float] = []
        for step in range(1, STEPS + 1):
            begun = time.thread_time()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            (plain if step % EVERY else sampled).append(time.thread_time() - begun)
        count = sum(each.numel() for each in model.parameters())
        return count, statistics.median(plain), statistics.median(sampled)


def main() -> None:
    """Print the cost for some sizes."""
    mesh = this_host().spawn_procs({"ranks": 1})
    trainer = mesh.spawn("trainer", Trainer)
    for width in (64, 256, 512):
        count, plain, sampled = trainer.times.call_one(width).get()
        share = (sampled - plain) / EVERY / plain
        print(
            f"{count:>9,} parameters: {plain * 1e3:.2f} ms a step, {(sampled - plain) * 1e3:.2f} ms a sample, "
            f"{share:.1%} of the training at every {EVERY} steps"
        )


if __name__ == "__main__":
    main()
