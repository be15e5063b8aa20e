"""Attempts of all ranks of a mesh to make new process groups: if one rank gives up, the others do too.

A rank that gives up does not come back for groups of this attempt, whichever generation they are of: a rank whose
generation ends begins the next one by itself, and would wait there for the others.
"""

from __future__ import annotations

from monarch._groups.rendezvous import is_dead, local_rendezvous
from monarch._node.current import current_node
from monarch._node.services.asking import tell_proc
from monarch._node.services.registry import service
from monarch.exceptions import GroupError

AGAIN = "groups"
"""The value of the report of a rank that must make its groups again."""


class Attempts:
    """The attempts of this rank; single assignments.

    Attributes:
        running: number of the one that is under way, 0 for none; written by the thread of the executor.
        made: number of the last one that has succeeded here, and its generation of groups; likewise. It is set before
            ``running`` is 0, so that one of the two is seen.
        abandoned: the last one that some rank has given up, and why; written by the receiving thread.
    """

    def __init__(self) -> None:
        self.running = 0
        self.made: tuple[int, int] = 0, 0
        self.abandoned: tuple[int, str] = (0, "")

    def check(self) -> None:
        """Raise GroupError if the attempt that is under way was given up elsewhere."""
        number, reason = self.abandoned
        if 0 < self.running <= number:
            raise GroupError(reason)


attempts = Attempts()


def give_up_attempt(number: int, reason: str) -> None:
    """Give up an attempt on the other ranks, since it failed here."""
    own = local_rendezvous()
    # It may be another than that of the attempt, which is being formed: the others would wait there for this rank.
    generation = own.generation
    own.spoil(reason, generation)
    procs = own.procs()
    for rank in range(procs.size):
        if rank != current_node().rank and not is_dead(procs.proc(rank)):
            tell_proc(current_node(), procs.proc(rank), abandon, number, reason, generation)


@service("renewing.abandon", "quick")
def abandon(number: int, reason: str, spoiled: int) -> None:
    """Handle the news that another rank has given up an attempt, and spoiled a generation: free this one from both."""
    if number > attempts.abandoned[0]:
        attempts.abandoned = number, reason
    # First the number, so that groups that are not begun yet are not begun; then what has begun is cut.
    own = local_rendezvous()
    made, generation = attempts.made
    # Ops of this rank may wait for the other one, in a collective or for the groups of a slice.
    uses = made == number and own.generation == generation
    if own.end_generation(reason, spoiled) or uses or 0 < attempts.running <= number:
        own.spoil(reason)
