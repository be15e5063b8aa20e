"""Fingerprints of the tensors of ranks, compared: the first step and tensor that differ among ranks, or hold NaN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from monarch._core.shapes.ranks import describe_ranks

PARAMETER, GRADIENT, RANDOM, SHARD = "parameter", "gradient", "state", "shard"
"""Kinds of tensors. States of random number generators may differ on purpose: they are compared only if they were equal
at the first step. Shards of distributed tensors are not compared."""
DIFFERS, STRANGE = "differs", "strange"
_PENDING = 64
"""Steps that wait for the fingerprints of more ranks."""


class Sample(NamedTuple):
    """The fingerprints of a rank after a step of its optimizer."""

    step: int
    names: Sequence[tuple[str, str]]
    """Kind and name of each tensor, in order."""
    marks: Sequence[int]
    """The fingerprint of each."""
    strange: Mapping[int, str]
    """Tensors with ``NaN`` or ``Inf``, by their position."""


class Divergence(NamedTuple):
    """A finding; each kind is reported once."""

    kind: str
    """``differs`` or ``strange``."""
    watch: str
    """The name of the watched value."""
    step: int
    tensor: str
    """The first one, as in ``gradient of layer.weight``."""
    ranks: list[int]
    """Those that differ from most others, or that have NaN or Inf."""
    text: str

    def __str__(self) -> str:
        return f"{self.watch}: {self.text}"


class Sentry:
    """Compares the samples of the ranks that are expected to be equal. For one thread at a time.

    Args:
        watch: the name of the watched value.
        count: the number of ranks.
    """

    def __init__(self, watch: str, count: int) -> None:
        self.watch = watch
        self.count = count
        self.last = 0
        """The last step that was compared."""
        self.compared = 0
        """How many were compared."""
        self.found: list[Divergence] = []
        self._told: set[str] = set()
        """Kinds of findings that are not reported again."""
        self._pending: dict[int, dict[int, Sample]] = {}
        self._random_state: set[str] | None = None
        """States of generators that were equal at the first step; None before it."""

    def take(self, rank: int, sample: Sample) -> list[Divergence]:
        """Take the sample of a rank; return what is found when those of all ranks are there."""
        samples = self._pending.setdefault(sample.step, {})
        samples[rank] = sample
        if len(samples) < self.count:
            while len(self._pending) > _PENDING:
                del self._pending[min(self._pending)]
            return []
        del self._pending[sample.step]
        return self._compare(sample.step, samples)

    def overdue(self) -> list[Divergence]:
        """Return NaN and Inf in steps that not all ranks have reached, since NaN may be what stops the others."""
        found: list[Divergence] = []
        for step, samples in sorted(self._pending.items()):
            found += self._strange(step, samples)
            self._note(found)
        return found

    def _note(self, found: list[Divergence]) -> None:
        self.found += found
        self._told |= {each.kind for each in found}

    def _compare(self, step: int, samples: dict[int, Sample]) -> list[Divergence]:
        found = self._strange(step, samples)
        differing = self._differing(step, samples)
        if any(sample.strange for sample in samples.values()):
            # NaN on some ranks is why they differ.
            self._told |= {each.kind for each in differing}
        else:
            found += differing
        self._note(found)
        self.last = step
        self.compared += 1
        return found

    def _strange(self, step: int, samples: dict[int, Sample]) -> list[Divergence]:
        ranks = sorted(rank for rank, sample in samples.items() if sample.strange)
        if not ranks or STRANGE in self._told:
            return []
        first = min(min(samples[rank].strange) for rank in ranks)
        holders = [rank for rank in ranks if first in samples[rank].strange]
        sample = samples[holders[0]]
        tensor, what = _title(sample.names[first]), sample.strange[first]
        others = len({at for rank in ranks for at in samples[rank].strange}) - 1
        more = f" (and {others:,} other tensor{'s' * (others != 1)})" if others else ""
        where = f"on {describe_ranks(holders)} after step {step}"
        text = f"the {tensor} has {what} {where}{more}{self._before()}"
        return [Divergence(STRANGE, self.watch, step, tensor, holders, text)]

    def _differing(self, step: int, samples: dict[int, Sample]) -> list[Divergence]:
        names = {rank: list(sample.names) for rank, sample in samples.items()}
        groups = _groups(names)
        if len(groups) > 1:
            odd = sorted(rank for group in groups[1:] for rank in group)
            text = (
                f"{describe_ranks(odd)} and {describe_ranks(groups[0])} have different parameters or gradients "
                f"after step {step}{self._before()}"
            )
            return [Divergence(DIFFERS, self.watch, step, "", odd, text)]
        shared = next(iter(names.values()))
        differing = [at for at, _ in enumerate(shared) if len({sample.marks[at] for sample in samples.values()}) > 1]
        random = {name for at, (kind, name) in enumerate(shared) if kind == RANDOM and at not in differing}
        if self._random_state is None:
            self._random_state = random
        differing = [at for at in differing if self._is_due(*shared[at])]
        if not differing or DIFFERS in self._told:
            return []
        first = differing[0]
        tensor = _title(shared[first])
        apart = _groups({rank: sample.marks[first] for rank, sample in samples.items()})
        odd = sorted(rank for group in apart[1:] for rank in group)
        whose = f"on {describe_ranks(odd)} differs from {describe_ranks(apart[0])}"
        if len(apart) == len(samples) > 2:
            odd, whose = sorted(samples), f"differs on all of {describe_ranks(samples)}"
        kinds = [f"{len(same):,} {kind}{'s' * (len(same) != 1)}" for kind, same in _by_kind(shared, differing).items()]
        one = len(differing) == 1
        text = f"the {tensor} {whose} after step {step}{self._before()}; {' and '.join(kinds)} differ{'s' * one}"
        return [Divergence(DIFFERS, self.watch, step, tensor, odd, text)]

    def _is_due(self, kind: str, name: str) -> bool:
        return kind != SHARD and (kind != RANDOM or name in (self._random_state or ()))

    def _before(self) -> str:
        return f" (step {self.last} was fine)" if self.compared else " (the first step compared)"


def _title(name: tuple[str, str]) -> str:
    kind, text = name
    return f"{kind} {text}" if kind in (PARAMETER, SHARD) else f"{kind} of {text}"


def _by_kind(names: Sequence[tuple[str, str]], places: Iterable[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for at in places:
        found.setdefault(names[at][0], []).append(at)
    return found


def _groups(values: Mapping[int, object]) -> list[list[int]]:
    """Return the ranks of equal values, the most first."""
    groups: list[tuple[object, list[int]]] = []
    for rank, value in sorted(values.items()):
        same = next((ranks for known, ranks in groups if known == value), None)
        if same is None:
            groups.append((value, [rank]))
        else:
            same.append(rank)
    return sorted((ranks for _, ranks in groups), key=lambda ranks: (-len(ranks), ranks[0]))
