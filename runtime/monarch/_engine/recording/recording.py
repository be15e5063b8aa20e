"""One recorded call of a step, ready to be repeated."""

from __future__ import annotations

import gc
import weakref
from itertools import count
from typing import Any, NamedTuple

import torch

from monarch._engine.dtensor_compat import schema_of, tree_flatten, tree_unflatten
from monarch._engine.issuing.encoding import Template, find_op
from monarch._engine.issuing.lines import lines
from monarch._engine.issuing.seeds import new_seed
from monarch._engine.issuing.stream import OpStream, Ref
from monarch._engine.layouts.layout import Layout
from monarch._engine.rank.programs.program import RecordedOp, RecordedProgram, Slot
from monarch._engine.rank.programs.replaying import PREPARE, REPLAY, describe
from monarch._engine.recording.captured import CapturedValues
from monarch._engine.recording.guards import check_of
from monarch._engine.recording.places import ValuePlace
from monarch._engine.recording.recorder import Issued, Named, Recorder
from monarch._engine.recording.tape import OtherWayError
from monarch._engine.tensors.tensor import Tensor
from monarch.exceptions import ArgumentError

_uids = count(1)
_BOOKKEEPING = {"_step_count", "_opt_called"}


class _Result(NamedTuple):
    """Where a tensor that the program sees after a call comes from.

    Attributes:
        kind: "output", "input", "argument" or "constant".
        at: index of an output, an input or an argument.
        value: a constant.
    """

    kind: str
    at: int
    value: Any = None


class Surroundings(NamedTuple):
    """The values that a step uses, before and after a call.

    Attributes:
        before: the call.
        after: the call.
    """

    before: CapturedValues
    after: CapturedValues


class Recording:
    """A recorded call.

    Args:
        recorder: that has watched it.
        around: what it uses besides arguments.
        args: tensors among its arguments.
        result: what it returned, detached.
        backend: "eager" or "inductor".
    """

    def __init__(self, recorder: Recorder, around: Surroundings, args: list[Tensor], result: Any, backend: str) -> None:
        self.recorder = recorder
        self.captured = around.before
        stream = recorder.stream
        assert stream is not None
        self.stream: OpStream = stream
        self.numbers_of_args = [each.monarch_ref.number for each in args]
        self.ops = recorder.ops
        self.mesh: Any = recorder.mesh
        """Of its tensors: a TensorMesh."""
        moves = _moves(recorder, around)
        leaves, self._tree = tree_flatten(result)
        self.uid = next(_uids)
        self._layouts: list[Layout] = []
        self._produced = self._made_by_ops()
        self._outputs: dict[int, int] = {}
        self._externals()
        self._leaves = [self._result(leaf, "its result") for leaf in leaves]
        self._moves = [(place, self._result(value, place.text)) for place, value in moves]
        _refuse_other_changes(recorder, around)
        self._check_alive(leaves)
        named = _numbers(self.ops)
        self._numbers = recorder.tape.function(list(named))
        self.needs_proof = any(".item()" in line for line in recorder.tape.lines)
        """Whether another recording must show that no number is lost."""
        self._refuse_outer_graph(around)
        self._check, places = check_of(around.before, set(self.inputs), recorder.values.constants())
        self._sources = self._order(places)
        self._doubles = [(at, self.inputs.index(number)) for at, number in enumerate(places)]
        """Places, and the inputs that they must hold."""
        self._kept = [recorder.constants[each] for each in self.inputs if each in recorder.constants]
        self._template = stream.template(self._as_template(named, backend))
        weakref.finalize(self, _forget, stream, self._template, self.uid)
        del self.recorder

    def _made_by_ops(self) -> set[int]:
        return {number for op in self.ops for number in op.outputs if number}

    def _externals(self) -> None:
        """Find the tensors that the step takes."""
        self.inputs: list[int] = []
        known: set[int] = set()
        for op in self.ops:
            for number in op.inputs:
                if number not in known and number not in self._produced:
                    known.add(number)
                    self.inputs.append(number)
            known.update(op.outputs)

    def _result(self, value: Any, what: str) -> _Result:
        if not isinstance(value, Tensor):
            if isinstance(value, torch.Tensor) and id(value) in self.recorder.values.moving:
                self.recorder.refuse(f"{what} is a plain tensor that differs from call to call")
            return _Result("constant", 0, value)
        number = value.monarch_ref.number
        if number in self._produced:
            at = self._outputs.get(number)
            if at is None:
                at = self._outputs[number] = len(self._layouts)
                self._layouts.append(value.monarch_layout)
            return _Result("output", at)
        if number in self.numbers_of_args:
            return _Result("argument", self.numbers_of_args.index(number))
        return _Result("constant", 0, value)

    def _check_alive(self, leaves: list[Any]) -> None:
        """Refuse tensors that the program still has, and that later calls would not renew."""
        for collect in (False, True):
            if collect:
                gc.collect()
            left = [each for each in self._produced if each in self.stream.live and each not in self._outputs]
            if not left:
                return
        op = next(op for op in self.ops if left[0] in op.outputs)
        self.recorder.refuse(
            f"the program keeps a tensor that the step makes at {lines[op.line]}\nLater calls would not update it. "
            f"Return it, or keep its value only after the call."
        )

    def _refuse_outer_graph(self, around: Surroundings) -> None:
        for place, value in around.before.tensors:
            if isinstance(value, Tensor) and value.grad_fn is not None and value.monarch_ref.number in self.inputs:
                self.recorder.refuse(
                    f"autograd has computed {place.text} outside the step; use {place.text}.detach(), or compute it "
                    f"in the step"
                )

    def _order(self, places: tuple[int, ...]) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for number in self.inputs:
            if number in self.numbers_of_args:
                found.append(("argument", self.numbers_of_args.index(number)))
            elif number in places:
                found.append(("place", places.index(number)))
            elif number in self.recorder.constants:
                found.append(("held", number))
            else:
                op = next(op for op in self.ops if number in op.inputs)
                shape = tuple(self.stream.live[number].shape) if number in self.stream.live else ()
                self.recorder.refuse(
                    f"it uses a tensor of shape {shape} that is not in its arguments, closure or globals, "
                    f"at {lines[op.line]}\nPass the tensor as an argument."
                )
        return found

    def _as_template(self, named: dict[str, Any], backend: str) -> Template:
        recorder = self.recorder
        slots: dict[int, int] = {number: at for at, number in enumerate(self.inputs)}
        for op in self.ops:
            for number in op.outputs:
                if number:
                    slots[number] = len(slots)
        used = sorted({op.template for op in self.ops})
        index = {number: at for at, number in enumerate(used)}
        order = list(named)
        steps = tuple(
            RecordedOp(
                index[op.template],
                tuple(slots[each] for each in op.inputs),
                tuple(Slot(order.index(each.name)) if isinstance(each, Named) else each for each in op.values),
                tuple(slots[each] if each else -1 for each in op.outputs),
                op.line,
                op.is_random,
            )
            for op in self.ops
        )
        program = RecordedProgram(
            self.uid,
            recorder.name,
            backend,
            tuple(self.stream.templates[each] for each in used),
            steps,
            len(self.inputs),
            tuple(named.values()),
            tuple(slots[number] for number in self._outputs),
            {op.line: str(lines[op.line]) for op in self.ops},
        )
        return Template(REPLAY, (), (program,), {}, tuple(self._written()))

    def _written(self) -> list[int]:
        """Return the inputs that the step may change, also by views of them."""
        roots: dict[int, int] = {number: at for at, number in enumerate(self.inputs)}
        found: set[int] = set()
        for op in self.ops:
            template = self.stream.templates[op.template]
            for index in template.writes:
                if op.inputs[index] in roots:
                    found.add(roots[op.inputs[index]])
            aliases = template.kind == "redistribute" or (
                bool(template.op)
                and any(each.alias_info is not None for each in schema_of(find_op(template.op)).returns)
            )
            if aliases and op.inputs and op.inputs[0] in roots:
                for number in op.outputs:
                    if number:
                        roots[number] = roots[op.inputs[0]]
        return sorted(found)

    def prepare(self, ask: Any, actors: Any) -> None:
        """Let the ranks make the graph, now.

        Raises:
            ArgumentError: they cannot.
            TensorError: a tensor that the step uses has no value.
        """
        self.stream.issue(self._template, tuple(self.inputs), (PREPARE,), (), lines.here())

        def send() -> Any:
            future = actors.execute.call(describe, (self.uid,), {})
            future.rename("the graph of a recorded step")
            return future.get()

        for rank, report in enumerate(ask(send).values()):
            if report.value is None:
                # Nobody has the number -1: the ranks tell only whether a tensor has no value.
                ask(lambda: actors.fetch.call(list(self.inputs), -1).get())
                raise ArgumentError(f"the recorded step has no graph on rank {rank}")
            if isinstance(report.value, str):
                raise ArgumentError(f"the recorded step cannot become a graph on rank {rank}: {report.value}")

    def inputs_now(self) -> tuple[int, ...] | None:
        """Return references of captured tensors; None if something is not as it was."""
        try:
            return self._check()
        except (AttributeError, IndexError, TypeError, ValueError):
            return None

    def replay(self, args: list[Tensor], places: tuple[int, ...]) -> Any:
        """Issue the step as one op; return what the function would.

        Args:
            args: tensors among the arguments.
            places: what ``inputs_now`` has returned.

        Raises:
            OtherWayError: a comparison of numbers comes out differently.
        """
        stream = self.stream
        inputs = tuple(
            [
                args[at].monarch_ref.number if kind == "argument" else places[at] if kind == "place" else at
                for kind, at in self._sources
            ]
        )
        if len(set(inputs)) != len(inputs) or any(places[at] != inputs[slot] for at, slot in self._doubles):
            raise OtherWayError
        values = self._numbers(new_seed)
        made = [Ref(stream, layout) for layout in self._layouts]
        stream.issue(self._template, inputs, values, tuple([each.number for each in made]), lines.here())
        stream.flush()
        tensors = [Tensor(ref, layout) for ref, layout in zip(made, self._layouts, strict=True)]
        for place, source in self._moves:
            place.set(_value(source, tensors, args))
        return tree_unflatten([_value(each, tensors, args) for each in self._leaves], self._tree)

    def differs(self, other: Recording) -> str | None:
        """Return why another recording of the same step has other ops; None if it has the same."""
        if len(self.ops) != len(other.ops):
            return "the number of its ops differs from call to call"
        for first, second in zip(self.ops, other.ops, strict=True):
            if first.template != second.template or first.line != second.line:
                return f"its ops differ from call to call from {lines[second.line]}"
            for one, two in zip(first.values, second.values, strict=True):
                if not isinstance(one, Named) and not isinstance(two, Named) and one != two:
                    return (
                        f"a number differs from call to call ({one!r}, then {two!r}), and it cannot be computed "
                        f"again, at {lines[second.line]}"
                    )
        return None


def _value(source: _Result, tensors: list[Tensor], args: list[Tensor]) -> Any:
    if source.kind == "output":
        return tensors[source.at]
    return args[source.at] if source.kind == "argument" else source.value


def _numbers(ops: list[Issued]) -> dict[str, Any]:
    """Return the numbers that are new in each call, with examples, in the order of their places."""
    return {each.name: each.example for op in ops for each in op.values if isinstance(each, Named)}


def creates_state(around: Surroundings) -> bool:
    """Return whether a call has made the state of an optimizer, so that only later ones are alike."""
    return any(text.endswith((".state", ".state[...]")) for text in _grown(around))


def _grown(around: Surroundings) -> list[str]:
    before = {id(container): size for container, size, _ in around.before.sizes}
    return [text for container, size, text in around.after.sizes if before.get(id(container), size) != size]


def _moves(recorder: Recorder, around: Surroundings) -> list[tuple[ValuePlace, Any]]:
    """Return the places that have another tensor after the step."""
    found: list[tuple[ValuePlace, Any]] = []
    pairs = ((around.before.tensors, around.after.tensors), (around.before.grads, around.after.grads))
    for before, _ in pairs:
        for place, value in before:
            now = place.get()
            if now is value:
                continue
            if isinstance(now, Tensor) or (now is None and place.key == "grad"):
                found.append((place, now))
            else:
                recorder.refuse(f"the step changes {place.text} in Python, which later calls would not repeat")
    return found


def _refuse_other_changes(recorder: Recorder, around: Surroundings) -> None:
    recorder.values.refuse_reads()
    other = recorder.draws.other_use(around.before)
    if other is not None:
        recorder.refuse(f"{other}Later calls would not repeat that. Draw it outside, and pass it as an argument.")
    before = around.before
    if before.iterators:
        recorder.refuse(
            f"it uses the iterator {before.iterators[0]!r}, from which later calls would take nothing. Pass the items "
            f"as arguments."
        )
    if before.large:
        recorder.refuse(
            f"it uses the array {before.large[0]!r}, which is too large to compare in each call. "
            f"Distribute it outside, and pass it as an argument."
        )
    if not before.is_whole:
        recorder.refuse("it uses too many objects to check. Use fewer, for example in a smaller closure.")
    changed = _grown(around)
    changed += [text for array, known, text in before.arrays if array.tobytes() != known]
    changed += [place.text for place, value in before.objects if place.get() is not value]
    changed += [
        place.text for place, value in around.before.plain if place.key not in _BOOKKEEPING and _changed(place, value)
    ]
    if changed:
        recorder.refuse(
            f"the step changes {changed[0]} in Python, and later calls would not repeat that. Change it after the call."
        )


def _changed(place: ValuePlace, value: Any) -> bool:
    now = place.get()
    return now is not value and (type(now) is not type(value) or now != value)


def _forget(stream: OpStream, template: int, uid: int) -> None:
    """Let the ranks forget a recording. Runs in any thread, so it only appends."""
    stream.retire(template, Template("forget", (), (), {}), (uid,))
