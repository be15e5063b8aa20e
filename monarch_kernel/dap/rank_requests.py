"""Questions to ranks that do not block the control channel while the answer is under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from monarch._kernel_api import Failure, ServiceAnswers, ServiceRequest, current_node, split_proc
from monarch_kernel.dap.protocol import RequestError

PATIENCE = 7.0
"""Seconds for an answer; what runs in a frame has 5 s."""
_LOOK = 0.25
"""Seconds between looks whether the rank has died meanwhile."""


async def ask(proc: str, asked: ServiceRequest, patience: float = PATIENCE) -> Any:
    """Ask a rank, and return the answer.

    Raises:
        Refused: it does not answer, or with an error.
    """
    node, loop = current_node(), asyncio.get_running_loop()
    rank = split_proc(proc)[1]
    if node.peers.get(proc).dead is not None:
        raise RequestError(f"rank {rank} is dead")
    answered: asyncio.Future[Any] = loop.create_future()

    def take(answer: Any) -> None:
        if not answered.done():
            answered.set_result(answer)

    def heard(_: str, answer: Any) -> None:
        with contextlib.suppress(RuntimeError):
            # The loop has been closed: the kernel ends.
            loop.call_soon_threadsafe(take, answer)

    answers = ServiceAnswers(node, [proc], asked, heard, urgent=True)
    until = loop.time() + patience
    try:
        while not (await asyncio.wait({answered}, timeout=_LOOK))[0]:
            if node.peers.get(proc).dead is not None:
                raise RequestError(f"rank {rank} is dead")
            if loop.time() > until:
                raise RequestError(f"rank {rank} did not answer within {patience:g} s")
        answer = answered.result()
    finally:
        answers.close()
    if isinstance(answer, Failure):
        raise RequestError(answer.text)
    return answer


async def look(proc: str, asked: ServiceRequest) -> Any:
    """Ask a rank for something in a frame, and return the value.

    Raises:
        Refused: it has none, or the rank does not answer.
    """
    ok, answer = await ask(proc, asked)
    if not ok:
        raise RequestError(str(answer))
    return answer


def tell(procs: Iterable[str], asked: ServiceRequest) -> None:
    """Ask ranks for something without waiting."""
    ServiceAnswers(current_node(), list(procs), asked, urgent=True).close()
