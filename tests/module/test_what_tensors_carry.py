"""Attributes that the user gives to tensors, modules that a forward imports, and what PyTorch's own are asked for."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import DebugOptions, ORTModule

WAYS = ["export", "dynamo"]


class Carrying(nn.Module):
    """A linear layer, scaled by what is asked of a tensor."""

    def __init__(self, factor: Callable[[Carrying, Any], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tables = [torch.ones(3)]
        self.factor = factor

    def forward(self, x: Tensor, more: dict[str, Tensor] | None = None) -> Tensor:
        return self.layer(x) * self.factor(self, x if more is None else more["x"])


def by_getattr(m: Carrying, x: Tensor) -> float:
    return getattr(x, "scale", 1.0)


def by_hasattr(m: Carrying, x: Tensor) -> float:
    return 3.0 if hasattr(x, "scale") else 1.0


def by_trying(m: Carrying, x: Tensor) -> float:
    try:
        return x.scale  # type: ignore[attr-defined]
    except AttributeError:
        return 1.0


def of_a_weight(m: Carrying, x: Tensor) -> float:
    return getattr(m.layer.weight, "scale", 1.0)


def of_a_tensor_in_a_list(m: Carrying, x: Tensor) -> float:
    return getattr(m.tables[0], "scale", 1.0)


def both(factor: Callable[[Carrying, Any], float], way: str) -> tuple[Carrying, Carrying]:
    eager = Carrying(factor)
    ours: Any = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo") if way == "dynamo" else None)
    return eager, ours


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a dict"])
@pytest.mark.parametrize("factor", [by_getattr, by_hasattr, by_trying])
def test_an_attribute_of_an_input_that_was_not_there_before(
    factor: Callable[[Carrying, Any], float], nested: bool, way: str
) -> None:
    eager, ours = both(factor, way)
    plain, scaled = torch.randn(2, 4), torch.randn(2, 4)
    scaled.scale = 3.0  # type: ignore[attr-defined]
    for x in (plain, scaled, plain, scaled):
        args = (plain, {"x": x}) if nested else (x,)
        torch.testing.assert_close(ours(*args), eager(*args))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("factor", [of_a_weight, of_a_tensor_in_a_list])
def test_an_attribute_of_a_tensor_of_the_module(factor: Callable[[Carrying, Any], float], way: str) -> None:
    pair = both(factor, way)
    x = torch.randn(2, 4)

    def compare() -> None:
        eager, ours = pair
        torch.testing.assert_close(ours(x), eager(x))

    compare()
    for m in pair:
        (m.layer.weight if factor is of_a_weight else m.tables[0]).scale = 3.0  # type: ignore[union-attr]
    compare()
    for m in pair:
        del (m.layer.weight if factor is of_a_weight else m.tables[0]).scale  # type: ignore[union-attr]
    compare()


def test_attributes_that_nobody_asks_for_change_nothing() -> None:
    _, ours = both(lambda _m, _x: 2.0, "export")
    x = torch.randn(2, 4)
    ours(x)
    x.note = "mine"  # type: ignore[attr-defined]
    ours.layer.weight.other = 1  # type: ignore[attr-defined]
    ours(x)
    assert ours.stats()["graphs"] == 1 and not ours.fallback_report()


class Importing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            import plugin_of_a_test
        except ImportError:
            return self.layer(x)
        return self.layer(x) * plugin_of_a_test.gain


class Taking(Importing):
    def forward(self, x: Tensor) -> Tensor:
        from plugin_of_a_test import gain

        return self.layer(x) * gain


NAME = "plugin_of_a_test"


def plugin(gain: float) -> types.ModuleType:
    module = types.ModuleType(NAME)
    module.gain = gain  # type: ignore[attr-defined]
    return module


@pytest.fixture
def _no_plugin() -> Iterator[None]:
    yield
    sys.modules.pop(NAME, None)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.usefixtures("_no_plugin")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Importing, Taking])
def test_a_module_that_the_forward_imports(kind: type[Importing], way: str) -> None:
    eager = kind()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo") if way == "dynamo" else None)
    x = torch.randn(2, 4)
    modules = [plugin(3.0), plugin(5.0)] if kind is Taking else [None, plugin(3.0), plugin(5.0), None]
    for module in modules:
        sys.modules.pop(NAME, None)
        if module is not None:
            sys.modules[NAME] = module
        torch.testing.assert_close(ours(x), eager(x))
    if kind is Taking:
        sys.modules[NAME].gain = 7.0  # type: ignore[attr-defined]
        torch.testing.assert_close(ours(x), eager(x))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("way", WAYS)
def test_what_the_torch_module_is_asked_for(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def factor(_m: Carrying, _x: Tensor) -> float:
        return (2.0 if hasattr(torch, "flag_of_a_test") else 1.0) * getattr(nn.functional, "gain_of_a_test", 1.0)

    eager, ours = both(factor, way)
    x = torch.randn(2, 4)
    torch.testing.assert_close(ours(x), eager(x))
    monkeypatch.setattr(torch, "flag_of_a_test", 1, raising=False)
    torch.testing.assert_close(ours(x), eager(x))
    for gain in (3.0, 4.0):
        monkeypatch.setattr(nn.functional, "gain_of_a_test", gain, raising=False)
        torch.testing.assert_close(ours(x), eager(x))


def by_alias(_m: Carrying, _x: Tensor) -> float:
    library = torch
    return 2.0 if hasattr(library, "flag_of_a_test") else 1.0


def by_computed_name(_m: Carrying, _x: Tensor) -> float:
    name = "flag_of_a_test"
    return 2.0 if hasattr(torch, name) else 1.0


def by_trying_torch(_m: Carrying, _x: Tensor) -> float:
    try:
        return 1.0 + torch.flag_of_a_test  # type: ignore[attr-defined]
    except AttributeError:
        return 1.0


def by_importing(_m: Carrying, _x: Tensor) -> float:
    try:
        from torch import flag_of_a_test  # type: ignore[attr-defined]
    except ImportError:
        return 1.0
    return 1.0 + flag_of_a_test


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("factor", [by_alias, by_computed_name, by_trying_torch, by_importing])
def test_what_comes_to_be_in_the_torch_module(
    monkeypatch: pytest.MonkeyPatch, factor: Callable[[Carrying, Any], float], way: str
) -> None:
    eager, ours = both(factor, way)
    x = torch.randn(2, 4)
    torch.testing.assert_close(ours(x), eager(x))
    monkeypatch.setattr(torch, "flag_of_a_test", 1, raising=False)
    torch.testing.assert_close(ours(x), eager(x))


def of_what_is_imported(_m: Carrying, _x: Tensor) -> float:
    import plugin_of_a_test

    return getattr(plugin_of_a_test, "later", 1.0)


def of_an_inner_module(_m: Carrying, _x: Tensor) -> float:
    import plugin_of_a_test.inner

    return plugin_of_a_test.inner.gain * plugin_of_a_test.gain


def of_an_inner_module_as(_m: Carrying, _x: Tensor) -> float:
    import plugin_of_a_test.inner as within

    return within.gain


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.usefixtures("_no_plugin")
@pytest.mark.parametrize("factor", [of_what_is_imported, of_an_inner_module, of_an_inner_module_as])
def test_what_is_in_modules_that_the_forward_imports(factor: Callable[[Carrying, Any], float]) -> None:
    outer, inner = plugin(3.0), plugin(2.0)
    outer.inner, outer.__path__ = inner, []  # type: ignore[attr-defined]
    sys.modules |= {NAME: outer, f"{NAME}.inner": inner}
    try:
        eager, ours = both(factor, "export")
        x = torch.randn(2, 4)
        torch.testing.assert_close(ours(x), eager(x))
        outer.later = 5.0  # type: ignore[attr-defined]
        torch.testing.assert_close(ours(x), eager(x))
        outer.gain = 4.0  # type: ignore[attr-defined]
        torch.testing.assert_close(ours(x), eager(x))
        outer.inner = plugin(7.0)  # type: ignore[attr-defined]
        torch.testing.assert_close(ours(x), eager(x))
    finally:
        sys.modules.pop(f"{NAME}.inner", None)


def by_a_pattern(_m: Carrying, x: Tensor) -> float:
    match x:
        case object(scale=factor):
            return factor
    return 1.0


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_an_attribute_that_a_pattern_asks_for() -> None:
    eager, ours = both(by_a_pattern, "export")
    x, scaled = torch.randn(2, 4), torch.randn(2, 4)
    scaled.scale = 3.0  # type: ignore[attr-defined]
    for given in (x, scaled, x):
        torch.testing.assert_close(ours(given), eager(given))
