"""A first look, in the terminal: eight processes as one mesh, what happens when some of them fail, and training.

Run it with `make demo`. It needs no GPU, and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from monarch.actor import Actor, ActorError, ProcMesh, SupervisionError, current_rank, endpoint, this_host

console = Console(highlight=False, soft_wrap=False)
console.width = min(console.width, 88)
STEPS: list[tuple[str, float]] = []
RANKS = 8


class Worker(Actor):
    """An actor is a class; each of its endpoints can be called from afar. One instance lives in each process."""

    def __init__(self) -> None:
        self.rank = current_rank().rank
        self.model: Any = None

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def greet(self) -> None:
        print("hello from a process of my own")
        if self.rank == 3:
            print("rank 3 has more to say")

    @endpoint
    def invert(self, number: int) -> float:
        return 1 / (number - self.rank)

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def total(self, data: Any) -> float:
        return float(data.sum())

    # Training: each rank has a copy of the model and a share of the data.

    @endpoint
    def load(self, samples: int) -> None:
        import torch

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
        torch.manual_seed(1 + self.rank)
        self.data, self.labels = spirals(samples)

    @endpoint
    def gradients(self) -> tuple[float, list[Any]]:
        import torch

        loss = torch.nn.functional.cross_entropy(self.model(self.data), self.labels)
        self.model.zero_grad()
        loss.backward()
        return loss.item(), [weight.grad for weight in self.model.parameters()]

    @endpoint
    def step(self, gradients: list[Any], rate: float) -> None:
        import torch

        with torch.no_grad():
            for weight, gradient in zip(self.model.parameters(), gradients, strict=True):
                weight -= rate * gradient

    @endpoint
    def accuracy(self) -> float:
        return (self.model(self.data).argmax(1) == self.labels).float().mean().item()


def spirals(samples: int) -> tuple[Any, Any]:
    """Points of two spirals, and which of them each is of: data that no straight line divides."""
    import torch

    labels = torch.arange(samples) % 2
    radius = torch.rand(samples) * 2 + 0.2
    angle = radius * 2.8 + labels * torch.pi
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return points + 0.05 * torch.randn_like(points), labels


@contextmanager
def step(title: str, code: str) -> Iterator[None]:
    """A part of the story: what it is about, the code that matters, what came of it, how long that took."""
    console.print()
    console.print(f"[bold cyan]{len(STEPS) + 1}. {title}[/]")
    for line in code.splitlines():
        console.print(Text(f"   >>> {line}", style="dim"))
    begin = time.perf_counter()
    yield
    taken = time.perf_counter() - begin
    STEPS.append((title, taken))


def say(text: str) -> None:
    """A line of the story."""
    console.print(f"   {text}")


def show(value: object) -> None:
    """What a terminal would show of a value."""
    for line in str(value).splitlines():
        console.print(Text(f"   {line}"))


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def start() -> tuple[ProcMesh, Any]:
    code = f'procs = this_host().spawn_procs(per_host={{"gpus": {RANKS}}})\nworkers = procs.spawn("workers", Worker)'
    with step("Eight processes, and an actor in each", code):
        begin = time.perf_counter()
        procs = this_host().spawn_procs(per_host={"gpus": RANKS})
        workers = procs.spawn("workers", Worker)
        pids = workers.pid.call().get()
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        again = this_host().spawn_procs(per_host={"gpus": RANKS}, name="more")
        again.spawn("more", Worker).pid.call().get()
        second = time.perf_counter() - begin
        again.stop().get()
        say(
            f"{len({*pids.values()})} processes with torch answered after {ms(first)}: one import of torch, then forks."
        )
        say(f"Eight more took {ms(second)}.")
    return procs, workers


def ask(workers: Any) -> None:
    with step("One call asks all of them", "workers.pid.call().get()"):
        show(workers.pid.call().get())
        times: list[float] = []
        for _ in range(50):
            begin = time.perf_counter()
            workers.pid.call().get()
            times.append(time.perf_counter() - begin)
        say(f"To ask eight and gather what they answer takes {median(times) * 1e6:.0f} us.")
    with step("A slice is a mesh too", "workers.slice(gpus=slice(2, 4)).pid.call().get()"):
        show(workers.slice(gpus=slice(2, 4)).pid.call().get())
        say("Ranks are counted anew in a slice; the process ids show which two these are.")


def output(workers: Any) -> None:
    with step("What they print arrives here; equal lines are one", "workers.greet.call().get()"):
        workers.greet.call().get()
        # What was printed is shown by another thread, a moment later.
        time.sleep(0.2)


def errors(workers: Any) -> None:
    code = "workers.invert.call(5).get()   # 1 / (5 - rank)"
    with step("One rank fails: the error says which, the rest is kept", code):
        try:
            workers.invert.call(5).get()
        except ActorError as error:
            console.print(Panel(Text(str(error)), title="ActorError", title_align="left", border_style="red"))
            assert error.results is not None
            values = [None if value is None else round(value, 2) for value in error.results.values()]
            say(escape(f"err.results: {values}"))


def death(procs: ProcMesh, workers: Any) -> None:
    with step("kill -9 of a rank in the middle of a call", "workers.sleep.call(1).get()"):
        victim = workers.slice(gpus=6).pid.call_one().get()
        future = workers.sleep.call(1)
        time.sleep(0.2)
        os.kill(victim, signal.SIGKILL)
        begin = time.perf_counter()
        try:
            future.get(timeout=30)
        except SupervisionError as error:
            taken = time.perf_counter() - begin
            console.print(Panel(Text(str(error)), title="SupervisionError", title_align="left", border_style="red"))
            say(f"The caller heard of it {ms(taken)} after the kill. A new mesh takes over.")
        finally:
            procs.stop().get(timeout=30)


def share() -> tuple[ProcMesh, Any]:
    # The only import of torch in this process: what the ranks are forked from has its own.
    import torch

    procs = this_host().spawn_procs(per_host={"gpus": RANKS})
    workers = procs.spawn("workers", Worker)
    data = torch.ones(16 << 20)
    code = "data = torch.ones(16 << 20)   # 64 MB\nworkers.total.call(data).get()"
    with step("64 MB to eight processes", code):
        workers.total.call(data[:1000]).get()
        times: list[float] = []
        for _ in range(3):
            begin = time.perf_counter()
            totals = workers.total.call(data).get()
            times.append(time.perf_counter() - begin)
        assert set(totals.values()) == {float(16 << 20)}
        say(f"Every rank has added all of it up after {ms(min(times))}: the bytes were")
        say("written once, into memory that all of them see.")
    return procs, workers


def train(workers: Any) -> None:
    code = (
        "for epoch in range(200):\n"
        "    answers = workers.gradients.call().get()\n"
        "    workers.step.broadcast(mean_of(answers), 1.0)"
    )
    with step("Training: every rank has a share of the data", code):
        import torch

        workers.load.call(250).get()
        begin = time.perf_counter()
        for epoch in range(200):
            answers = list(workers.gradients.call().get().values())
            loss = sum(loss for loss, _ in answers) / len(answers)
            mean = [torch.stack(parts).mean(0) for parts in zip(*(grads for _, grads in answers), strict=True)]
            workers.step.broadcast(mean, 1.0)
            if epoch in (0, 24, 49, 99, 199):
                accuracy = workers.accuracy.call().get()
                right = sum(accuracy.values()) / len(accuracy)
                bar = "█" * round(right * 30)
                say(f"step {epoch + 1:3d}   loss {loss:.3f}   right {right:4.0%}  {bar}")
        say(f"200 steps on {RANKS} ranks in {ms(time.perf_counter() - begin)}.")


def main() -> None:
    console.rule("[bold]Monarch: one program, a mesh of processes")
    procs, workers = start()
    ask(workers)
    output(workers)
    errors(workers)
    death(procs, workers)
    procs, workers = share()
    train(workers)
    with step("The end: nothing is left running", "procs.stop().get()"):
        pids = list(workers.pid.call().get().values())
        procs.stop().get()
        alive = sum(os.path.exists(f"/proc/{pid}") for pid in pids)
        say(f"{alive} of {RANKS} processes are alive.")
    console.print()
    console.rule("how long each step took")
    for title, taken in STEPS:
        console.print(f"{title:<60}{ms(taken):>10}")


if __name__ == "__main__":
    main()
