"""Messages of the Debug Adapter Protocol, and what this kernel adds to it.

The additions have names that begin with ``monarch``, and a client that does not know them loses nothing:

- the request ``monarch/show`` with a ``threadId`` shows another stopped rank in a front end that shows one at a time;
- a ``monarch`` object with ``mesh`` and ``rank`` in each thread of a rank, and in a ``stopped`` event of one;
- the same object in the answer to ``inspectVariables`` when the variables are those of a rank.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
SHOW = "monarch/show"
EXTRA = "monarch"
FIRST = 1 << 30
"""Smallest id of a thread, frame or value of a rank; those of ipykernel's debugger are smaller, or larger by far."""


class RequestError(Exception):
    """A request that fails, with the reason for a person."""


def response(request: Message, body: Message | None = None) -> Message:
    """Return the answer to a request."""
    return {
        "seq": request.get("seq", 0),
        "type": "response",
        "request_seq": request.get("seq", 0),
        "success": True,
        "command": request.get("command", ""),
        "body": body or {},
    }


def failure(request: Message, reason: str) -> Message:
    """Return the answer to a request that fails."""
    error = {"error": {"id": 1, "format": reason, "showUser": True}}
    return {**response(request, error), "success": False, "message": reason}


def arguments_of(request: Message) -> Message:
    """Return the arguments of a request."""
    return request.get("arguments") or {}
