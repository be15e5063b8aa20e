"""Actions after the first import of a module: ranks adapt libraries that the program imports, and import none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[Any], None]


def when_imported(name: str, action: Action) -> None:
    """Call a function with a module, now or right after its first import."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    _finder.actions[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    """Finds the modules that have actions, with the help of the finders after it."""

    def __init__(self) -> None:
        # Single dict operations; imports of one module are serialized by its lock.
        self.actions: dict[str, Action] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        action = self.actions.get(fullname)
        if action is None:
            return None
        for finder in list(sys.meta_path):
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, action)
                return spec
        return None


class _Loader(Loader):
    """Loads a module as its own loader does, and then runs the action."""

    def __init__(self, loader: Any, action: Action) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            # As if it had been loaded without this.
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            self._action(module)
        except Exception as error:
            # Another version of the library: it works as it does without a notebook.
            print(f"monarch: cannot adapt {module.__name__}: {type(error).__name__}: {error}", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_finder = _Finder()
