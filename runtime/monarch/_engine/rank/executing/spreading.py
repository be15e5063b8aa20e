"""Failures that spread on a rank: what is made or changed from a tensor without a value has none either."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import memory_id, returns_view
from monarch._engine.issuing.encoding import CALL, NEW, Entry
from monarch._engine.issuing.failures import OpFailure
from monarch._engine.rank.executing.state import RankTensors
from monarch._engine.rank.operations.checkpoints import LOAD
from monarch._engine.rank.operations.moving import SEND, exports, takers_of


class SpreadsFailures(RankTensors):
    """A rank that fails what depends on failed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._views: dict[int, int] = {}
        """While failures spread: views that kept ops will make, and of what."""

    def spread_failures(self) -> None:
        """Fail what kept ops would make or change from failed tensors, and keep the others."""
        left: list[tuple[Region, Entry]] = []
        self._views = {}
        for region, entry in self.kept:
            if isinstance(entry, int) or entry[0] in (NEW, "put", CALL):
                left.append((region, entry))
                continue
            failure = self.failure_before(region, entry)
            if failure is None:
                left.append((region, entry))
                # A new rank may get an op before its template; the healing drops it.
                known = self.templates.get((region, entry[0]))
                if known is not None and entry[1] and (known.template.kind == "same" or returns_view(known.op)):
                    self._views.update({each: entry[1][0] for each in entry[3] if each})
            else:
                self.fail_op(region, entry, failure)
        self.kept, self._views = left, {}

    def failure_before(self, region: Region, entry: Any) -> OpFailure | None:
        """Return why an op cannot run: a tensor that it needs has failed."""
        number, inputs, _, outputs, _ = entry
        if not self.failed:
            return None
        known = self.templates.get((region, number))
        if known is not None and known.template.kind == LOAD:
            return None
        return self.failure_for(inputs) or self.failure_for(outputs)

    def fail_op(self, region: Region, entry: Any, failure: OpFailure, is_known: bool = False) -> None:
        """Note that an op cannot run: what it makes or changes has no value."""
        number, inputs, _, outputs, _ = entry
        known = self.templates.get((region, number))
        if known is not None and known.template.kind == SEND:
            # The program may drop it before others ask for it.
            exports.refuse(outputs[0], failure, takers_of(known.template))
        for each in outputs:
            self.fail(each, failure, is_known)
        for index in known.template.writes if known is not None else range(len(inputs)):
            for each in self._sharing(inputs[index]):
                self.fail(each, failure, is_known)

    def _sharing(self, number: int) -> list[int]:
        """Return the references of plain tensors that share memory with one, and its own."""
        root = self._base_of(number)
        value = self.values.get(root)
        if value is None or isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
            return [number]
        memory = memory_id(value)
        found = {
            at
            for at, each in self.values.items()
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor) and memory_id(each) == memory
        }
        return [number, *found, *(each for each in self._views if self._base_of(each) in found)]

    def _base_of(self, number: int) -> int:
        while number in self._views:
            number = self._views[number]
        return number
