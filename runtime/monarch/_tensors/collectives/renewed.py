"""Process groups that work on: the next generation gives the groups of the last one new connections.

A program keeps groups in many places: DDP, a DeviceMesh, an optimizer. They stay the same objects, so a model trains on
after a Stop has closed the connections of its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from monarch._tensors.collectives.newcomers import is_of_earlier
from monarch._tensors.torch_compat import (
    backends_of,
    default_group,
    group_count,
    group_names,
    replace_backends,
    set_group_count,
)

_MOST = 100
"""How often groups get new connections; later ones are new groups."""
_BETWEEN = ";"
_DEFAULT, _WAITING = "default ", "waiting "
"""Before the size of the default group, in the place of a name: of a rank with the state of its steps, and of a new one
that has not begun a step yet."""


class Former(NamedTuple):
    """A group of a generation that has ended."""

    name: str
    """The same on all its members."""
    ranks: tuple[int, ...]
    backend: str
    group: Any
    is_of_mesh: bool
    """Whether the mesh has made it, rather than the user's code."""


class Formers:
    """The groups of the last generation of this process; empty if it ended in another way than by a failure.

    Used by the thread that forms a generation.
    """

    def __init__(self) -> None:
        self.default: Any = None
        self.others: dict[str, Former] = {}
        self.times = 0
        """How often groups have got new connections here."""
        self.renewed: list[Any] = []
        """Groups that have got new connections."""
        self.outgrown: Any = None
        """The former default group, if the mesh has another size now."""
        self.count = 0
        """How many groups torch had named by numbers."""

    def note(self, of_mesh: Container[int], apart: Container[int]) -> None:
        """Note the groups of this process, which are about to be destroyed.

        Args:
            of_mesh: identities of the groups that the mesh has made.
            apart: identities of groups of which no other code knows. They get no new connections: the ranks that use
                one agree first on what each has run.
        """
        self.default, self.others, self.count = default_group(), {}, group_count()
        for group, name in group_names():
            if group is not self.default and id(group) not in apart:
                ranks = tuple(dist.get_process_group_ranks(group))
                self.others[name] = Former(name, ranks, backends_of(group), group, id(group) in of_mesh)

    def take(self) -> Formers:
        """Return the noted groups, and forget them here."""
        taken = Formers()
        if self.times < _MOST:
            self.times += 1
            taken.default, taken.others, taken.times, taken.count = self.default, self.others, self.times, self.count
        self.default, self.others = None, {}
        return taken

    def keep(self, formers: Formers, made: Container[str]) -> None:
        """Note groups that should have got new connections, some of which have not.

        Args:
            formers: they were taken from here.
            made: names of the groups whose connections they were to get.
        """
        self.default = formers.default
        self.count = max(self.count, formers.count)
        self.others = {name: each for name, each in self.others.items() if name not in made} | formers.others

    def text(self) -> str:
        """Return the groups that this rank can renew, for the other ranks."""
        kind = _DEFAULT if is_of_earlier() else _WAITING
        default = [f"{kind}{self.default.size()}"] if self.default is not None else []
        return _BETWEEN.join([str(self.count), *default, *sorted(self.others)])

    def renew_default(self, size: int) -> None:
        """Make the former default group the default one, with the connections of the new one."""
        if self.default is None:
            return
        if self.default.size() == size:
            replace_backends(self.default, default_group(), self.times)
            self.renewed.append(self.default)
        else:
            self.outgrown = self.default

    @staticmethod
    def earlier(texts: Sequence[str]) -> list[int]:
        """Return the ranks that had the default group before: those with the state of its steps, if there are any."""
        said = [text.split(_BETWEEN) for text in texts]
        # Also of another size, before a resize.
        kinds = [
            [rank for rank, each in enumerate(said) if any(one.startswith(kind) for one in each)]
            for kind in (_DEFAULT, _WAITING)
        ]
        return kinds[0] or kinds[1]

    def renew_others(self, texts: Sequence[str], make: Callable[[Former], Any]) -> list[Former]:
        """Renew the groups that all their members have; in the same order on each rank, so that none waits in vain.

        Args:
            texts: what each rank has to say, by rank.
            make: creates a group like a former one, together with its other members.

        Returns:
            The renewed groups.
        """
        said = [text.split(_BETWEEN) for text in texts]
        has = [frozenset(names) for _, *names in said]
        renewed: list[Former] = []
        for name, former in sorted(self.others.items()):
            if all(rank < len(has) and name in has[rank] for rank in former.ranks):
                replace_backends(former.group, make(former), self.times)
                self.renewed.append(former.group)
                renewed.append(former)
        # A rank that has replaced another one has named none; the next name must be new, and the same on all.
        set_group_count(max(group_count(), *(int(count) for count, *_ in said)))
        return renewed
