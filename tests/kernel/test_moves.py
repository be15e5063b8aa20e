"""The moves of a mesh: one after the other, and the end of each is told once, by whoever shows lines."""

from __future__ import annotations

import pytest

from monarch._node.current import current_node
from monarch._node.future import Promise
from monarch.exceptions import CallTimeoutError
from monarch_kernel.meshes.moves import Moves


def test_next_cell_and_not_next_move_tells_the_end_of_a_move(host: None, capsys: pytest.CaptureFixture[str]) -> None:
    moves, move = Moves("m"), Promise[None](current_node(), "a move")
    moves.begin(move, lambda: ["rank 0 moved"])
    with pytest.raises(CallTimeoutError), moves.planned(0.05):
        pass
    move.complete(lambda: None)
    with moves.planned(1.0):
        pass
    assert moves.any and capsys.readouterr().err == ""
    moves.wait()
    assert not moves.any and capsys.readouterr().err == "rank 0 moved\n"
    moves.wait()
    assert capsys.readouterr().err == ""
