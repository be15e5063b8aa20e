"""The state of a rank: its shards of tensors by reference, why others have no value, and the entries that wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from monarch._actors.actor import Actor
from monarch._core.shapes.region import Region
from monarch._engine.attention_rules import register_attention
from monarch._engine.issuing.encoding import Entry, Fill, Template
from monarch._engine.issuing.failures import OpFailure
from monarch._engine.rank.devices.meshes import RankMeshes
from monarch._engine.rank.executing.quiet import hide_advice
from monarch._engine.rank.operations.lending import lent
from monarch._engine.rank.operations.moving import exports, on_death
from monarch._engine.rank.recovery.progress import progress, tell_there
from monarch._node.current import current_node


class CachedTemplate(NamedTuple):
    """A template, ready to run."""

    template: Template
    fill: Fill
    op: Any
    kind: str
    """Type of the device on which its op makes tensors."""


class RankTensors(Actor):
    """Holds this rank's shards of all distributed tensors of its mesh. Used by the thread of the actor only."""

    def __init__(self) -> None:
        register_attention()
        hide_advice()
        self.rank = current_node().rank
        self.values: dict[int, Any] = {}
        """DTensors and plain tensors by reference. Any thread may read how many there are."""
        self.failed: dict[int, OpFailure] = {}
        """Failures by reference of the tensor that has no value."""
        self.new_failures: dict[int, OpFailure] = {}
        """Those since the last recovery."""
        self.templates: dict[tuple[Region, int], CachedTemplate] = {}
        exports.failed = lent.failed = self.failed
        self.meshes = RankMeshes()
        self.is_new = True
        """Whether it has begun after the others, in the place of one that has ended, and lacks their tensors."""
        self._halted = True
        self.kept: list[tuple[Region, Entry]] = []
        """Entries that wait for the end of the halt."""
        current_node().events.died.subscribe(on_death)

    def monarch_of_program(self) -> int:
        """Return how many tensors only the program can name; from any thread. See reattach.py."""
        return len(self.values)

    @property
    def halted(self) -> bool:
        """Whether ops wait until the program has told what has failed."""
        return self._halted

    @halted.setter
    def halted(self, halted: bool) -> None:
        if halted != self._halted:
            self._halted = progress.halted = halted
            if halted:
                tell_there()
            exports.halt(halted)
            lent.halt(halted)

    def fail(self, number: int, failure: OpFailure, is_known: bool = False) -> None:
        """Note that a tensor has no value.

        Args:
            number: its reference.
            failure: why.
            is_known: whether all ranks find that by themselves.
        """
        if number and number not in self.failed:
            self.failed[number] = failure
            if not is_known:
                self.new_failures[number] = failure
            exports.fail(number, failure)
            self.values.pop(number, None)

    def failure_for(self, numbers: Iterable[int]) -> OpFailure | None:
        """Return why one of some tensors has no value; None if all have one."""
        if not self.failed:
            return None
        return next((self.failed[number] for number in numbers if number in self.failed), None)
