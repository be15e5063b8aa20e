"""The bytes of the wire protocol, compared with recorded transcripts: a change needs a new version.

`python tests/wire/test_transcripts.py` writes the transcript of the present version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from monarch._core import causes as c
from monarch._wire import messages as m

HERE = Path(__file__).parent / "golden"
SAMPLES: dict[object, object] = {
    int: 7, str: "h/a.0", bytes: b"body", bool: True, float: 0.5, type(None): None, Any: 1,
    c.CellRef: c.CellRef(3, 5),
    m.MergedOutput: m.MergedOutput("actor", "method", "h/c1", 7, [("stdout", b"line")], [([7], ["h/a.0"])]),
}  # fmt: skip
DEATHS: list[c.Cause] = [
    c.Exited(3), c.Signaled(7, full_shm="64 MiB"), c.Stopped(), c.Overdue(2.0), c.NotStarted("no room"),
    c.NotReady(60.0), c.Unknown(), c.Orphaned("h/c1", c.Exited(1)), c.HostLost("g"), c.HostsParted("g", "h"),
    c.AgentEnded(None, "tail"), c.NotInSession(), c.NotAttached("g"), c.Detached("trainers"), c.Refused("why"),
    c.NotRestarted(c.Signaled(9, True), "no room"),
]  # fmt: skip


def sample(hint: Any) -> Any:
    """A value of a type, always the same."""
    parts = get_args(hint)
    match get_origin(hint) or hint:
        case kind if kind is list:
            return [sample(parts[0])]
        case kind if kind is dict:
            return {sample(parts[0]): sample(parts[1])}
        case kind if kind is tuple:
            return tuple(sample(part) for part in parts if part is not Ellipsis)
        case kind if kind in SAMPLES:
            return SAMPLES[kind]
    return DEATHS[1] if parts == get_args(c.Cause) else sample(parts[0])


def conversation() -> list[m.AnyMessage]:
    """One message of each kind, and a death of each kind."""
    made: list[m.AnyMessage] = []
    for kind in get_args(m.AnyMessage):
        made.append(kind(**{name: sample(hint) for name, hint in get_type_hints(kind).items()}))
    made.extend(m.Dead("h/a.1", cause, False, []) for cause in DEATHS)
    return made


def transcript() -> list[dict[str, str]]:
    return [{"kind": type(each).__name__, "bytes": m.encode(each).hex()} for each in conversation()]


def path(version: int) -> Path:
    return HERE / f"version-{version}.json"


def test_bytes_of_this_version_are_unchanged() -> None:
    assert transcript() == json.loads(path(m.VERSION).read_text()), (
        "the bytes of a message have changed: raise VERSION in messages.py if an older peer would misread them"
    )


def test_recorded_messages_decode_to_their_kinds() -> None:
    for line in json.loads(path(m.VERSION).read_text()):
        message = m.decode(bytes.fromhex(line["bytes"]))
        assert type(message).__name__ == line["kind"]
        assert m.encode(message).hex() == line["bytes"]


def test_all_kinds_of_messages_and_causes_are_recorded() -> None:
    messages = conversation()
    assert {type(each) for each in messages} == set(get_args(m.AnyMessage))
    assert {type(each.cause) for each in messages if isinstance(each, m.Dead)} == set(get_args(c.Cause))


if __name__ == "__main__":
    path(m.VERSION).write_text(json.dumps(transcript(), indent=1) + "\n")
