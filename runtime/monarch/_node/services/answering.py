"""Handling of service requests, at once or in a thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from monarch._node.mishaps import Mishaps
from monarch._node.node_like import NodeLike
from monarch._node.remote_errors import pack_failure
from monarch._node.services.registry import Service, known_service, service_of
from monarch._wire import messages as m
from monarch._wire.pickling import dumps_whole, loads
from monarch._wire.plain import loads_plain
from monarch.exceptions import ArgumentError

_PROBERS = 3
"""Threads of a module of probes, of which some may be stuck in user code."""


class Answerer(NodeLike, Protocol):
    """A node that counts its mishaps."""

    @property
    def mishaps(self) -> Mishaps: ...


def on_ask(node: Answerer, ask: m.Ask) -> None:
    """Run a service: a quick one here, unless earlier ones of its module wait for their thread."""
    service = known_service(ask.service)
    lane = f"service-{ask.service.partition('.')[0]}"
    if service is not None and service.kind == "quick" and node.lanes.is_idle(lane):
        _run(node, ask, service, loads_plain)
        return
    # The first one of a module imports it, which may wait for an import in another thread.
    try:
        threads = _PROBERS if service is not None and service.kind == "probe" else 1
        node.lanes.post(lane, partial(_run, node, ask, service), threads)
    except RuntimeError as error:
        _answer_error(node, ask, error)


def _run(node: Answerer, ask: m.Ask, service: Service | None, load: Callable[[bytes], Any] = loads) -> None:
    try:
        if service is None:
            service = service_of(ask.service)
        if service.kind not in ("quick", "threaded", "probe"):
            raise ArgumentError(f"{ask.service!r} runs only in an actor")
        body = dumps_whole(service.function(*load(ask.body)))
    except BaseException as error:
        _answer_error(node, ask, error)
    else:
        _answer(node, ask, m.RESULT, body)


def _answer_error(node: Answerer, ask: m.Ask, error: BaseException) -> None:
    if ask.port:
        _answer(node, ask, m.ERROR, pack_failure(error))
    elif not node.closed:
        # A session that has ended drops what it was told last.
        node.mishaps.failed(ask, error if isinstance(error, Exception) else RuntimeError(repr(error)))


def _answer(node: Answerer, ask: m.Ask, status: int, body: bytes) -> None:
    if ask.port:
        node.replies.answer(ask.src, ask.port, ask.view, status, body)
