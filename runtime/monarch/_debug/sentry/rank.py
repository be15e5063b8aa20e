"""The watches of a rank: after each N-th step of an optimizer, fingerprints of its tensors go to the program."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary, ref

from monarch._actors.pausing.gate import gate
from monarch._core.digests.divergence import GRADIENT, PARAMETER, RANDOM, SHARD
from monarch._debug.sentry.controller import Sent, note, take
from monarch._meshes.context import context
from monarch._node.current import current_node, has_node
from monarch._node.services.asking import tell_proc
from monarch.exceptions import ArgumentError, MonarchError

_LOOK_S = 0.02
_GPU_S = 60.0
"""Seconds between two looks whether a GPU has computed the fingerprints, and until they are given up."""


class ModuleWatch:
    """Watches a module or an optimizer of this rank.

    Args:
        key: the key of the watch, the same on all ranks.
        name: the name of the value, for people.
        value: the module or optimizer.
        every: steps of the optimizer between two samples.
        count: the number of ranks that are compared.
    """

    def __init__(self, key: str, name: str, value: Any, every: int, count: int) -> None:
        import torch

        self.name = name
        self._key, self._every, self._count = key, every, count
        self._is_module = isinstance(value, torch.nn.Module)
        # A watch keeps nothing in memory.
        self._value = ref(value)
        # Written by the thread that trains.
        self._step = -1
        self._sent: list[tuple[str, str]] | None = None
        self._clock: Any = None
        """The optimizer whose steps are counted: the first one that changes the module."""
        self._knows: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        """Of optimizers, whether they change parameters of the module."""
        self._began_in_call = gate.in_call() and threading.current_thread() is not threading.main_thread()
        if self._is_module:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._hook: Any = register_optimizer_step_post_hook(self._stepped)
        else:
            self._hook = value.register_step_post_hook(self._stepped)

    def end(self) -> None:
        """Watch no more."""
        self._hook.remove()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        # The training continues, whatever happens here.
        try:
            if self._value() is None:
                self.end()
            elif self._counts(optimizer):
                self._step = self._step + 1 if self._step >= 0 else self._first_step(optimizer)
                if self._step >= 0 and self._step % self._every == 0:
                    self._take()
        except Exception as error:
            self.end()
            self._note(f"the watch of {self.name} has ended: {type(error).__name__}: {error}")

    def _counts(self, optimizer: Any) -> bool:
        if not self._is_module:
            return True
        known = self._knows.get(optimizer)
        if known is None:
            own = {id(each) for each in self._parameters()}
            known = any(id(each) in own for group in optimizer.param_groups for each in group["params"])
            self._knows[optimizer] = known
        if known and self._clock is None:
            self._clock = optimizer
        return known and optimizer is self._clock

    def _first_step(self, optimizer: Any) -> int:
        """Return the number of the step that has just ended, which must be the same on all ranks."""
        counts = [state["step"] for state in optimizer.state.values() if "step" in state]
        if counts:
            return int(counts[0])
        if self._began_in_call:
            kind = type(optimizer).__name__
            self.end()
            self._note(
                f"the watch of {self.name} has ended: {kind} does not count its steps, so running ranks cannot be "
                f"aligned; start the watch before the loop"
            )
            return -1
        return 1

    def _take(self) -> None:
        tensors = self._tensors()
        names = [name for name, _ in tensors]
        from monarch._tensors import fingerprints as prints

        on_cpu = all(each.device.type == "cpu" for _, each in tensors)
        marks = [prints.number_of(each) if on_cpu else prints.mark_of(each) for _, each in tensors]
        sums = [prints.size_sum(each) for _, each in tensors if each.is_floating_point() or each.is_complex()]
        floats = [at for at, (_, each) in enumerate(tensors) if each.is_floating_point() or each.is_complex()]
        states = _generators()
        names += [(RANDOM, name) for name, _ in states]
        if not on_cpu:
            self._send_later(names, marks, floats, sums, states)
            return
        strange: dict[int, str] = {}
        for at, value in zip(floats, _numbers(sums), strict=True):
            # Inf also stands for values beyond 1e19.
            what = prints.strangeness(tensors[at][1]) if value - value != 0 else ""
            if what:
                strange[at] = what
        self._send(self._step, names, [*marks, *(mark for _, mark in states)], strange)

    def _send_later(self, names: Any, marks: list[Any], floats: list[int], sums: list[Any], states: Any) -> None:
        """Send the fingerprints once the GPU has computed them; neither the code nor the GPU waits for that."""
        torch: Any = sys.modules["torch"]
        step, device = self._step, next(each.device for each in marks if each.device.type != "cpu")
        stacked = torch.stack([each.to(device) for each in marks]).to("cpu", non_blocking=True)
        sizes = torch.stack([each.to(device) for each in sums]).to("cpu", non_blocking=True) if sums else None
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        until = time.monotonic() + _GPU_S
        loop = current_node().receive_loop

        def look() -> None:
            if not done.query():
                if time.monotonic() < until:
                    loop.call_later(_LOOK_S, look)
                return
            values: list[float] = sizes.tolist() if sizes is not None else []
            strange = {at: "NaN" if v != v else "Inf" for at, v in zip(floats, values, strict=True) if v - v != 0}
            self._send(step, names, [*stacked.tolist(), *(mark for _, mark in states)], strange)

        loop.call_later(_LOOK_S, look)

    def _send(self, step: int, names: list[tuple[str, str]], marks: list[int], strange: dict[int, str]) -> None:
        node = current_node()
        sent = Sent(step, None if names == self._sent else names, marks, strange)
        self._sent = names
        tell_proc(node, node.root, take, node.proc, self._key, self.name, self._count, sent)

    def _parameters(self) -> list[Any]:
        value: Any = self._value()
        return list(value.parameters()) if self._is_module else [p for g in value.param_groups for p in g["params"]]

    def described(self) -> str:
        """Return what is watched, in a few words."""
        tensors = self._parameters()
        return f"{type(self._value()).__name__} with {sum(each.numel() for each in tensors):,} parameters"

    def _note(self, text: str) -> None:
        node = current_node()
        tell_proc(node, node.root, note, node.proc, text)

    def _tensors(self) -> list[tuple[tuple[str, str], Any]]:
        """Return the parameters and gradients with their kinds and names; of distributed tensors, the own part."""
        from monarch._tensors.fingerprints import local_part

        value: Any = self._value()
        if self._is_module:
            named = list(value.named_parameters())
        else:
            groups = value.param_groups
            named = [
                (f"param_groups[{number}]['params'][{at}]", each)
                for number, group in enumerate(groups)
                for at, each in enumerate(group["params"])
            ]
        found: list[tuple[tuple[str, str], Any]] = []
        for kind, tensors in (
            (PARAMETER, named),
            (GRADIENT, [(name, each.grad) for name, each in named if each.grad is not None]),
        ):
            for name, each in tensors:
                part, is_shard = local_part(each)
                if not part.is_sparse and part.device.type != "meta":
                    found.append((((SHARD if is_shard else kind), name), part))
        return found


def _numbers(scalars: list[Any]) -> list[Any]:
    torch: Any = sys.modules["torch"]
    return torch.stack(scalars).tolist() if scalars else []


def _generators() -> list[tuple[str, int]]:
    """Return the fingerprints of the states of the random number generators."""
    import torch

    states = [("torch's random generator", torch.get_rng_state().numpy().tobytes())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(("CUDA's random generator", torch.cuda.get_rng_state().numpy().tobytes()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        states.append(("numpy's random generator", keys.tobytes() + repr(rest).encode()))
    # Hashes of numbers are the same in all processes.
    own = ("Python's random module", hash(random.getstate()))
    return [own, *((name, int.from_bytes(hashlib.sha256(data).digest()[:8], "little")) for name, data in states)]


_watches: dict[str, ModuleWatch] = {}
"""Of this process, by key. Single dict operations, by the threads that begin and end watches."""


_begun: dict[str, int] = {}
"""How often ``watch`` was called for a name, which makes the keys of ranks equal; by the thread that trains."""


def begin(key: str, name: str, value: Any, every: int, count: int) -> str:
    """Begin a watch, in place of an earlier one of the same name; return what is watched, in a few words.

    Raises:
        ArgumentError: the value is neither a module nor an optimizer.
    """
    torch = sys.modules.get("torch")
    kinds = (torch.nn.Module, torch.optim.Optimizer) if torch is not None else ()
    if not isinstance(value, kinds):
        raise ArgumentError(f"{name}: expected a torch module or optimizer, got {type(value).__name__}")
    if every < 1:
        raise ArgumentError(f"every: expected at least 1 step, got {every}")
    for each in [each for each, watch in list(_watches.items()) if watch.name == name]:
        finish(each)
    watch = _watches[key] = ModuleWatch(key, name, value, every, count)
    return watch.described()


def finish(key: str) -> bool:
    """End a watch; return whether there was one."""
    watch = _watches.pop(key, None)
    if watch is not None:
        watch.end()
    return watch is not None


def watch(value: Any, every: int = 10, name: str = "") -> None:
    """Watch a module or optimizer for ranks that diverge, and for NaN and Inf; in code that runs on ranks.

    After each N-th step of its optimizer, fingerprints of parameters, gradients and states of random number generators
    go to the program, which names the first step, tensor and ranks that differ, once: in a notebook under the running
    cell, elsewhere on stderr, and as an event of the mesh. All ranks of the actor call it, with the same arguments. A
    second call for the same name takes the place of the first.

    Args:
        value: a ``torch.nn.Module`` or ``torch.optim.Optimizer``.
        every: steps between two comparisons.
        name: for the report; the class by default.

    Raises:
        ArgumentError: an argument is wrong.
        MonarchError: no mesh runs this code.
    """
    if not has_node() or current_node().config is None:
        raise MonarchError("watch() compares the ranks of a mesh; call it in a cell or endpoint that runs on them")
    called, extent = name or type(value).__name__, context().actor_instance.rank.extent
    _begun[called] = _begun.get(called, 0) + 1
    begin(f"{extent}-{called}-{_begun[called]}", called, value, every, extent.nelements)
