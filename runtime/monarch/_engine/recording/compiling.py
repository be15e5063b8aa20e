"""``monarch.compile``: a step that is recorded, and from then on is one message for each call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from monarch._engine import wiring
from monarch._engine.dtensor_compat import tree_flatten, tree_map
from monarch._engine.issuing.observer import current
from monarch._engine.recording.captured import CapturedValues, is_plain
from monarch._engine.recording.guards import differences
from monarch._engine.recording.recorder import Recorder
from monarch._engine.recording.recording import Recording, Surroundings, creates_state
from monarch._engine.recording.reports import Cost, Graph, cost_of, graph_of
from monarch._engine.recording.tape import Number, OtherWayError
from monarch._engine.simulation.current import current as simulated
from monarch._engine.tensors.tensor import Tensor
from monarch.exceptions import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
_MOST = 8
"""Recordings for arguments of the same shapes."""

wiring.wire()


def compile(function: Callable[P, R], backend: str = "eager") -> Compiled[P, R]:
    """Return a function that is recorded once for each combination of shapes, and sent as one message afterwards.

    The first call runs as it would without recording. The ranks turn its ops into a graph of ops on their shards and
    collectives. A later call sends only the references of its tensors. Tensors that the function changes in place, such
    as parameters, the state of optimizers and buffers, are changed in each call; random numbers are new in each call. A
    function with a step count in Python, such as that of AdamW, is recorded in its second and third call.

    Python in the function runs only while it is recorded. Its results are detached from autograd: call
    ``backward()`` in the function.

    Args:
        function: a step, such as forward, backward and ``optimizer.step()``. It returns distributed tensors, in lists,
            tuples and dicts.
        backend: ``"eager"`` runs the graph op by op, ``"inductor"`` compiles the ops between collectives.

    Raises:
        ArgumentError: the backend is not known. Calls raise it if the function looks at a value, or depends on
            something that cannot be repeated; the error names the line.
    """
    if backend not in ("eager", "inductor"):
        raise ArgumentError(f'backend: expected "eager" or "inductor", got {backend!r}')
    if not callable(function):
        raise ArgumentError(f"compile: expected a function, got {function!r}")
    return Compiled(function, backend)


class Compiled(Generic[P, R]):
    """A function that is recorded; see ``monarch.compile``. Called by one thread at a time.

    Args:
        function: to record.
        backend: "eager" or "inductor".
    """

    def __init__(self, function: Callable[P, R], backend: str) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.backend = backend
        self._name = getattr(function, "__name__", type(function).__name__)
        self._recordings: dict[Any, list[Recording]] = {}
        """By arguments; the one that was used last is first."""
        self._unproven: dict[Any, Recording] = {}
        self._last: Recording | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step: recorded if arguments of these shapes have been before, else op by op while it is recorded."""
        if current.observer is not None or simulated.simulation is not None:
            # Within another step that is being recorded, or on shapes only.
            return self.function(*args, **kwargs)
        if all(each.__class__ is Tensor for each in args) and not kwargs:
            tensors: list[Any] = list(args)
            rest: Any = None
            objects: list[Any] = []
        else:
            tensors, rest, objects = self._tensors(args, kwargs)
        key = self._key(tensors, rest)
        found = self._recordings.get(key)
        if found is not None:
            for recording in found:
                places = recording.inputs_now()
                if places is None:
                    continue
                try:
                    result = recording.replay(tensors, places)
                except OtherWayError:
                    continue
                self._last = recording
                if found[0] is not recording:
                    found.remove(recording)
                    found.insert(0, recording)
                return result
        return self._record(key, tensors, objects, args, kwargs)

    def _tensors(self, args: Any, kwargs: Any) -> tuple[list[Tensor], Any, list[Any]]:
        """Return the tensors among the arguments, a key of all others, and those that can change."""
        leaves, tree = tree_flatten((args, kwargs))
        tensors: list[Tensor] = []
        objects: list[Any] = []
        rest: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                rest.append(Tensor)
            elif hasattr(leaf, "monarch_ref"):
                raise ArgumentError(
                    f"{self._name}: an argument is a rank-local tensor; recorded steps take distributed "
                    f"tensors; convert it with monarch.from_local(tensor, mesh, spec)"
                )
            elif isinstance(leaf, torch.Tensor):
                raise ArgumentError(
                    f"{self._name}: an argument is a plain tensor of shape {tuple(leaf.shape)}; distribute "
                    f"it first, as in monarch.distribute(tensor, mesh, spec)"
                )
            elif type(leaf) in (float, complex):
                # 0.0 and -0.0 are equal, and differ.
                rest.append((type(leaf), repr(leaf)))
            elif is_plain(leaf):
                rest.append((type(leaf), leaf))
            else:
                # A recording keeps the object, so that no other one gets its id.
                rest.append((type(leaf), id(leaf)))
                objects.append(leaf)
        return tensors, (tuple(rest), tree), objects

    def _key(self, tensors: list[Tensor], rest: Any) -> Any:
        references = [each.monarch_ref.number for each in tensors]
        return (
            tuple([each.monarch_layout for each in tensors]),
            tuple([each.requires_grad for each in tensors]),
            tuple([references.index(each) for each in references]),
            rest,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
        )

    def _record(self, key: Any, tensors: list[Tensor], objects: list[Any], args: Any, kwargs: Any) -> Any:
        try:
            known = self._recordings.setdefault(key, [])
        except TypeError:
            raise ArgumentError(
                f"{self._name}: an argument is a set or a bytearray; pass a frozenset or bytes"
            ) from None
        if len(known) >= _MOST:
            changed = differences(known[0].captured)
            what = f"{changed[0]} has different values" if changed else "a value that it uses changes"
            raise ArgumentError(
                f"{self._name} was recorded {_MOST} times for arguments of the same shapes, because {what} in each "
                f"call. Pass the value that changes as a distributed tensor."
            )
        if any(each.requires_grad for each in tensors):
            raise ArgumentError(
                f"{self._name}: an argument requires grad; pass tensor.detach(), and create the leaf in the function"
            )
        before = CapturedValues(self.function, objects)
        recorder = Recorder(self._name)
        if not current.start(recorder):
            raise ArgumentError(f"{self._name}: another thread is recording a step; call it again afterwards")
        try:
            result = self._run(recorder, before, args, kwargs)
        except TypeError as error:
            # Operators of torch replace an error in one of them by this one.
            if recorder.refusal is None or isinstance(error, ArgumentError):
                raise
            raise ArgumentError(recorder.refusal) from None
        finally:
            current.stop()
        result = tree_map(_detached, result)
        if recorder.refusal is not None:
            raise ArgumentError(recorder.refusal)
        if recorder.stream is None:
            raise ArgumentError(f"{self._name} runs no op on distributed tensors, so there is nothing to record")
        around = Surroundings(before, CapturedValues(self.function, objects))
        if not creates_state(around):
            self._keep(key, known, Recording(recorder, around, tensors, result, self.backend))
        return result

    def _keep(self, key: Any, known: list[Recording], recording: Recording) -> None:
        if recording.needs_proof:
            first = self._unproven.get(key)
            self._unproven[key] = recording
            if first is None:
                return
            reason = first.differs(recording)
            if reason is not None:
                if first.inputs_now() is None:
                    return
                raise ArgumentError(f"{self._name} cannot be recorded: {reason}")
            del self._unproven[key]
        mesh = recording.mesh
        recording.prepare(mesh.recovery.ask, mesh.actors)
        known.insert(0, recording)
        self._last = recording

    def _run(self, recorder: Recorder, before: CapturedValues, args: Any, kwargs: Any) -> Any:
        """Call the function with learning rates that note what is done with them."""
        rates: list[tuple[Any, Number, float]] = []
        try:
            for place, value in before.rates:
                holder = recorder.tape.bind(place.holder)
                number = recorder.tape.number(value, f"{holder}[{place.key!r}]")
                place.set(number)
                rates.append((place, number, value))
            function: Any = self.function
            with recorder:
                return function(*args, **kwargs)
        finally:
            for place, number, value in rates:
                now = place.get()
                place.set(value if now is number else float(now))
                if now is not number and recorder.refusal is None:
                    recorder.refusal = (
                        f"{self._name} cannot be recorded: the step changes {place.text}, and later calls would not "
                        f"repeat that. Call the scheduler after the step."
                    )

    def graph(self) -> Graph:
        """Return the graph of the recording that was used last, of the first rank.

        Raises:
            ArgumentError: nothing was recorded yet.
        """
        recording = self._recorded()
        mesh = recording.mesh
        return graph_of(self._name, mesh, recording.uid)

    def cost(self) -> Cost:
        """Return FLOPs and bytes of each op and collective, of the first rank.

        Raises:
            ArgumentError: nothing was recorded yet.
        """
        recording = self._recorded()
        return cost_of(self._name, recording.mesh, recording.uid)

    def _recorded(self) -> Recording:
        if self._last is None:
            raise ArgumentError(f"{self._name} has no recording yet; call it first (three times if it uses AdamW)")
        return self._last

    def __repr__(self) -> str:
        count = sum(len(each) for each in self._recordings.values())
        return f"<recorded step {self._name}: {count} recordings, {self.backend}>"


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value
