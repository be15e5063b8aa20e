"""Meshes that outlive their notebook, and what it notes for the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from monarch._kernel_api import DetachedMesh, HostMesh, duration_text, hosts_of, keep, parse_duration
from monarch.exceptions import MonarchError
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.recipe import Recipe, Step
from monarch_kernel.source.definitions import Defined


@dataclass
class DetachedRecipe(Recipe):
    """The recipe of a mesh that outlives its notebook."""

    seconds: float = 0.0
    """How long it lives while no notebook is attached."""
    detached: DetachedMesh | None = field(default=None, compare=False)

    def find_hosts(self, names: Mapping[str, Any], step: Step | None = None) -> tuple[HostMesh, Callable[[], object]]:
        """Return a new host on this machine or those of a launcher, and the function that ends them."""
        if self.hosts and not self.on:
            raise HeaderError(
                f"%mesh up: --keep cannot be combined with --hosts {self.hosts}; omit that, or use a launcher, such as "
                f"--on ssh:HOSTS"
            )
        if self.at_least is not None:
            raise HeaderError("%mesh up --keep: a detached mesh waits for all of its hosts; omit --at-least")
        count = int(self.hosts or 0)
        self.detached = keep(
            self.name,
            self.seconds,
            on=self.on,
            hosts=count,
            options=self.options,
            silence=self.silence,
            spare=self.spare_hosts,
            tell=step,
        )
        self.take_over(self.detached)
        return self.detached.hosts, self.detached.end

    def given_back(self) -> str:
        """Say what has become of the hosts after an interrupted start."""
        return "; ".join(part for part in ("no detached mesh remains", super().given_back()) if part)

    def take_over(self, detached: DetachedMesh) -> None:
        """Use the hosts of an attached mesh."""
        self.left, self.preemption = detached.left, detached.preemption
        # Those that no rank is on replace others.
        self.spare = hosts_of(detached.hosts)

    def says(self) -> str:
        """Describe the lease to the user."""
        left = self.left() if self.left is not None else None
        bound = ""
        if left is not None and left < self.seconds:
            bound = f", but its hosts are taken back in {duration_text(left)}"
        return (
            f"mesh {self.name!r} detaches when this kernel ends, crashes or restarts, and keeps running for "
            f"{duration_text(self.seconds)}{bound}; %mesh attach {self.name} attaches it again, %mesh down {self.name} "
            f"ends it"
        )


@dataclass
class Notes:
    """The notes that one notebook leaves for the next."""

    recipe: Recipe
    definitions: list[Defined] = field(default_factory=list[Defined])


def outlives_kernel(mesh: Mesh) -> bool:
    """Return whether a mesh is kept, and this notebook has it attached."""
    recipe = mesh.recipe
    return isinstance(recipe, DetachedRecipe) and recipe.detached is not None and recipe.detached.attached


def is_lost(mesh: Mesh) -> bool:
    """Return whether the connection to a detached mesh has broken, so that it may be attached again."""
    recipe = mesh.recipe
    return isinstance(recipe, DetachedRecipe) and recipe.detached is not None and not recipe.detached.attached


def detached_recipe(recipe: Recipe, duration: str) -> DetachedRecipe:
    """Return the recipe of a mesh that outlives its notebook by a duration such as ``2h``.

    Raises:
        HeaderError: the duration is invalid.
    """
    try:
        seconds = parse_duration(duration)
    except MonarchError as error:
        raise HeaderError(f"%mesh up --keep: {error}") from None
    return DetachedRecipe(**fields_of(recipe), seconds=seconds)


def fields_of(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that every recipe has."""
    return {each.name: getattr(recipe, each.name) for each in fields(Recipe)}
