"""Endpoints: the methods of an actor that can be called from elsewhere, and queries of an actor class about them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from monarch.exceptions import ArgumentError

if TYPE_CHECKING:
    from monarch._actors.ports import Port
    from monarch._core.shapes.value_mesh import ValueMesh
    from monarch._node.future import Future

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co")

EXPLICIT = 1
"""Flag of a Call: the method gets a port, whatever its decorator."""
UNDECORATED = 2
"""Flag of a Call: the method may lack a decorator."""
FUNCTION = 4
"""Flag of a Call: the method is a function, as ``module:name``, that gets the actor as its first argument."""


class EndpointLike(Protocol[P, R_co]):
    """An endpoint of a mesh on the caller's side; made by ``monarch._meshes.actors.adverbs``."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R_co]]:
        """Send to every actor of the mesh and return a future of a ValueMesh of the results."""
        ...

    def call_each(self, values: Any, *args: Any, **kwargs: Any) -> Future[ValueMesh[R_co]]:
        """Send to every actor of the mesh, each with its own first argument."""
        ...

    def map(self, items: Iterable[Any]) -> Iterator[R_co]:
        """Yield the result for each item, in their order; each actor takes the next item when it is free."""
        ...

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Send to the only actor of this mesh and return a future of its result."""
        ...

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]:
        """Send to a random actor of the mesh and return a future of its result."""
        ...

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R_co]]:
        """Send to every actor of the mesh and yield a future for each answer, in order of arrival."""
        ...

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to every actor of the mesh without waiting for answers."""
        ...

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the endpoint on all ranks in order with their ops; return rank-local tensors."""
        ...


class EndpointProperty(Generic[P, R]):
    """The result of ``@endpoint``: an endpoint on a mesh, the plain method on the actor itself."""

    def __init__(self, method: Callable[..., Any], explicit: bool, concurrent: bool, propagate: Any = None) -> None:
        self.method = method
        self.explicit = explicit
        self.concurrent = concurrent
        self.propagate = propagate
        # It takes any object, not only functions.
        functools.update_wrapper(self, method)  # pyright: ignore[reportArgumentType]

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> EndpointProperty[P, R]: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> EndpointLike[P, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        return _bound(self.method, instance, owner)


def _bound(method: Any, instance: Any, owner: type) -> Any:
    return method.__get__(instance, owner)


class _Decorator(Protocol):
    """``@endpoint(...)`` with options."""

    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], Awaitable[R]], /) -> EndpointProperty[P, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> EndpointProperty[P, R]: ...


class _AsyncDecorator(Protocol):
    """``@concurrent_endpoint(...)`` with options."""

    def __call__(self, method: Callable[Concatenate[Any, P], Awaitable[R]], /) -> EndpointProperty[P, R]: ...


class _PortDecorator(Protocol):
    """``@endpoint(explicit_response_port=True)``, for a method that answers through a port, its first argument."""

    def __call__(self, method: Callable[Concatenate[Any, Port[R], P], object], /) -> EndpointProperty[P, R]: ...


@overload
def endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]], /) -> EndpointProperty[P, R]: ...
@overload
def endpoint(method: Callable[Concatenate[Any, P], R], /) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    *,
    propagate: Any = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
    concurrent: bool = False,
) -> _Decorator: ...
@overload
def endpoint(
    *,
    propagate: Any = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
    concurrent: bool = False,
) -> _PortDecorator: ...
def endpoint(
    method: Any = None,
    /,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
    concurrent: bool = False,
) -> Any:
    """Make a method of an Actor callable from elsewhere, by ``call``, ``call_one``, ``broadcast`` and so on.

    An actor handles one message at a time: an endpoint, async or not, begins when the previous one has ended, so state
    that it reads before an ``await`` is the same after it. A concurrent endpoint begins when its message arrives,
    alongside any other; if one of two messages is for a concurrent endpoint, either may be handled first.

    Args:
        propagate: how ``rref`` learns shapes of results: see ``monarch.remote``.
        explicit_response_port: the method gets a Port as first argument after self and answers through it.
        instrument: whether its calls are traced; not used yet.
        concurrent: whether its calls overlap with others of the same actor; for async methods.

    Raises:
        TypeError: the decorated object is not a function.
        ValueError: ``concurrent`` is set, and the function is not async.
    """
    return _decorate(method, explicit_response_port, concurrent, propagate)


@overload
def concurrent_endpoint(method: Callable[Concatenate[Any, P], Awaitable[R]], /) -> EndpointProperty[P, R]: ...
@overload
def concurrent_endpoint(
    *, propagate: Any = None, explicit_response_port: Literal[False] = False, instrument: bool = True
) -> _AsyncDecorator: ...
@overload
def concurrent_endpoint(
    *, propagate: Any = None, explicit_response_port: Literal[True], instrument: bool = True
) -> _PortDecorator: ...
def concurrent_endpoint(
    method: Any = None,
    /,
    *,
    propagate: Any = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Make an async method an endpoint whose calls overlap: the same as ``endpoint(concurrent=True)``.

    Raises:
        ValueError: the method is not async or already an endpoint.
    """
    return _decorate(method, explicit_response_port, True, propagate)


def _decorate(method: Any, explicit: bool, concurrent: bool, propagate: Any) -> Any:
    if method is None:
        return functools.partial(_decorate, explicit=explicit, concurrent=concurrent, propagate=propagate)
    if concurrent and isinstance(method, EndpointProperty):
        name = getattr(method.method, "__name__", method.method)
        raise ValueError(f"{name} is already an endpoint; use only one of the two decorators")
    if not callable(method) or isinstance(method, (EndpointProperty, type)):
        raise TypeError(f"@endpoint: expected a method of an Actor, got {method!r}")
    if concurrent and not inspect.iscoroutinefunction(method):
        name = getattr(method, "__name__", method)
        raise ValueError(
            f"{name}: expected an async method for a concurrent endpoint, got a sync one; write async def, or use a "
            f"plain @endpoint"
        )
    made: EndpointProperty[..., Any] = EndpointProperty(method, explicit, concurrent, propagate)
    return made


class Method(NamedTuple):
    """An endpoint on the actor's side."""

    function: Callable[..., Any]
    is_async: bool
    explicit: bool
    concurrent: bool


@functools.lru_cache(maxsize=1024)
def methods_of(cls: type) -> dict[str, Method]:
    """Return all endpoints of a class by name."""
    methods: dict[str, Method] = {}
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name, None)
        if isinstance(attribute, EndpointProperty):
            coroutine = inspect.iscoroutinefunction(attribute.method)
            methods[name] = Method(attribute.method, coroutine, attribute.explicit, attribute.concurrent)
    return methods


class Arity:
    """A check whether arguments fit a method, at the caller before anything is sent."""

    __slots__ = ("_at_least", "_at_most", "_signature", "name")

    def __init__(self, name: str, method: Callable[..., Any], leave_out: int) -> None:
        self.name = name
        self._at_least, self._at_most = 1, 0
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            # A builtin may have no signature; then the call itself checks its arguments.
            self._signature = None
            return
        parameters = list(signature.parameters.values())
        while leave_out and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            parameters.pop(0)
            leave_out -= 1
        self._signature = signature.replace(parameters=parameters)
        kinds = inspect.Parameter
        simple = all(parameter.kind is not kinds.KEYWORD_ONLY or parameter.default is not kinds.empty
                     for parameter in parameters)  # fmt: skip
        if simple:
            positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
            self._at_least = sum(p.default is kinds.empty for p in positional)
            anything = any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
            self._at_most = 1 << 30 if anything else len(positional)

    def become(self, other: Arity) -> None:
        """Take over the signature of a new version of the method."""
        self._at_least, self._at_most, self._signature = other._at_least, other._at_most, other._signature

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ArgumentError if the arguments do not fit."""
        if not kwargs and self._at_least <= len(args) <= self._at_most:
            return
        if self._signature is None:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"{self.name}(): {error}; its signature is {self._signature}") from None


@functools.lru_cache(maxsize=4096)
def arity_of(cls: type, method: str) -> Arity:
    """Return the signature of an endpoint, without self and the port."""
    endpoint = methods_of(cls)[method]
    return Arity(f"{cls.__name__}.{method}", endpoint.function, 2 if endpoint.explicit else 1)


@functools.lru_cache(maxsize=1024)
def init_arity_of(cls: type) -> Arity:
    """Return the signature of a class's constructor."""
    if cls.__init__ is object.__init__:
        return Arity(cls.__name__, lambda: None, 0)
    return Arity(cls.__name__, cls.__init__, 1)
