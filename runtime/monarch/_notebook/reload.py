"""An edited module runs again in its process, and can be put back as it was."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from monarch._node.services.registry import service
from monarch._python.sources import keep_source

_before: dict[int, tuple[ModuleType, dict[str, Any], dict[int, Any]]] = {}
"""Of each reload: the module, what was in it, and what each part of that is now, by the id of the old one. Any thread,
in single dict operations; the thread that runs the module fills the last part before others read it."""


@service("reload.reload_here", "threaded")
def reload_here(number: int, name: str, path: str, source: str) -> bool:
    """Run the new text of a module in it; what is not in the text any more stays, as with importlib.reload.

    Args:
        number: the number of this reload, to put it back by.
        name: the name of the module.
        path: the path of its file, for tracebacks.
        source: its new text.

    Returns:
        Whether this process has imported it; if not, there is nothing to do.
    """
    module = sys.modules.get(name)
    if module is None or number in _before:
        return module is not None
    old = dict(vars(module))
    _before[number] = (module, old, {})
    keep_source(path, source)
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        restore(number)
        raise
    news = _before[number][2]
    for key, value in old.items():
        new = module.__dict__.get(key)
        if new is not value and getattr(value, "__module__", None) == name:
            news[id(value)] = new
    variables = sys.modules["__main__"].__dict__
    for key, value in list(variables.items()):
        if id(value) in news:
            variables[key] = news[id(value)]
    return True


def renamed(number: int, old: Any) -> Any:
    """Return the new version of an object of a reloaded module; other objects themselves."""
    found = _before.get(number)
    return found[2].get(id(old), old) if found is not None else old


@service("reload.restore", "threaded")
def restore(number: int) -> None:
    """Put a module back as it was before a reload."""
    found = _before.pop(number, None)
    if found is None:
        return
    module, old, news = found
    variables = sys.modules["__main__"].__dict__
    olds = {id(new): old_value for old_value in old.values() if (new := news.get(id(old_value))) is not None}
    for key, value in list(variables.items()):
        if id(value) in olds:
            variables[key] = olds[id(value)]
    module.__dict__.clear()
    module.__dict__.update(old)


@service("reload.forget", "threaded")
def forget(number: int) -> None:
    """Make a reload final."""
    _before.pop(number, None)
