"""Edit and continue: living actors switch to a new version of their class and keep their state, all of a mesh or none.

First every rank makes the new class and tries it on its actor, even while the actor is busy. If all succeed, a message
in the order of the others tells them to switch: so all ranks switch between the same two messages.
"""

from __future__ import annotations

from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch._actors.actor import is_async
from monarch._actors.endpoint import EndpointProperty, arity_of, methods_of
from monarch._actors.running import current
from monarch._actors.table import actors_of
from monarch._core.kinds import class_of, is_a
from monarch._core.shapes.ranks import describe_ranks
from monarch._meshes.actors.ask import ask, endpoint_of
from monarch._meshes.inside import check_alive, state_of, view_at
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._wire.pickling import dumps_whole, loads
from monarch.exceptions import ActorError, ArgumentError, CallTimeoutError, DeviceMeshError, EditError

if TYPE_CHECKING:
    from monarch._meshes.actors.actor_mesh import ActorMesh
    from monarch._node.future import Future

PATIENCE = 10.0
"""Seconds for all ranks to make the new class, which they do even while their actors are busy."""
_OWN = frozenset({"__doc__", "__module__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"})
_numbers = count(1)
_prepared: dict[str, dict[int, type]] = {}
"""In a rank: prepared classes that an actor has not switched to yet, by actor and number of the edit. Written by the
threads of services and of actors, in single dict operations."""


class ClassChanges(NamedTuple):
    """The differences between two versions of a class."""

    changed: list[str]
    added: list[str]
    removed: list[str]

    def text(self) -> str:
        """Return a summary such as ``step changed, evaluate added``; empty without differences."""
        parts = [
            f"{', '.join(names)} {what}"
            for names, what in ((self.changed, "changed"), (self.added, "added"), (self.removed, "removed"))
            if names
        ]
        if "__init__" in self.changed + self.added:
            parts.append("__init__ applies to new actors only")
        return ", ".join(parts)


def changes(old: type, new: type) -> ClassChanges:
    """Compare two versions of a class, and the bases that they do not share, by code and value."""
    before, after = _members(old, new), _members(new, old)
    both = [name for name in after if name in before]
    return ClassChanges(
        sorted(name for name in both if not _alike(before[name], after[name])),
        sorted(after.keys() - before.keys()),
        sorted(before.keys() - after.keys()),
    )


def is_alike(one: Any, other: Any) -> bool:
    """Return whether two functions, or two classes, do the same; from other lines too."""
    if isinstance(one, type) and isinstance(other, type):
        return not any(changes(one, other))
    return _alike(one, other)


def _members(cls: type, other: type) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for base in reversed([base for base in cls.__mro__ if base not in other.__mro__]):
        members.update((name, value) for name, value in vars(base).items() if name not in _OWN)
    return members


def _alike(one: Any, other: Any) -> bool:
    if is_a(one, staticmethod, classmethod) and class_of(one) is class_of(other):
        return _alike(one.__func__, other.__func__)
    if isinstance(one, EndpointProperty) and isinstance(other, EndpointProperty):
        return one.explicit == other.explicit and _alike(one.method, other.method)
    if isinstance(one, property) and isinstance(other, property):
        return all(_alike(getattr(one, part), getattr(other, part)) for part in ("fget", "fset", "fdel"))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return (
            _same_code(one.__code__, other.__code__)
            and _same(one.__defaults__, other.__defaults__)
            and _same(one.__kwdefaults__, other.__kwdefaults__)
        )
    return _same(one, other)


def _same_code(one: Any, other: Any) -> bool:
    """Return whether the code objects are equal, ignoring line numbers."""
    parts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount")
    if any(getattr(one, part) != getattr(other, part) for part in parts):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _same_code(a, b) if hasattr(a, "co_code") and hasattr(b, "co_code") else (type(a), a) == (type(b), b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:
        # For example, arrays compare element by element.
        return False


# In the program


def update_class(mesh: ActorMesh, new: type) -> Future[Any]:
    """Switch all actors of a mesh to a new version of their class. They keep their state; ``__init__`` does not run.

    Messages sent before are handled by the old version, later ones by the new version. Return when all ranks have
    agreed; the returned future is done when all have switched, which a busy actor does after its current message.

    Raises:
        EditError: a rank cannot switch; then none does.
        StoppedError, SupervisionError: the mesh was stopped, or ranks of it have died.
        SerializationError: the class cannot be sent.
    """
    state = state_of(mesh)
    whole = view_at(mesh, state.region)
    check_alive(whole, "edit")
    number = next(_numbers)
    body = dumps_whole(new, new.__name__)
    try:
        ask(whole, prepare, state.key, number, body).get(PATIENCE)
    except CallTimeoutError:
        raise EditError(
            f"{_kept(mesh)}: some ranks did not answer within {PATIENCE:g} s (one may be in C code that holds the GIL)",
            mesh=state.name,
        ) from None
    except DeviceMeshError as error:
        raise EditError(f"{_kept(mesh)}: {error}", mesh=state.name, ranks=error.ranks) from None
    except ActorError as error:
        ranks = tuple(error.failures)
        why = f"{describe_ranks(ranks)}: {error.failures[ranks[0]].strip().splitlines()[-1]}"
        raise EditError(f"{_kept(mesh)}; {why}", mesh=state.name, ranks=ranks) from None
    old = state.cls
    for name in methods_of(old).keys() & methods_of(new).keys():
        # Endpoints of existing views look here.
        arity_of(old, name).become(arity_of(new, name))
    state.cls = new
    if state.spec is not None:
        # A rank whose process is replaced gets the new one too.
        state.spec.cls = new
    return endpoint_of(whole, commit).call(number)


def _kept(mesh: ActorMesh) -> str:
    return f"all actors of {state_of(mesh).name} keep their version of {state_of(mesh).cls.__name__}"


# In a rank


@service("class_updates.prepare", "threaded")
def prepare(key: str, number: int, body: bytes) -> None:
    """Make the new class and try it on the actor without switching; runs in its own thread."""
    mailbox = actors_of(current_node()).here.get(key)
    if mailbox is None or mailbox.instance is None:
        raise ArgumentError("the actor does not exist or was stopped, so its class cannot be edited")
    new = loads(body)
    instance, old = mailbox.instance, class_of(mailbox.instance)
    try:
        object.__setattr__(instance, "__class__", new)
    except TypeError as error:
        raise ArgumentError(
            f"the state of a {old.__name__} does not fit the new class, which has different __slots__ or a "
            f"different builtin base; spawn a new mesh ({error})"
        ) from None
    object.__setattr__(instance, "__class__", old)
    methods_of(new)
    _prepared.setdefault(key, {})[number] = new


def _take_prepared(key: str, number: int) -> type:
    """Return a prepared class, and drop it with those of earlier edits, which are never committed."""
    # In place, since the next edit may add its class meanwhile.
    prepared = _prepared[key]
    new = prepared[number]
    for each in list(prepared):
        if each <= number:
            del prepared[each]
    return new


@service("class_updates.commit", "actor")
def commit(instance: Any, number: int) -> None:
    """Switch to the prepared class, between two messages of the actor."""
    here = current.get()
    assert here is not None
    mailbox = here[0]
    new = _take_prepared(mailbox.key, number)
    object.__setattr__(instance, "__class__", new)
    mailbox.take_class(new)
    if is_async(new) and mailbox.executor.loop is None:
        mailbox.executor.enter_loop(lambda: None)
