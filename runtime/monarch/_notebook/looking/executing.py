"""Statements of a prompt, which run in a frame of a rank that is paused or has failed."""

from __future__ import annotations

from monarch._actors.pausing.failed import failed
from monarch._actors.pausing.gate import gate
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch._notebook.looking.at_frame import Scope, look
from monarch._notebook.looking.statements import NOT_PAUSED, write_back


@service("executing.execute_here", "threaded")
def execute_here(source: str, level: int) -> tuple[bool, str]:
    """Service: run statements in a frame; return whether they have ended well, or the error.

    Their output belongs to the call that is paused.

    Args:
        source: the statements.
        level: the level of the frame: 0 for the innermost one of the user's code, 1 for its caller.
    """
    if not gate.is_paused() and failed.frame() is None:
        return False, NOT_PAUSED
    ok, answer = look(level, lambda scope: _execute(source, scope))
    # Their output is shown before the next question.
    current_node().output.idle()
    return ok, answer


def _execute(source: str, scope: Scope) -> str:
    frame = scope.frame
    is_module = frame is None or frame.f_locals is frame.f_globals
    names = scope.names if frame is None or not is_module else frame.f_globals
    before = dict(names)
    try:
        exec(compile(source, "<prompt>", "exec", dont_inherit=True), names)
    finally:
        # As far as they have come, as in the code itself.
        if frame is not None and not is_module:
            write_back(frame, source, before, names)
    return ""
