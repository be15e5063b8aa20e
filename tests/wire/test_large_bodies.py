"""Large bytes leave the body of a message, and a large body goes beside a small one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from monarch._wire.pickle_sink import THRESHOLD
from monarch._wire.pickling import LARGEST_BODY, dumps, dumps_call, dumps_whole, loads

LARGE = 2 * THRESHOLD


class Box:
    """An object of a class of the program."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Box):
        return isinstance(other, Box) and same(one.inside, other.inside)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], Box, lambda x: functools.partial(print, {"a": Box(x)})])
def test_large_bytes_leave_body(kind: type, wrap: Any) -> None:
    body, buffers = dumps(wrap(kind(LARGE)))
    assert [buffer.nbytes for buffer in buffers] == [LARGE]
    assert len(body) < 400
    assert dumps(wrap(kind(THRESHOLD - 1)))[1] == []


@pytest.mark.parametrize(
    "obj",
    [
        "é" * LARGEST_BODY,
        list(range(500_000)),
        {"text": "x" * LARGEST_BODY, "bytes": bytes(LARGE), "array": np.ones(LARGE)},
        Box(["x" * LARGEST_BODY] * 2),
    ],
    ids=["text", "list", "with buffers", "object"],
)
def test_large_body_is_the_first_buffer(obj: Any) -> None:
    """A receiver without memory for it must receive the message still."""
    for body, buffers in (dumps(obj), dumps_call((obj,), {})):
        assert len(body) < 100 and buffers[0].nbytes > LARGEST_BODY
        back = loads(body, [memoryview(bytearray(buffer)) for buffer in buffers])
        assert same(back[0][0] if isinstance(back, tuple) else back, obj)
    assert same(loads(dumps_whole(obj)), obj)
