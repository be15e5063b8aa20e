"""Old values of variables that functions, classes and objects of cells have, after a copy has replaced them."""

from __future__ import annotations

from enum import Enum
from types import FunctionType
from typing import Any

import pytest

from monarch._notebook.variables.rebound import rebind

CELL = """
class Holder:
    net = model
    def method(self, model=model, *, rates=rates): return model, rates
    @staticmethod
    def static(model=model): return model
    def __init__(self): self.own, self.count, self.parts = rates, count, {"g": [model]}
def make(kept):
    def inner(): return kept
    return inner
inner = make(model)
@make
def wrapped(model=model): return model
def plain(model=model, count=count, mode=mode, pair=pair): return model, count, mode, pair
holder = Holder()
"""


class Mode(Enum):
    TRAIN = 1
    TEST = 2


@pytest.fixture
def variables() -> dict[str, Any]:
    found: dict[str, Any] = {
        "__name__": "__main__", "model": [1], "rates": {"lr": 1}, "count": 3, "mode": Mode.TRAIN, "pair": (1, [2]),
    }  # fmt: skip
    exec(CELL, found)
    return found


def test_functions_classes_and_objects_get_the_new_values(variables: dict[str, Any]) -> None:
    before = dict(variables)
    copied: dict[str, Any] = {"model": [10], "rates": {"lr": 10}}
    variables.update(copied)
    rebind(variables, before, copied)
    model, rates, holder = copied["model"], copied["rates"], variables["holder"]
    assert holder.net is model and holder.own is rates and holder.static() is model
    assert holder.method() == (model, rates)
    assert variables["inner"]() is model and variables["plain"]()[0] is model
    assert variables["wrapped"]()() is model and holder.parts["g"][0] is model


def test_values_that_are_shared_by_chance_stay(variables: dict[str, Any]) -> None:
    before = dict(variables)
    copied: dict[str, Any] = {"count": 4, "mode": Mode.TEST, "pair": (5, 6)}
    variables.update(copied)
    rebind(variables, before, copied)
    assert variables["plain"]()[1:] == (3, Mode.TRAIN, before["pair"])
    assert variables["holder"].count == 3


def test_code_that_raises_or_is_of_a_module_is_left_alone(variables: dict[str, Any]) -> None:
    def fails(_: object) -> None:
        raise ValueError

    def elsewhere(model: Any = variables["model"]) -> Any:
        return model

    odd = type("Odd", (), {"__dict__": property(fails), "__module__": "__main__"})
    variables.update(odd=odd(), elsewhere=elsewhere)
    before, copied = dict(variables), {"model": [10]}
    variables.update(copied)
    rebind(variables, before, copied)
    assert variables["plain"]()[0] == [10] and isinstance(elsewhere, FunctionType) and elsewhere() == [1]
