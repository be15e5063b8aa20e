"""A diagnosis as text: a heading for each finding, a line for each place where ranks are, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch._core.diagnosis.facts import Entered, Kind, Target
from monarch._core.diagnosis.findings import Cause, Diagnosis, Finding, Level, Standing
from monarch._core.position import Frame
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.text.durations import duration_text

_SHOWN = 8
"""Most lines about places in a finding."""
_FINDINGS = 6
"""Most findings that are shown."""
_CALLERS = 1
"""Lines of callers that are shown of a place whose innermost line is not of a cell."""
_OTHERWISE = {
    Cause.DIFFERENT: ("called different collectives", "call the same ones in the same order on all ranks"),
    Cause.TENSORS: ("passed tensors of different shape or dtype", "pass the same shape and dtype on all ranks"),
    Cause.ROOT: ("passed different src or dst ranks", "pass the same src or dst on all ranks"),
    Cause.REDUCTION: ("passed different reduction ops", "pass the same op on all ranks"),
    Cause.GROUPS: (
        "wait for each other in different groups",
        "use groups in the same order on all ranks, and pass group= on all of them",
    ),
    Cause.MESSAGES: (
        "wait for messages that do not match",
        "let one side send while the other receives, with the same tag and group, or use isend and irecv",
    ),
    Cause.CYCLE: ("wait for each other", "break the cycle: let one of them answer before it waits"),
}
_RELEASE = "release the lock before waiting for other ranks, or take it on one rank only"
_STATES = {
    Kind.IDLE: "idle after finishing the call",
    Kind.DEAD: "dead",
    Kind.SUSPENDED: "suspended by a signal (SIGSTOP)",
    Kind.PAUSED: "paused by the debugger",
    Kind.SILENT: "not answering",
    Kind.GIL: "in C code that holds the GIL",
    Kind.GPU: "waiting for its GPU",
    Kind.BROKEN: "in a collective of a call that ended with the failure of another rank",
    Kind.C_CODE: "in C code that has released the GIL",
    Kind.PYTHON: "running Python",
    Kind.SLEEP: "asleep",
    Kind.LOCK: "waiting for a lock",
    Kind.EVENT: "waiting for an event or condition",
    Kind.QUEUE: "waiting on a queue",
    Kind.THREAD: "waiting for a thread",
    Kind.CHILD: "waiting for a child process",
    Kind.SOCKET: "waiting for a socket",
    Kind.PIPE: "waiting for a pipe",
    Kind.FILE: "waiting for a file",
    Kind.ASYNC: "at an await",
    Kind.FUTURE: "waiting for an answer",
}
_ADVICE = {
    Kind.SUSPENDED: "resume its process with kill -CONT",
    Kind.PAUSED: "resume it with %mesh resume or mesh.resume()",
    Kind.DEAD: "heal or restart the mesh",
    Kind.BROKEN: "if Stop does not end it, kill its process, as with %mesh kill",
}


def describe_diagnosis(diagnosis: Diagnosis, names: Mapping[str, str] | None = None) -> str:
    """Return all that a diagnosis says.

    Args:
        diagnosis: to describe.
        names: the names of process meshes, by uid, if there are several.
    """
    lines = [line for each in diagnosis.findings[:_FINDINGS] for line in _lines(each, names or {})]
    if len(diagnosis.findings) > _FINDINGS:
        lines.append(f"{len(diagnosis.findings) - _FINDINGS} more findings")
    if not any(each.level is not Level.SLOW for each in diagnosis.findings):
        lines.insert(0, "nothing appears to be stuck")
    idle = [rank for each in diagnosis.others if each.kind is Kind.IDLE for rank in each.ranks]
    active = [each for each in diagnosis.others if each.kind is not Kind.IDLE]
    lines += [f"  {place_text(each, names or {})}" for each in active[:_SHOWN]]
    if idle:
        lines.append(f"  {describe_ranks(idle)} {'is' if len(idle) == 1 else 'are'} idle")
    return "\n".join(lines)


def describe_finding(finding: Finding, names: Mapping[str, str] | None = None, label: str = "") -> str:
    """Return what a finding says: a heading, the places, and what to do.

    Args:
        finding: to describe.
        names: the names of process meshes, by uid, if there are several.
        label: what the heading begins with; empty for how sure the finding is.
    """
    return "\n".join(_lines(finding, names or {}, label))


def _lines(finding: Finding, names: Mapping[str, str], label: str = "") -> list[str]:
    places = [*finding.waiting, *(finding.missing if not _says_all(finding, names) else ())]
    lines = [f"{label or _label(finding)}: {_heading(finding, names)}"]
    lines += [f"  {place_text(each, names)}" for each in places[:_SHOWN]]
    if len(places) > _SHOWN:
        lines.append(f"  {sum(len(each.ranks) for each in places[_SHOWN:])} ranks elsewhere")
    # A Stop, which the label tells of, has ended pauses.
    over = bool(label) and any(each.kind is Kind.PAUSED for each in finding.missing)
    advice = "" if over else _advice(finding)
    return [*lines, f"  {advice}"] if advice else lines


def _label(finding: Finding) -> str:
    return "in progress" if finding.level is Level.SLOW else finding.level.value


def _heading(finding: Finding, names: Mapping[str, str]) -> str:
    waiting = describe_ranks(_ranks(finding.waiting))
    if finding.cause in _OTHERWISE:
        what, _ = _OTHERWISE[finding.cause]
        return f"{waiting} {what}, so none of them can continue"
    if finding.cause is Cause.TOGETHER:
        if finding.missing:
            return f"{waiting} {_verb(finding.waiting)} for {describe_ranks(_ranks(finding.missing))}"
        return f"{waiting} {'is' if len(_ranks(finding.waiting)) == 1 else 'are'} in the same operation"
    if finding.cause is Cause.BLOCKED:
        one = len(_ranks(finding.waiting)) == 1
        return f"{waiting} {'is' if one else 'are'} {_state(finding.waiting[0])}{_outside(finding.outside, names)}"
    states = _missing_states(finding)
    which = f", which {states[0]}" if len(states) == 1 else ""
    return f"{waiting} {_verb(finding.waiting)} for {describe_ranks(_ranks(finding.missing))}{which}"


def _missing_states(finding: Finding) -> list[str]:
    """Return the different states of the ranks that are waited for, each with its verb."""
    if _has_skipped(finding):
        return [f"finished without calling {_call(finding)}"]
    dead = all(each.kind is Kind.DEAD and each.what for each in finding.missing)
    verb = "" if dead else "is " if len(_ranks(finding.missing)) == 1 else "are "
    return list(dict.fromkeys(f"{verb}{_state(each)}" for each in finding.missing))


def _has_skipped(finding: Finding) -> bool:
    """Return whether ranks have ended without the collective that others wait in."""
    entered = [each.entered for each in finding.waiting if each.entered is not None]
    others = any(each.advice or each.what or each.kind is not Kind.IDLE for each in finding.missing)
    skipped = finding.cause is Cause.IDLE and bool(finding.missing) and not others
    return skipped and bool(entered) and not any(each.is_message for each in entered)


def _call(finding: Finding) -> str:
    operation = next((each.entered.operation for each in finding.waiting if each.entered is not None), "")
    return f"{operation}()" if operation else "this collective"


def _says_all(finding: Finding, names: Mapping[str, str]) -> bool:
    """Return whether the heading has all that lines about the missing ranks would say."""
    if finding.cause in (*_OTHERWISE, Cause.TOGETHER, Cause.BLOCKED) or len(_missing_states(finding)) != 1:
        return False
    return all(place_text(each, names) == f"{describe_ranks(each.ranks)} {_state(each)}" for each in finding.missing)


def _outside(targets: Sequence[Target], names: Mapping[str, str]) -> str:
    if not targets:
        return ""
    by_mesh: dict[str, list[int]] = {}
    for each in targets:
        by_mesh.setdefault(each.uid, []).append(each.rank)
    return " from " + ", ".join(
        f"{describe_ranks(ranks)} of {names.get(uid, 'another mesh')}" for uid, ranks in by_mesh.items()
    )


def _advice(finding: Finding) -> str:
    if finding.cause is Cause.CYCLE and any(each.kind is Kind.LOCK for each in finding.waiting):
        return _RELEASE
    if finding.cause in _OTHERWISE:
        return _OTHERWISE[finding.cause][1]
    given = [each.advice or _ADVICE.get(each.kind, "") for each in finding.missing or finding.waiting]
    if given[0]:
        return given[0]
    missing = _ranks(finding.missing)
    if not missing or not any(each.entered is not None for each in finding.waiting):
        return ""
    is_message = any(each.entered.is_message for each in finding.waiting if each.entered is not None)
    if is_message:
        return f"no rank has made the call that matches {_call(finding)}; make it on {describe_ranks(missing)}"
    if finding.cause is Cause.UNLIKE:
        verb = "has" if len(missing) == 1 else "have"
        return (
            f"{describe_ranks(missing)} {verb} finished after the same number of operations in the group, so the "
            f"tensors may differ in shape or dtype; to compare the calls, run %mesh check on and then the cell"
        )
    if finding.cause is Cause.IDLE:
        everywhere = "call it on all ranks of the group"
        skipped = f"{describe_ranks(missing)} finished without calling {_call(finding)}; {everywhere}"
        return everywhere if _has_skipped(finding) else skipped
    return ""


def place_text(each: Standing, names: Mapping[str, str]) -> str:
    """Return where ranks are, in one line, and below it where their child processes are."""
    mesh = f"{names[each.uid]}: " if each.uid in names and len(names) > 1 else ""
    text = f"{mesh}{describe_ranks(each.ranks)} {_what(each)}"
    if each.seconds >= 1:
        text += f" for {duration_text(int(each.seconds))}"
    if each.title:
        text += f" (running {each.title})"
    return "\n    ".join([text + _at(each.frames), *each.children])


def _what(each: Standing) -> str:
    if each.entered is not None and each.kind is Kind.GPU:
        return f"{_STATES[Kind.GPU]}, which is in {entered_text(each.entered)}"
    if each.entered is not None:
        return f"in {entered_text(each.entered)}" + (f" in {each.what}" if each.what else "")
    return _state(each)


def _state(each: Standing) -> str:
    state = _STATES.get(each.kind, each.kind.value)
    if each.kind in (Kind.DEAD, Kind.IDLE):
        return each.what or state
    return f"{state}: {each.what}" if each.what else state


def entered_text(entered: Entered) -> str:
    """Return a collective with what distinguishes it, as in ``all_reduce of float32[2] (#3 of the default group)``."""
    text = entered.operation or "a collective"
    if entered.tensors:
        text += f" of {entered.tensors}"
    details = [entered.reduction] if entered.reduction and entered.reduction != "sum" else []
    if entered.is_message and entered.peers:
        others = describe_ranks(entered.peers)
        details.append(f"{'from' if 'recv' in entered.operation else 'to'} {others}")
    elif entered.root >= 0:
        details.append(f"root {entered.root}")
    if entered.tag:
        details.append(f"tag {entered.tag}")
    group = _group_text(entered)
    details.append(f"#{entered.number} of {group}" if entered.number else f"of {group}")
    return f"{text} ({', '.join(details)})"


def _group_text(entered: Entered) -> str:
    if entered.is_default:
        return "the default group"
    ranks = describe_ranks(entered.members)
    if entered.label.isdecimal():
        return f"group {entered.label} of {ranks}"
    return f"the group {entered.label!r} of {ranks}" if entered.label else f"the group of {ranks}"


def _at(frames: Sequence[Frame]) -> str:
    shown = list(frames[: _CALLERS + 1]) if frames and not frames[0].file.startswith("cell [") else list(frames[:1])
    return "".join(f"{' at' if at == 0 else ', called at'} {frame}" for at, frame in enumerate(shown))


def _verb(standings: Sequence[Standing]) -> str:
    return "waits" if len(_ranks(standings)) == 1 else "wait"


def _ranks(standings: Sequence[Standing]) -> list[int]:
    return sorted({rank for each in standings for rank in each.ranks})
