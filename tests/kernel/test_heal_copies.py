"""What a heal restores on new ranks: variables with models in DDP, the state of actors, definitions of cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import Notebook
from leaks import Kit

pytestmark = pytest.mark.slow


@pytest.fixture
def mortal(notebook: Notebook, leaks: Kit) -> Iterator[Notebook]:
    """The notebook, for tests that replace ranks."""
    yield notebook
    notebook.run("%mesh down m")
    notebook.run("%mesh use mesh")
    leaks.rebase()


WRAPPED = """from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def train():
    for _ in range(3):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    return round(model.module.weight.sum().item(), 5)
train()"""


def test_model_in_ddp_trains_on_after_a_death(mortal: Notebook) -> None:
    """Also if a rank dies in the middle of a step: the cell that trains runs again as it is."""
    mortal.mesh(WRAPPED).ok()
    dies = "model.module.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))"
    mortal.mesh(f"import os, signal\nif rank == 1: {dies}\ntrain()")
    text = mortal.run("%mesh heal --copy-from 0").ok().stream()
    assert re.search("copied from rank 0 to ranks? 1.*: .*model, .*optimizer\n", text) and "wrap" not in text, text
    for _ in range(2):
        shown = mortal.mesh("train()").ok().shown
        assert re.fullmatch(r"\[ranks 0-3\] -?[\d.]+", shown), shown


def test_model_in_ddp_trains_on_after_a_resize(mortal: Notebook) -> None:
    """With the new ranks, and without those that have left; samplers divide the data among the ranks of now."""
    mortal.run("%mesh up m --procs 2").ok()
    mortal.mesh(
        """import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4))
sampler, other = DistributedSampler(data), DistributedSampler(data, num_replicas=5, rank=0)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
def train():
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return round(sum(each.double().sum().item() for each in model.parameters()), 9)
train()"""
    ).ok()
    text = mortal.run("%mesh resize m 3").ok().stream()
    assert "sampler: from the next epoch on, a DistributedSampler divides the data among 3 ranks\n" in text
    names = "data, loader, model, optimizer, other, sampler"
    assert f"rank 2 lacks {names}: %mesh heal m --copy-from 0 copies them from rank 0\n" in text
    failed = mortal.mesh("train()").text
    assert "only ranks 0-1 define 'loader'; %mesh heal --copy-from 0 copies the variables of rank 0" in failed
    assert f"copied from rank 0 to rank 2: {names}\n" in mortal.run("%mesh heal --copy-from 0").ok().stream()
    assert mortal.mesh("train()").ok().shown.startswith("[ranks 0-2] ")
    parts = mortal.mesh("sampler.rank, sampler.num_replicas, len(sampler), other.num_replicas, other.rank").ok().shown
    assert parts == "\n".join(f"[rank {rank}] ({rank}, 3, 8, 5, 0)" for rank in range(3))
    assert "ranks 0-2 agree on optimizer" in mortal.run("%mesh diff optimizer").ok().text
    mortal.run("%mesh resize m 2").ok()
    assert mortal.mesh("train()").ok().shown.startswith("[ranks 0-1] ")
    assert mortal.mesh("len(sampler)").ok().shown == "[ranks 0-1] 12"


def test_failed_copy_names_its_rank_and_leaves_ranks_in_step(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 3").ok()
    mortal.mesh(
        """import torch
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)]), bucket_cap_mb=0.005)
class Picky:
    def __setstate__(self, state):
        if dist.get_rank() == 2:
            raise ValueError("no room")
picky = Picky()
picky.x = 1
def step():
    model(torch.ones(2, 32)).square().mean().backward()
    return round(sum(each.grad.double().abs().sum().item() for each in model.parameters()), 6)
step()"""
    ).ok()
    assert "ValueError: no room (on rank 2)" in mortal.run("%mesh heal --copy-from 0 --all").text
    mortal.mesh("model.zero_grad()").ok()
    assert mortal.mesh("step()").ok().shown.startswith("[ranks 0-2] ")


def test_error_between_steps_tells_that_models_differ(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 2").ok()
    cell = mortal.mesh(
        """import torch
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
if rank == 1: raise ValueError("a bad batch")
optimizer.step()"""
    )
    assert (
        cell.status == "error"
        and "ranks 0-1 differ in model; if they should be equal, %mesh heal m --copy-from 0" in (cell.text)
    )


def test_optimizer_is_not_copied_without_its_model(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 2").ok()
    mortal.mesh(
        """import threading, torch
model, locked = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
locked.lock = threading.Lock()
adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(locked.parameters())
steps = torch.optim.lr_scheduler.StepLR(adam, 3)
whole = torch.nn.Linear(2, 2)
trainer = [whole, torch.optim.SGD(whole.parameters())]
del whole"""
    ).ok()
    mortal.run("%mesh kill 1").ok()
    part = "{} (its parameters are those of {}, which is not copied; copy both together, or run its cell again)\n"
    for name in ("adam", "steps"):
        alone = mortal.run(f"%mesh heal --copy-from 0 {name}").ok().stream()
        assert f"copied from rank 0 to rank 1: nothing\nnot copied: {part.format(name, 'model')}" in alone
    text = mortal.run("%mesh heal --copy-from 0").ok().stream()
    assert "copied from rank 0 to rank 1: adam, model, steps, trainer\n" in text
    assert f"not copied: {part.format('sgd', 'locked')}" in text
    same = mortal.mesh("adam.param_groups[0]['params'][0] is model.weight and steps.optimizer is adam")
    assert same.ok().shown == "[ranks 0-1] True"


def test_model_in_ddp_is_copied_to_a_rank_that_has_trained(mortal: Notebook) -> None:
    """An earlier heal has replaced it without a copy, so the other ranks have no failure to recover from."""
    mortal.mesh(WRAPPED).ok()
    mortal.mesh("import os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)")
    mortal.run("%mesh heal").ok()
    mortal.mesh(WRAPPED.replace("manual_seed(0)", "manual_seed(rank)")).ok()
    text = mortal.run("%mesh heal --copy-from 1").ok().stream()
    assert re.search("copied from rank 1 to ranks? 0.*: .*model, .*optimizer\n", text), text
    shown = mortal.mesh("train()").ok().shown
    assert re.fullmatch(r"\[ranks 0-3\] -?[\d.]+", shown), shown


def test_model_in_ddp_with_a_group_of_its_own_is_wrapped_again(mortal: Notebook) -> None:
    """Torch restores only the default group. The optimizer of the new rank changes the parameters of its copy."""
    mortal.mesh(WRAPPED.replace("Linear(4, 1))", "Linear(4, 1), process_group=dist.new_group())")).ok()
    mortal.mesh("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    text = mortal.run("%mesh heal --copy-from 0").ok().stream()
    advice = re.search(
        r"model: copied without DistributedDataParallel; .*, wrap it again on all ranks.*:\n    (.*)", text
    )
    assert advice and "optimizer" in text and "not copied: model" not in text, text
    first = mortal.mesh(f"{advice[1]}\ntrain()").ok().shown
    assert re.fullmatch(r"\[ranks 0-3\] -?[\d.]+", first), first


APART = """import time
from torch.utils.data import DistributedSampler
sampler, mine, lossf = DistributedSampler(range(8), shuffle=False), rank, torch.nn.functional.mse_loss
def scaled(by):
    return lambda: by * world_size
scale = scaled(2)
def step():
    optimizer.zero_grad(); model(torch.ones(2, 4)).square().mean().backward()
    if rank == 1:
        open(f"{gate}.1", "w").close(); time.sleep(60)
    optimizer.step()
    open(f"{gate}.{rank}", "w").close()"""


def test_stop_tells_that_models_differ_and_a_copy_mends_it(mortal: Notebook, tmp_path: Path) -> None:
    mortal.mesh(WRAPPED).ok()
    gate = tmp_path / "gate"
    mortal.mesh(f"gate = {str(gate)!r}\n{APART}").ok()
    cell = mortal.send("%%mesh\nstep(); dist.barrier()")
    cell.until(lambda: all(Path(f"{gate}.{rank}").exists() for rank in range(4)))
    mortal.interrupt()
    cell.wait()
    repair = "%mesh heal mesh --copy-from 0 --all"
    assert f"ranks 0-3 differ in model, optimizer; if they should be equal, {repair} copies" in cell.text
    text = mortal.run(repair).ok().stream()
    assert re.search(r"copied from rank 0 to ranks 1-3: .*model, .*optimizer, .*sampler, .*scale", text), text
    assert re.search(r"ranks 0-3 differed in .*mine.*: ranks 1-3 may need (a value|values) of their own", text), text
    shown = mortal.mesh("train(); train(), list(sampler), scale(), lossf.__name__").ok().shown
    trained = re.findall(r"\[rank (\d)\] \((-?[\d.]+), \[(\d), \d\], 8, 'mse_loss'\)", shown)
    assert [(rank, first) for rank, _, first in trained] == [(str(rank), str(rank)) for rank in range(4)], shown
    assert len({value for _, value, _ in trained}) == 1, shown


TRAINERS = """import os, torch
from torch.nn.parallel import DistributedDataParallel as DDP
class Trainer(Actor):
    def __init__(self):
        self.model = DDP(torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
    def __getstate__(self):
        return self.model.module.state_dict(), self.optimizer.state_dict()
    def __setstate__(self, state):
        self.model.module.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])
    @endpoint
    def train(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).square().mean().backward()
        self.optimizer.step()
        return round(self.model.module.weight.sum().item(), 5)"""
COUNTERS = """import os
class Counter(Actor):
    @endpoint
    def pid(self): return os.getpid()"""


def test_actors_are_healed_with_the_state_of_another_rank(mortal: Notebook) -> None:
    """Also if their constructor wraps a model in DDP, which the other ranks do not do again."""
    mortal.mesh(TRAINERS, "spawn trainers").ok()
    mortal.mesh(COUNTERS, "spawn counters").ok()
    trained = "r = [trainers.train.call().get() for _ in range(3)][-1].values()\nlen({*r})"
    assert mortal.run(trained).ok().shown == "1"
    mortal.run("import os; os.kill(counters.pid.call().get().values()[1], 9)").ok()
    text = mortal.run("%mesh heal --copy-from 0").ok().stream()
    assert "actors trainers: recreated on rank 1, with the copied state\n" in text
    reason = "(Counter lacks state_dict and load_state_dict, or __getstate__ and __setstate__)"
    assert f"actors counters: recreated on rank 1; their state is lost {reason}\n" in text, text
    assert mortal.run(trained).ok().shown == "1"
    mortal.run("os.kill(counters.pid.call().get().values()[0], 9)").ok()
    text = mortal.run("%mesh heal").ok().stream()
    hint = "; %mesh heal mesh --copy-from peer copies that of another rank"
    assert f"actors trainers: recreated on rank 0; their state is lost{hint}\n" in text, text
    assert "actors trainers: state copied to rank 0\n" in mortal.run("%mesh heal mesh --copy-from peer").ok().stream()
    assert mortal.run(trained).ok().shown == "1"
    mortal.run("trainers.stop().get(); counters.stop().get()").ok()


APART_ACTORS = """import torch
from torch.nn.parallel import DistributedDataParallel
class Apart(Actor):
    def __init__(self):
        self.model = DistributedDataParallel(torch.nn.Embedding(5000, 8))
    def __getstate__(self): return self.model.module.state_dict()
    def __setstate__(self, state): self.model.module.load_state_dict(state)
    @endpoint
    def step(self, stops):
        import pathlib, torch.distributed as dist, time
        self.model(torch.tensor([4000])).sum().backward()
        with torch.no_grad():
            if dist.get_rank() or not stops:
                self.model.module.weight[4000] += 1
        if stops:
            pathlib.Path(f"{stops}.{dist.get_rank()}").touch()
            time.sleep(60)
        return round(self.model.module.weight.double().sum().item(), 6)"""


FAILING = """import torch
from torch.nn.parallel import DistributedDataParallel
class Failing(Actor):
    def __init__(self):
        self.model = DistributedDataParallel(torch.nn.Linear(4, 1))
    @endpoint
    def step(self, fails):
        import torch.distributed as dist
        self.model(torch.ones(2, 4)).sum().backward()
        if dist.get_rank() == fails: raise ValueError("a bad batch")
        with torch.no_grad(): self.model.module.weight += 1"""


def test_stop_of_actors_tells_that_their_models_differ(mortal: Notebook, tmp_path: Path) -> None:
    """Also if only few of many parameters do."""
    mortal.run("%mesh up m --procs 2").ok()
    mortal.mesh(APART_ACTORS, "spawn apart_actors").ok()
    gate = tmp_path / "gate"
    cell = mortal.send(f"apart_actors.step.call({str(gate)!r}).get()")
    cell.until(lambda: all(Path(f"{gate}.{rank}").exists() for rank in range(2)))
    mortal.interrupt()
    cell.wait()
    repair = "if they should be equal, %mesh heal m --copy-from 0 --all copies the state of rank 0 to the others"
    assert f"ranks 0-1 differ in actors apart_actors; {repair}" in cell.text
    assert (
        "actors apart_actors: state copied to rank 1\n" in mortal.run("%mesh heal m --copy-from 0 --all").ok().stream()
    )
    assert mortal.run("len({*apart_actors.step.call('').get().values()})").ok().shown == "1"


def test_failed_call_tells_that_models_of_actors_differ(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 2").ok()
    mortal.mesh(FAILING, "spawn failing").ok()
    text = mortal.run("failing.step.call(1).get()").text
    assert "ranks 0-1 differ in actors failing; if they should be equal, %mesh heal m --copy-from 0 --all" in text, text
    assert "differ" not in mortal.run("failing.step.call(5).get()").ok().text


SCHEDULED = """import threading, torch
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
weight = model.module.weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_pre_hook(lambda *_: seen.append(rank))
optimizer.own = torch.ones(3)
seen = []
weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
class Trainer:
    net = model
    def __init__(self): self.lock, self.optimizer = threading.Lock(), optimizer
trainer = Trainer()
def train(fails=None, net=model):
    net(torch.ones(2, 4) * (rank + 1)).sum().backward()
    trainer.optimizer.step()
    if rank == fails: raise ValueError("a bad batch")
    scheduler.step()
    optimizer.zero_grad()
    return round(weight.sum().item(), 5), optimizer.param_groups[0]["lr"]
train()"""


def test_error_tells_that_schedulers_differ_and_a_copy_mends_it(mortal: Notebook) -> None:
    """Also where functions, classes and objects have what was copied."""
    mortal.run("%mesh up m --procs 2").ok()
    mortal.mesh(SCHEDULED).ok()
    text = mortal.mesh("train(fails=1)").text
    assert re.search("ranks 0-1 differ in (optimizer, )?scheduler; if they should be equal", text), text
    for names in ("model", "model optimizer"):
        said = mortal.run(f"%mesh heal m --copy-from 0 --all {names}").ok().stream()
        assert "has it too, and is not copied; copy both together" in said, said
    text = mortal.run("%mesh heal m --copy-from 0 --all").ok().stream()
    assert "model, optimizer" in text and "not copied: trainer" in text, text
    kept = "Trainer.net is model, train.__defaults__[1] is model, trainer.optimizer is optimizer"
    hooks = "len(optimizer._optimizer_step_pre_hooks), len(weight._backward_hooks) * len(optimizer.own) // 3"
    assert mortal.mesh(f"weight is model.module.weight, {kept}, {hooks}").ok().shown == (
        "[ranks 0-1] (True, True, True, True, 1, 1)"
    )
    # Hooks have the variables of their rank.
    mortal.mesh("seen.clear()").ok()
    for _ in range(2):
        assert mortal.mesh("train()").ok().shown.startswith("[ranks 0-1] ")
    assert mortal.mesh("seen == [rank] * 2").ok().shown == "[ranks 0-1] True"


def test_new_rank_draws_what_others_draw_alike(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 3").ok()
    draw = "random.random(), torch.rand(1).item()"
    for seed, count in (("7", 1), ("rank", 3)):
        mortal.mesh(f"import random\nrandom.seed({seed}); torch.manual_seed({seed})\n{draw}").ok()
        mortal.mesh("import os; os._exit(3)", "[1]")
        mortal.run("%mesh heal --copy-from 0").ok()
        shown = mortal.mesh(draw).ok().shown
        assert len(shown.splitlines()) == count and shown.startswith("[rank"), shown


def test_copy_serves_definitions_that_need_variables(mortal: Notebook) -> None:
    """Defaults of functions are the variables that the rank has then, and classes have what their cell used."""
    mortal.run("%mesh up m --procs 2").ok()
    mortal.mesh("width, rates = 3, [0.1]").ok()
    mortal.mesh("import torch\nclass Net(torch.nn.Linear):\n    size = width").ok()
    mortal.mesh("net = Net(Net.size, 1)").ok()
    mortal.mesh("def same(default=net, rates=rates): return default is net and rates is globals()['rates']").ok()
    mortal.mesh("never = (i for i in [1])").ok()
    mortal.mesh("def broken(default=never): return default").ok()
    mortal.mesh("import os; os._exit(3)", "[1]")
    cell = mortal.run("%mesh heal --copy-from 0")
    assert "copied from rank 0 to rank 1: net, rates, width\n" in cell.text
    failed = "rank 1 was replaced, but the definitions of cell ["
    assert cell.status == "error" and cell.text.count(failed) == 1 and "NameError: name 'never'" in cell.text
    assert mortal.mesh("same(), type(net) is Net, Net.size").ok().shown == "[ranks 0-1] (True, True, 3)"


def test_copy_to_all_comes_from_a_rank_that_lacks_nothing(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 3").ok()
    mortal.mesh("kept = [rank]").ok()
    mortal.run("%mesh kill 0").ok()
    assert "copied from rank 1 to ranks 0,2: kept\n" in mortal.run("%mesh heal --copy-from peer --all").ok().stream()
    assert mortal.mesh("kept").ok().shown == "[ranks 0-2] [1]"


def test_heal_names_lists_and_generators_of_a_rank(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 3").ok()
    mortal.mesh(
        """import torch
files, config, pair = [f"part-{rank}"], {"seed": [rank]}, (1, rank)
same, alike = [1, [2.0]], {"a": torch.ones(2)}
generator = torch.Generator().manual_seed(1000 + rank)
rows = torch.zeros(40_000); rows[39_990:] = rank"""
    ).ok()
    mortal.run("%mesh kill 1").ok()
    text = mortal.run("%mesh heal --copy-from 0").ok().stream()
    assert "ranks 0,2 differ in config, files, generator, pair, rows: rank 1 may need values of its own\n" in text


def test_functions_that_fail_or_die_in_their_cell_are_restored(mortal: Notebook) -> None:
    assert mortal.mesh("def g(n):\n    return 1 / n\ng(0)").status == "error"
    dies = "import os\ndef f():\n    if rank == 1:\n        os.kill(os.getpid(), 9)\n    dist.barrier()"
    assert mortal.mesh(f"{dies}\nf()").status == "error"
    mortal.run("%mesh heal").ok()
    assert mortal.mesh("f.__name__ + g.__name__").ok().shown == "[ranks 0-3] 'fg'"


def test_named_function_is_not_copied_but_explained(mortal: Notebook) -> None:
    mortal.mesh("import os, signal\nx = 1").ok()
    mortal.mesh("exec('def made(): pass')", "[0]").ok()
    mortal.mesh("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    text = mortal.run("%mesh heal --copy-from 0 x made").ok().text
    assert (
        "copied from rank 0 to rank 1: x\n" in text
        and "not copied: made (a function defined in a cell; run that cell again)" in text
    )


def test_definitions_above_the_line_of_a_death_are_restored(mortal: Notebook) -> None:
    dies = "import os, signal\ndef above(): return 5\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    body = f"{dies}\ndef below(): pass"
    assert mortal.mesh(body).status == "error"
    mortal.run("%mesh heal").ok()
    assert mortal.mesh("above()", "[1]").ok().shown == "[rank 1] 5"
    assert "NameError" in mortal.mesh("below()", "[1]").text
