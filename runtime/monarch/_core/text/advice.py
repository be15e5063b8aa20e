"""Advice and places in errors: Python for a program; a notebook sets its own, with magics and cells."""

from __future__ import annotations

from collections.abc import Sequence

from monarch._core.shapes.ranks import describe_ranks


class Advice:
    """The advice in errors of a program."""

    def after_deaths(self, uid: str, dead: Sequence[int], alive: Sequence[int]) -> str:
        """Return what to do after deaths in a call.

        Args:
            uid: the uid of the process mesh.
            dead: ranks, at least one.
            alive: the other ranks that were called.
        """
        if alive:
            return f"{_living(alive)}; heal_mesh replaces {describe_ranks(dead)}"
        return f"heal_mesh replaces {'it' if len(dead) == 1 else 'them'}"

    def after_deaths_elsewhere(self, mesh: str, alive: Sequence[int], owner_died: bool) -> str:
        """Return what to do after deaths in a mesh that another process has spawned.

        Args:
            mesh: the name of the mesh.
            alive: the other ranks that were called.
            owner_died: whether it ended with the process that had spawned it.
        """
        if owner_died:
            return f"spawn {mesh} again to continue"
        others = "the others" if alive else "its ranks"
        heal = f"only the program or actor that spawned {mesh} can replace {others}, with heal_mesh"
        return f"{_living(alive)}; {heal}" if alive else heal

    def after_failure(self, uid: str) -> str:
        """Return what to do after an actor has failed in a living process.

        Args:
            uid: the uid of the process mesh.
        """
        return "heal_mesh recreates failed actors; their state is lost"

    def after_failure_elsewhere(self, mesh: str) -> str:
        """Return what to do after an actor has failed in a mesh that another process has spawned.

        Args:
            mesh: the name of the mesh.
        """
        return f"only the program or actor that spawned {mesh} can recreate failed actors, with heal_mesh"

    def after_stop(self) -> str:
        """Return what to do after a process mesh was stopped."""
        return "spawn a new mesh"

    def placed(self, text: str) -> str:
        """Return a text with places in code as the user knows them."""
        return text


def _living(alive: Sequence[int]) -> str:
    return f"{describe_ranks(alive)} {'is' if len(alive) == 1 else 'are'} alive and can be used as a slice"


_advice = Advice()


def advice() -> Advice:
    """Return the advice in use."""
    return _advice


def use_advice(new: Advice) -> None:
    """Set what errors say from now on."""
    global _advice
    _advice = new
