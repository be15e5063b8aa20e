"""Turning the check of collectives on and off, on a rank and for a mesh."""

from __future__ import annotations

import sys
import time
from typing import Any

from monarch._actors.table import actors_of
from monarch._core.kinds import is_a
from monarch._core.roster import Procs
from monarch._core.shapes.ranks import describe_ranks
from monarch._groups.breaking import give_up_everywhere
from monarch._groups.rendezvous import local_rendezvous
from monarch._node.current import current_node
from monarch._node.services.asking import ask_soon
from monarch._node.services.registry import ServiceRequest, request, service
from monarch.exceptions import GroupError

PATIENCE = 60.0
"""Seconds for ranks to answer; one that has not used torch yet imports it."""
_BUSY = "is running a call"
_ENDING_S, _MAKING_S = 0.3, 10.0
"""Seconds for a call to end that has answered, and for the constructor of an actor."""
_LOOK_S = 0.005


def set_checks(on: bool, at: int) -> None:
    """Check the collectives of this process from now on, or no longer.

    Args:
        at: when that was decided, in the time of the program.
    """
    if not on and "monarch._tensors.collectives.checks" not in sys.modules:
        return
    from monarch._tensors.collectives import agreeing, checks

    if _left not in agreeing.on_left:
        agreeing.on_left.append(_left)
    checks.set_checks(on, at)


def _left(group: Any) -> None:
    """End a generation in whose check this rank has stopped waiting: others would wait for it."""
    own = local_rendezvous()
    world = own.world
    if world is not None and any(each is group for each in list(world.groups.values())):
        give_up_everywhere(own.generation)


@service("checking.set_here", "threaded")
def set_here(on: bool, at: int) -> str:
    """Service: turn the check on or off; return why not, or an empty string."""
    if _is_busy():
        # Ranks that check would wait for those that have begun the same collective unchecked.
        return _BUSY
    set_checks(on, at)
    return ""


@service("checking.is_on_here", "threaded")
def is_on_here() -> bool:
    """Service: return whether collectives are checked."""
    checks = sys.modules.get("monarch._tensors.collectives.checks")
    return checks is not None and checks.setting().endswith("1")


@service("checking.why_not_here", "threaded")
def why_not_here() -> str:
    """Service: return why the check cannot be turned on or off now, or an empty string."""
    return _BUSY if _is_busy() else ""


def _is_busy() -> bool:
    """Return whether a call runs here, and not merely ends (its answer is sent a moment earlier) or makes an actor."""
    begun = time.monotonic()
    while busy := [each for each in list(actors_of(current_node()).here.values()) if each.running or each.turns.tasks]:
        patience = _MAKING_S if all(each.is_coming for each in busy) else _ENDING_S
        if time.monotonic() > begun + patience:
            return True
        time.sleep(_LOOK_S)
    return False


@service("checking.set_all", "local")
def set_all(procs: Procs, on: bool) -> None:
    """Turn the check on or off on all ranks of a mesh, or on none.

    Raises:
        GroupError: ranks run a call, or do not answer. Dead ranks are left out.
    """
    node = current_node()
    names = [procs.proc(rank) for rank in range(procs.size)]
    living = [name for name in names if node.peers.get(name).dead is None]
    # None is changed while another one runs a call: a group that it makes meanwhile would adopt the change.
    failed = _refused(living, request(why_not_here))
    if not failed:
        before = ask_soon(living, request(is_on_here), PATIENCE)
        failed = _refused(living, request(set_here, on, time.time_ns()))
        if not failed:
            return
        # A call has begun since. Those without an answer may still change, and get this after it.
        changed = [name for name, was in before.items() if was is (not on)]
        ask_soon(changed, request(set_here, not on, time.time_ns()), PATIENCE)
    reasons: dict[str, list[int]] = {}
    for name, why in failed.items():
        reasons.setdefault(why, []).append(procs.rank_of(name))
    ranks = sorted(procs.rank_of(name) for name in failed)
    text = "; ".join(f"{describe_ranks(sorted(each))}: {why}" for why, each in reasons.items())
    raise GroupError(
        f"cannot turn the check of collectives of {procs.name} {'on' if on else 'off'}: {text}; try again when no call "
        f"is running",
        mesh=procs.name,
        ranks=tuple(ranks),
    )


def _refused(procs: list[str], asked: ServiceRequest) -> dict[str, str]:
    """Ask ranks for a reason against something; return those that have one, or do not answer."""
    answers = ask_soon(procs, asked, PATIENCE)
    return {proc: _reason(answers.get(proc)) for proc in procs if answers.get(proc) != ""}


def _reason(answer: object) -> str:
    return answer if is_a(answer, str) and isinstance(answer, str) else "no answer"
