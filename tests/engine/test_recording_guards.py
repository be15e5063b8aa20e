"""A recorded step is never silently wrong: changed surroundings are recorded again or followed, the rest is refused."""

from __future__ import annotations

import os
import random
import threading
import uuid
import weakref
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch._engine.issuing.observer import current
from monarch._engine.recording.recorder import Recorder
from monarch.exceptions import ArgumentError
from training_steps import MLP, batch

FACTOR = 2.0


def helper(x: Any) -> Any:
    return x * FACTOR


class Scaled(nn.Module):
    """A module with a method that uses a global."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def scaled(self, x: Any) -> Any:
        return helper(x) * self.rate

    def forward(self, x: Any) -> Any:
        return self.scaled(x * self.weight) * (2 if self.training else 1)


def ones(mesh: Any) -> Any:
    return monarch.ones(4, 16, mesh=mesh, spec=["dp", None])


@pytest.mark.parametrize("change", ["global", "class", "mode", "hook", "method", "module", "forward"])
def test_change_of_surroundings_is_seen(mesh: Any, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = monarch.module_to_mesh(Scaled(), mesh)
    holder = SimpleNamespace(model=model)

    def step(x: Any) -> Any:
        return holder.model(x).sum()

    run, x = monarch.compile(step), ones(mesh)
    before = [run(x).item() for _ in range(3)]
    assert before == [256.0] * 3
    if change == "global":
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
    elif change == "class":
        monkeypatch.setattr(Scaled, "rate", 5.0)
    elif change == "mode":
        model.eval()
    elif change == "hook":
        model.register_forward_hook(lambda module, args, out: out + 1)
    elif change == "method":
        monkeypatch.setattr(Scaled, "scaled", lambda self, x: x)
    elif change == "module":
        holder.model = monarch.module_to_mesh(nn.Linear(16, 1), mesh)
    else:
        model.forward = lambda x: x * 7  # pyright: ignore[reportIncompatibleMethodOverride]
    expected = step(x).item()
    assert expected != 256
    assert [run(x).item() for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("change", ["mode", "attribute", "function"])
def test_change_of_an_argument_is_seen(mesh: Any, change: str) -> None:
    layer, config = Scaled(), SimpleNamespace(scale=2.0)
    layer = monarch.module_to_mesh(layer, mesh)
    table = {"function": [lambda x: x * 1]}

    def apply(x: Any) -> Any:
        return table["function"][0](x)

    def step(x: Any, layer: Any, *, config: Any, apply: Any) -> Any:
        return apply(layer(x)).sum() * config.scale

    run, x = monarch.compile(step), ones(mesh)
    before = [run(x, layer, config=config, apply=apply).item() for _ in range(3)]
    assert before == [512.0] * 3
    if change == "mode":
        layer.eval()
    elif change == "attribute":
        config.scale = 3.0
    else:
        table["function"][0] = lambda x: x * 5
    expected = step(x, layer, config=config, apply=apply).item()
    assert expected != 512
    assert [run(x, layer, config=config, apply=apply).item() for _ in range(3)] == [expected] * 3
    assert "2 recordings" in repr(run)


class Tempered(nn.Module):
    """A module with a private attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._temperature = 2.0

    def forward(self, x: Any) -> Any:
        return x * self._temperature


class Descent(torch.optim.SGD):
    """An optimizer with a private attribute."""

    _factor = 2.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(self._factor)


def test_private_attributes_are_seen(mesh: Any) -> None:
    model, weight = Tempered(), nn.Parameter(monarch.ones(4, mesh=mesh))
    opt = Descent([weight], lr=0.1)
    opt._factor = 2.0

    def step(x: Any) -> Any:
        opt.step()
        return model(x).sum()

    run, x = monarch.compile(step), ones(mesh)
    assert [run(x).item() for _ in range(3)] == [128.0] * 3
    model._temperature = 3.0
    assert run(x).item() == 192
    assert weight.tolist() == [-7.0] * 4
    opt._factor = 10.0
    run(x)
    assert weight.tolist() == [-17.0] * 4


class Limits:
    """Attributes with names of functions that are built in."""

    min = 2.0


input = 3.0


def test_names_that_are_built_in_are_seen(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Any) -> Any:
        return x.sum() * Limits.min * input * abs(-1)

    run, x = monarch.compile(step), ones(mesh)
    assert [run(x).item() for _ in range(3)] == [64.0 * 6] * 3
    monkeypatch.setattr(Limits, "min", 5.0)
    assert run(x).item() == 64 * 15
    monkeypatch.setitem(globals(), "input", 7.0)
    assert run(x).item() == 64 * 35
    monkeypatch.setitem(globals(), "abs", lambda value: value)
    assert run(x).item() == -64 * 35


class Base:
    """Slots that a subclass inherits."""

    __slots__ = "factor"

    def __init__(self) -> None:
        self.factor = 2.0


class Derived(Base):
    """A slot more."""

    __slots__ = ("__power",)

    def __init__(self) -> None:
        super().__init__()
        self.raise_to(1.0)

    def raise_to(self, power: float) -> None:
        self.__power = power

    def __call__(self, x: Any) -> Any:
        return x * self.factor**self.__power


def test_slots_are_seen(mesh: Any) -> None:
    scale = Derived()

    @monarch.compile
    def run(x: Any) -> Any:
        return scale(x).sum()

    x = ones(mesh)
    assert [run(x).item() for _ in range(3)] == [128.0] * 3
    scale.factor = 3.0
    assert run(x).item() == 192
    scale.raise_to(2.0)
    assert run(x).item() == 64 * 9


def test_requires_grad_and_scheduler_are_followed(mesh: Any) -> None:
    def trained(wrap: Any) -> Any:
        torch.manual_seed(0)
        model = monarch.module_to_mesh(MLP(0.0), mesh)
        first, second = list(model.parameters())[:2], list(model.parameters())[2:]
        opt = torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.1}], lr=0.1, momentum=0.9)
        plan = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

        def step(x: Any, y: Any) -> Any:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        run, losses = wrap(step), []
        for at in range(16):
            if at in (6, 11):
                second[0].requires_grad_(at == 11)
            if at == 9:
                opt.param_groups[0]["lr"] = 0.05
            losses.append(run(*batch(mesh, at)).item())
            plan.step()
        return losses, run

    plain, _ = trained(lambda step: step)
    recorded, run = trained(monarch.compile)
    assert recorded == plain
    # The learning rates change without a new recording.
    assert "2 recordings" in repr(run) or "3 recordings" in repr(run)


def test_constant_with_the_value_of_a_rate_stays(mesh: Any) -> None:
    weight = monarch.module_to_mesh(nn.Linear(4, 4), mesh).weight
    opt = torch.optim.SGD([weight], lr=0.5)
    start = weight.detach().full_tensor()

    @monarch.compile
    def step() -> Any:
        with torch.no_grad():
            group = opt.param_groups[0]
            torch.add(weight, 0.5, alpha=group["lr"], out=None)
            return torch.add(weight.detach() * 0.5, torch.ones_like(weight), alpha=group["lr"])

    for rate in (0.5, 0.5, 0.25, 2.0):
        opt.param_groups[0]["lr"] = rate
        assert torch.equal(step().full_tensor(), start * 0.5 + rate)


def test_tensors_of_the_program_are_followed(mesh: Any) -> None:
    state = {"mask": torch.tensor([1.0, 0.0, 2.0, 0.0]), "count": torch.tensor(0.0)}

    @monarch.compile
    def step(x: Any) -> Any:
        state["count"] += 1
        return x * state["mask"] * (1.0 / state["count"].item())

    x = monarch.ones(4, mesh=mesh)
    for at in range(1, 6):
        assert step(x).tolist() == pytest.approx([1 / at, 0, 2 / at, 0])
    state["mask"][1] = 4.0
    for at in range(6, 9):
        assert step(x).tolist() == pytest.approx([1 / at, 4 / at, 2 / at, 0])


def test_aliases_among_inputs_are_told_apart(mesh: Any) -> None:
    pair = {"a": monarch.ones(4, mesh=mesh), "b": monarch.ones(4, mesh=mesh)}

    def step(x: Any) -> Any:
        pair["a"].add_(1)
        return pair["a"] + 10 * pair["b"] + 100 * x

    run = monarch.compile(step)
    for _ in range(3):
        run(pair["b"])
    assert run(pair["b"]).tolist() == [5 + 10 + 100] * 4
    pair["b"] = pair["a"]
    assert run(pair["a"]).tolist() == [6 * 111] * 4
    pair["b"] = monarch.ones(4, mesh=mesh)
    assert run(pair["b"]).tolist() == [7 + 110] * 4
    assert run(pair["a"]).tolist() == [8 + 10 + 800] * 4


def branch_on_value(x: Any) -> Any:
    if x.sum() > 0:
        return x + 1
    return x - 1


def keeps(x: Any, kept: list[Any] = []) -> Any:  # noqa: B006
    kept.append(x + 1)
    return x


def random_number(x: Any) -> Any:
    return x * random.random()


RANDOM, NUMPY = random.Random(3), numpy.random.default_rng(3)
GENERATORS = SimpleNamespace(old=numpy.random.RandomState(3), torch=torch.Generator(), draw=random.Random(4).random)


def python_generator(x: Any) -> Any:
    return x * RANDOM.random()


def numpy_generator(x: Any) -> Any:
    return x * float(NUMPY.normal())


def old_numpy_generator(x: Any) -> Any:
    return x * float(GENERATORS.old.rand())


def numpy_module(x: Any) -> Any:
    return x * float(numpy.random.rand())


def torch_generator(x: Any) -> Any:
    return x * float(torch.rand((), generator=GENERATORS.torch))


def bound_draw(x: Any) -> Any:
    return x * GENERATORS.draw()


def without_seed(x: Any) -> Any:
    return x * random.Random().random()


def numpy_without_seed(x: Any) -> Any:
    return x * float(numpy.random.default_rng().random())


def from_the_system(x: Any) -> Any:
    return x * random.SystemRandom().random()


def torch_number(x: Any) -> Any:
    return x * torch.rand(()).item()


def reseeds(x: Any) -> Any:
    torch.manual_seed(0)
    return torch.rand_like(x)


COUNTS = {"calls": 0}


def counts(x: Any) -> Any:
    COUNTS["calls"] += 1
    return x + 1


NUMBERS = iter(range(100))


def takes(x: Any) -> Any:
    return x * next(NUMBERS)


HELD = SimpleNamespace(temperatures=iter(range(100)), table=numpy.ones(1 << 18), unused=iter(()))


def takes_from_an_attribute(x: Any) -> Any:
    return x * next(HELD.temperatures)


def uses_a_large_array(x: Any) -> Any:
    return x * float(HELD.table[5])


def distributes(x: Any) -> Any:
    return x + monarch.distribute(torch.ones(4, 16), x.mesh)


def items(x: Any) -> Any:
    return x * x.sum().item()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (branch_on_value, r"reads a value at File .*in branch_on_value\n    if x.sum\(\) > 0:"),
        (items, r"reads a value at File .*in items"),
        (keeps, "keeps|changes kept|changes keeps"),
        (random_number, r"random module at File .*in random_number\n    return x \* random.random\(\)"),
        (python_generator, r"generator 'RANDOM' at File .*in python_generator\n"),
        (numpy_generator, r"generator 'NUMPY' at File .*in numpy_generator\n"),
        (old_numpy_generator, r"generator 'GENERATORS.old' at File .*in old_numpy_generator\n"),
        (numpy_module, r"numpy's random generator at File .*in numpy_module\n"),
        (torch_generator, r"reads a value at File .*in torch_generator"),
        (bound_draw, r"generator 'GENERATORS.draw' at File .*in bound_draw\n"),
        (without_seed, r"creates a random generator without a seed at File .*in without_seed\n"),
        (numpy_without_seed, r"creates a random generator without a seed at File .*in numpy_without_seed\n"),
        (from_the_system, r"draws from the system's random generator at File .*in from_the_system\n"),
        (torch_number, "random number"),
        (reseeds, "random generator"),
        (counts, r"changes COUNTS\['calls'\]"),
        (takes, "iterator 'NUMBERS'"),
        (takes_from_an_attribute, "iterator 'HELD.temperatures'"),
        (uses_a_large_array, "array 'HELD.table', which is too large"),
        (distributes, "distributes a tensor"),
    ],
)
def test_steps_that_cannot_be_repeated_say_why_and_where(mesh: Any, step: Any, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        monarch.compile(step)(ones(mesh))


class Noise:
    """As an augmentation with a generator of its own."""

    def __init__(self) -> None:
        self._generator = random.Random(7)

    def __call__(self, x: Any) -> Any:
        return x + self._generator.gauss(0, 1)


def test_generators_in_objects_are_found_and_fixed_seeds_kept(mesh: Any) -> None:
    noise = Noise()
    with pytest.raises(
        ArgumentError, match=r"generator '.*_generator' at File .*in __call__\n .*self._generator.gauss"
    ):
        monarch.compile(lambda x: noise(x))(ones(mesh))

    def same(x: Any) -> Any:
        # A generator that is not drawn from, one with a seed, and names that libraries draw.
        assert RANDOM.getstate() and uuid.uuid4()
        return x * random.Random(5).random() + float(numpy.random.default_rng(5).random())

    step = monarch.compile(same)
    expected = same(ones(mesh)).sum().item()
    assert [step(ones(mesh)).sum().item() for _ in range(3)] == [expected] * 3
    # The patches are gone.
    assert random.Random.seed.__module__ == "random" and os.urandom.__module__ == "posix"


def test_graph_of_autograd_outside_is_refused(mesh: Any) -> None:
    model = monarch.module_to_mesh(nn.Linear(16, 4), mesh)
    hidden = model(ones(mesh))

    @monarch.compile
    def step() -> Any:
        return (hidden * 2).sum()

    with pytest.raises(ArgumentError, match=r"autograd has computed hidden outside"):
        step()


def test_ops_of_another_thread_stay_out(mesh: Any) -> None:
    counter, x = monarch.zeros(4, mesh=mesh), ones(mesh)
    known, unknown = monarch.compile(lambda x: x.sum()), monarch.compile(lambda x: x.sum())
    assert known(x).item() == 64
    errors: list[str] = []
    (wait, start), (wait_done, done) = os.pipe(), os.pipe()

    def other() -> None:
        os.read(wait, 1)
        try:
            counter.add_(1)
            errors.append(f"{known(x).item():.0f}")
            unknown(x)
        except ArgumentError as error:
            errors.append(str(error))
        finally:
            os.write(done, b".")

    def step(x: Any) -> Any:
        leaf = x.detach().requires_grad_()
        os.write(start, b".")
        assert os.read(wait_done, 1)
        (leaf * 2).sum().backward()
        return leaf.grad

    run = monarch.compile(step)
    thread = threading.Thread(target=other)
    thread.start()
    assert run(x).sum().item() == 128
    thread.join(60)
    for each in (wait, start, wait_done, done):
        os.close(each)
    assert errors[0] == "64" and "another thread is recording a step; call it again afterwards" in errors[1]
    assert [run(x).sum().item() for _ in range(3)] == [128.0] * 3
    assert counter.tolist() == [1.0] * 4
    assert unknown(x).item() == 64
    assert "add_" not in run.graph().code


def test_ops_in_threads_of_autograd_are_recorded(mesh: Any) -> None:
    x, recorder = ones(mesh), Recorder("step")
    assert current.start(recorder)
    seen: list[Any] = []
    try:
        with recorder:
            modes = recorder.modes

            def in_a_worker() -> None:
                # As autograd does, which hands the modes of the thread that calls backward to its workers.
                seen.append(current.observer)
                for mode in modes:
                    mode.__enter__()
                seen.append(x + 1)
                for mode in reversed(modes):
                    mode.__exit__(None, None, None)
                seen.append(current.observer)

            thread = threading.Thread(target=in_a_worker)
            thread.start()
            thread.join(60)
    finally:
        current.stop()
    assert seen[0] is None and seen[2] is None
    assert len(recorder.ops) == 1
    assert seen[1].tolist() == [[2.0] * 16] * 4


def test_tensor_that_cannot_be_found_again_is_named(mesh: Any) -> None:
    kept = ones(mesh)
    known = weakref.ref(kept)

    @monarch.compile
    def step(x: Any) -> Any:
        return x + known()

    with pytest.raises(
        ArgumentError, match=r"a tensor of shape \(4, 16\) .*in step\n    return x \+ known\(\)"
    ) as raised:
        step(ones(mesh))
    assert "Pass the tensor as an argument" in str(raised.value)


class Odd:
    """An object that raises another error than AttributeError when it is asked for an unknown attribute."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")


odd = Odd()


def test_objects_with_errors_of_their_own_are_guarded(mesh: Any) -> None:
    def step(x: Any) -> Any:
        return x * 2 if odd is not None else x

    recorded = monarch.compile(step)
    x = monarch.ones(2, mesh=mesh)
    assert [recorded(x).sum().item() for _ in range(3)] == [4, 4, 4]
