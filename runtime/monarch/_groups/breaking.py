"""How a generation of process groups ends: a death, a stop, a failed call or a broken connection spoils it."""

from __future__ import annotations

from collections.abc import Sequence

from monarch._actors.table import actors_of
from monarch._core.roster import Procs
from monarch._core.shapes.ranks import describe_ranks
from monarch._groups.rendezvous import is_dead, local_rendezvous, uses_collectives
from monarch._node.current import current_node
from monarch._node.services.asking import tell_proc
from monarch._node.services.registry import service
from monarch._wire import messages as m
from monarch.exceptions import GroupError


@service("groups.spoil", "quick")
def spoil(reason: str) -> int:
    """Free a rank from a collective, of its mesh's groups or of the user's."""
    from monarch._tensors.collectives.connections import shut_down
    from monarch._tensors.collectives.made_groups import all_sockets, free_making

    own = local_rendezvous()
    if own.world is not None or own.is_forming:
        return own.spoil(reason)
    if not uses_collectives():
        return 0
    from monarch._tensors.collectives.agreeing import free_checks
    from monarch._tensors.collectives.any_rank import free_receives

    free_checks(reason)
    received = free_receives(reason)
    config = current_node().config
    # A rank without groups has only the user's connections.
    count = received + shut_down(all_sockets(config.addresses if config is not None else ()))
    free_making()
    return count


@service("groups.generation_now", "quick")
def generation_now() -> int:
    """Return the number of this rank's last generation, working or broken."""
    return local_rendezvous().generation


@service("groups.spoil_generation", "quick")
def spoil_generation(reason: str, number: int) -> int:
    """Call ``spoil`` unless a newer generation has begun, since others may overtake this message."""
    return spoil(reason) if local_rendezvous().end_generation(reason, number) else 0


@service("groups.leave_generation", "quick")
def leave_generation(reason: str, number: int) -> None:
    """Call ``spoil_generation``, but leave the user's own groups alone."""
    if local_rendezvous().end_generation(reason, number):
        local_rendezvous().spoil(reason)


@service("groups.doom", "quick")
def doom(key: str, src: str, port: int, reason: str, failed: Sequence[int]) -> int:
    """Keep this rank's constructor, if it continues, from waiting for failed ones of its spawn.

    Args:
        key: the key of the spawned mesh.
        src: the spawning proc.
        port: the port at which it waits for the actors.
        reason: for the error of the constructor.
        failed: ranks of this process mesh whose constructors raised.

    Returns:
        The generation in whose groups it may wait; 0 if there are none, or if the constructor has ended.
    """
    own = local_rendezvous()
    mailbox = actors_of(current_node()).here.get(key)
    if mailbox is None or not mailbox.is_coming:
        # Later calls may be making the groups that this rank has now.
        return 0
    own.calls.doom(src, port, reason, failed)
    own.calls.free(src, port, reason)
    return own.usable_generation()


def begin_ending_left_groups() -> None:
    """End the groups in which a receive from any rank is left, which would take a later message; in a rank, once."""
    from monarch._tensors.collectives import any_rank

    any_rank.on_left.append(lambda: give_up_everywhere(local_rendezvous().generation))


def give_up_everywhere(number: int) -> None:
    """Mark a generation broken on all ranks, since a collective of it failed here."""
    own = local_rendezvous()
    if own.world is None or own.broken or own.generation != number:
        return
    procs = own.procs()
    give_up(procs, number)
    for rank in range(procs.size):
        if rank != current_node().rank and not is_dead(procs.proc(rank)):
            tell_proc(current_node(), procs.proc(rank), give_up, procs, number)


@service("groups.give_up", "quick")
def give_up(procs: Procs, number: int) -> None:
    """Mark a generation broken, since a connection between two of its ranks broke."""
    reason = f"a connection of the process group of {procs.name} broke; the next use of the group recreates it"
    local_rendezvous().spoil(reason, number)


def retire_elsewhere(number: int) -> None:
    """Tell the other ranks that this one has left a generation, so that its next use makes a new one there too."""
    procs, rank = local_rendezvous().procs(), current_node().rank
    reason = f"rank {rank} has destroyed the process group of {procs.name}; the next use of the group recreates it"
    for each in range(procs.region().nelements):
        if each != rank and not is_dead(procs.proc(each)):
            tell_proc(current_node(), procs.proc(each), retire, reason, number)


@service("groups.retire", "quick")
def retire(reason: str, number: int) -> None:
    """Handle the news that another rank has left a generation."""
    local_rendezvous().retire(reason, number)


@service("groups.position", "quick")
def position() -> tuple[int, dict[str, int] | None]:
    """Return this rank's last generation and its progress in each group; None without working groups."""
    own = local_rendezvous()
    world = own.world
    return own.generation, (None if world is None or own.broken else {"": own.generation, **world.position()})


def member_died(dead: m.Dead) -> None:
    """Handle the death of a rank that this one may wait for in a collective."""
    own = local_rendezvous()
    procs = own.procs()
    rank = procs.rank_of(dead.proc)
    if procs.has(dead.proc):
        reason = f"{describe_lost(procs, [rank])}; it {dead.reason}"
        own.calls.note_death(own.generation, reason)
        spoil(reason)
        if own.world is None:
            own.settle(None, GroupError(reason, mesh=procs.name, ranks=(rank,)))


def describe_lost(procs: Procs, ranks: list[int]) -> str:
    """Return the reason why the groups of a mesh are broken after the death of some ranks."""
    total = procs.region().nelements
    return f"the process group of {procs.name} is broken because {describe_ranks(ranks, total)} died"
