"""The commands of all prompts, in notebooks, terminals and ``monarch debug``; their names are those of pdb."""

from __future__ import annotations

from typing import Literal

from monarch._actors.pausing.tracing import FINISH, INTO, NEXT, UNTIL

STEPS = (NEXT, INTO, UNTIL, FINISH)
_SHORT = {
    "n": "next", "s": "step", "unt": "until", "r": "finish", "return": "finish", "c": "continue", "cont": "continue",
    "resume": "continue", "w": "where", "bt": "where", "p": "print", "pp": "print", "ranks": "rank", "u": "up",
    "d": "down", "l": "list", "ll": "longlist", "a": "args", "locals": "vars", "q": "quit", "exit": "quit",
    "exit()": "quit", "quit()": "quit", "EOF": "quit", "\x04": "quit", "stop": "quit", "h": "help", "?": "help",
    "b": "break",
}  # fmt: skip
"""``\\x04`` is what ``jupyter console`` sends for Ctrl-D."""
_ALONE = {"next", "step", "finish", "continue", "where", "quit", "longlist", "args", "breaks", "forget"}
_WITH_NUMBER = {"until", "up", "down", "frame", "list"}
_WITH_WORDS = {"print", "rank", "break", "clear", "vars", "whatis", "help"}
_REPEATED = {*STEPS, "continue", "up", "down", "list", "where"}
_OPERATORS = ("=", "(", ".", "[", "+", "-", "*", "/", "%", "<", ">", "|", "&", "^", "@", ":", ",")
VALUE, RUN, WRONG = "value", "run", "wrong"
"""Of a line that is no command: an expression, statements, or no Python."""
HELP = """next, step        step over to the next line, or into a call
until [LINE]      run until a later line, for example out of a loop
finish            run until the function returns
continue          continue, together with the ranks that wait for this one
where             the stacks
up, down [N]      select the caller, or the function that it calls; frame N selects the N-th frame
list [LINE]       the source around the line; again for the lines below, and longlist for the whole function
args, vars        the arguments of the function, or its variables
print EXPR, EXPR  the value of an expression; whatis EXPR its type
STATEMENT         runs in the selected frame, as in x = 5; !STATEMENT if it begins like a command
rank N            look at other ranks, as in rank 2, rank 0,2 or rank all; rank lists them
Enter             repeats the last command that stepped or moved"""


def parse_command(line: str, more: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the command of a line and the rest: VALUE, RUN or WRONG for another line, and nothing for nothing.

    Args:
        line: as typed.
        more: commands that only this prompt has, alone or with a name.
    """
    line = line.strip()
    if line.startswith("!"):
        return _code(line[1:].strip())
    word, _, rest = line.partition(" ")
    word, rest = _SHORT.get(word, word), rest.strip()
    # A variable of the same name as a command is seen with print.
    if (word in _ALONE and not rest) or (word in more and (not rest or rest.partition("#")[0].isidentifier())):
        return word, rest
    if word == UNTIL:
        rest = rest.removeprefix("--line").strip()
    if word in _WITH_NUMBER and (not rest or rest.isdecimal() or (word == "list" and rest == ".")):
        return word, rest
    if word in _WITH_WORDS and not rest.startswith(_OPERATORS):
        return word, rest
    return _code(line)


class Reader:
    """Reads the lines of a prompt; of the thread that asks.

    Args:
        more: see ``parse_command``.
    """

    def __init__(self, more: tuple[str, ...] = ()) -> None:
        self._more = more
        self._last = "", ""

    def read(self, line: str) -> tuple[str, str]:
        """Return the command of a line and the rest, as ``parse_command``; an empty line repeats some commands."""
        if not line.strip():
            return self._last
        found = parse_command(line, self._more)
        self._last = found if found[0] in _REPEATED else ("", "")
        return found


def unknown(line: str) -> str:
    """Say that a line is neither a command nor Python."""
    return f"{line.strip()!r} is not a command here; help lists them"


def _code(text: str) -> tuple[str, str]:
    if not text:
        return "", ""
    modes: tuple[tuple[Literal["eval", "exec"], str], ...] = (("eval", VALUE), ("exec", RUN))
    for mode, kind in modes:
        try:
            compile(text, "<prompt>", mode)
        except (SyntaxError, ValueError):
            continue
        return kind, text
    return WRONG, text


def numbered(line: int, first: int, lines: list[str]) -> str:
    """Return source with the numbers of its lines, and an arrow at the current one."""
    width = len(str(first + len(lines)))
    return "\n".join(f"{'->' if at == line else '  '} {at:{width}}  {text}" for at, text in enumerate(lines, first))
