"""``labextension/src/protocol.ts`` says the same as the structs of the protocol."""

from __future__ import annotations

from pathlib import Path

import msgspec

from monarch_kernel.views import protocol
from monarch_kernel.views.states import LOOKS
from monarch_kernel.views.typescript import text

FILE = Path(__file__).parents[2] / "labextension/src/protocol.ts"
HINT = "run `python -m monarch_kernel.views.typescript > labextension/src/protocol.ts`"


def test_the_file_is_what_the_structs_generate() -> None:
    assert FILE.read_text() == text(), HINT


def test_each_state_has_a_look() -> None:
    assert list(LOOKS) == list(protocol.State.__args__)


def test_defaults_are_left_out_of_messages() -> None:
    row = protocol.RankRow(0, "idle", 1.5)
    assert msgspec.json.encode(row) == b'{"rank":0,"state":"idle","since":1.5}'


def test_messages_of_views_name_their_struct() -> None:
    assert protocol.decode(b'{"kind":"pin","rank":3}') == protocol.Pin(3)
