"""Methods of a module that train past its wrapper run in PyTorch, and say so."""

import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.criterion = nn.Linear(5, 4), nn.Linear(4, 3), nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))

    def by_itself(self, x: Tensor) -> Tensor:
        return self.criterion(self(x), torch.zeros(len(x), 3))

    def by_a_part(self, x: Tensor) -> Tensor:
        return self.body(x).square().sum()

    def by_parts(self, x: Tensor) -> Tensor:
        rows = [self.head(row) for row in x[:, 1:]]
        return sum((self.body(row) for row in x), torch.zeros(4)).sum() + torch.stack(rows).sum()

    def by_type(self, x: Tensor) -> Tensor:
        return self(x).sum() * len(type(self).__name__)

    def looks_at_a_part(self, x: Tensor) -> Tensor:
        return self(x).sum() + self.body.weight.sum() + len(list(self.body.parameters()))


class Shadowing(Net):
    def stats(self) -> dict[str, int]:
        return {}


X = torch.linspace(-1, 1, 15).reshape(3, 5)


def told(model: nn.Module, method: str) -> list[str]:
    """The warnings of two steps by a method; its loss and gradients are eager's."""
    steps: list[list[Tensor]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for m in (getattr(model, "module", model), model, model):
            model.zero_grad()
            loss = getattr(m, method)(X)
            loss.backward()
            steps.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for step in steps[1:]:
        torch.testing.assert_close(step, steps[0])
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("method", ["by_itself", "looks_at_a_part"])
def test_a_method_that_calls_the_wrapper_says_nothing(method: str) -> None:
    model = ORTModule(Net())
    assert told(model, method) == [] and model.fallback_report() == [] and model.stats()["graphs"] == 1


@pytest.mark.parametrize(("method", "parts"), [("by_a_part", ["body"]), ("by_parts", ["body", "head"])])
def test_a_method_that_calls_a_part_is_told_once(method: str, parts: list[str]) -> None:
    model = ORTModule(Net())
    messages = told(model, method)
    assert len(messages) == len(parts)
    for message, part in zip(messages, parts, strict=True):
        assert f"Net.{method} runs in PyTorch" in message and f"self.{part}(...)" in message
    assert [(r.name, r.count) for r in model.fallback_report()] == [(f"Net.{method}", 1)] * len(parts)


@pytest.mark.parametrize(("make", "why"), [(Net, "asks for the type"), (Shadowing, "has a 'stats' too")])
def test_a_method_that_is_the_modules_own_is_told(make: Callable[[], Net], why: str) -> None:
    (message,) = told(ORTModule(make()), "by_type")
    assert f"{make.__name__}.by_type runs in PyTorch" in message and why in message


def test_what_does_not_train_is_not_told() -> None:
    model = ORTModule(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model.by_a_part(X)
        model.eval().by_a_part(X)
        model.train()
        model.body.requires_grad_(False)
        model.by_a_part(X)


def test_a_part_with_a_wrapper_of_its_own_is_not_past_it() -> None:
    module: Any = Net()
    module.body = ORTModule(module.body)
    assert told(ORTModule(module), "by_a_part") == [] and module.body.stats()["graphs"] == 1


def test_a_lookup_says_nothing() -> None:
    model = ORTModule(Net(), DebugOptions(fallback="error"))
    assert hasattr(model, "by_a_part") and dict(inspect.getmembers(model))["by_parts"].__name__ == "by_parts"
    assert inspect.signature(model.by_a_part) == inspect.signature(model.module.by_a_part)
    assert pickle.loads(pickle.dumps(model)).by_itself(X).isfinite() and model.fallback_report() == []


@torch.no_grad()
def evaluated(self: Net, x: Tensor) -> Tensor:
    return self.body(x)


def test_a_method_that_turns_gradients_off_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "evaluated", evaluated, raising=False)
    model: Any = ORTModule(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not model.evaluated(X).requires_grad


def test_it_is_an_error_where_falling_back_is() -> None:
    model = ORTModule(Net(), DebugOptions(fallback="error"))
    for _ in range(2):
        with pytest.raises(ORTModuleError, match=r"Net.by_a_part cannot run in ortmodule_c \(it calls self.body"):
            model.by_a_part(X)
    model.by_itself(X).backward()
