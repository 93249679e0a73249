"""What ortmodule_c does wrong while it makes a graph is told apart from what it refuses: an error in tests."""

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._ops import OpOverload

from ortmodule_c import ORTModule
from ortmodule_c.errors import Mistake, Unsupported
from ortmodule_c.lowering.builder import Builder, Val
from ortmodule_c.lowering.translations import TABLE
from wrapped import assert_same_step, pair

aten = torch.ops.aten


def relu_of_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@pytest.fixture(params=["export", "dynamo"])
def capture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("ORTMODULE_CAPTURE", request.param)
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


@pytest.fixture
def debug_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "ortmodule_c")
    monkeypatch.setattr(logging.getLogger("ortmodule_c"), "propagate", True)
    return caplog


def translate_relu(monkeypatch: pytest.MonkeyPatch, error: Exception, when: str = "") -> None:
    """Have the translation of relu raise, always or for symbolic sizes alone."""
    right = TABLE[aten.relu.default]

    def wrong(b: Builder, x: Val) -> Any:
        if when == "open" and all(isinstance(s, int) for s in x.dims):
            return right(b, x)
        raise error

    monkeypatch.setitem(TABLE, aten.relu.default, wrong)


def told(log: pytest.LogCaptureFixture, what: str) -> bool:
    """Whether the traceback of an error was logged at DEBUG."""
    return any(r.levelno == logging.DEBUG and r.exc_info and what in str(r.exc_info[1]) for r in log.records)


@pytest.mark.parametrize("error", [TypeError("wrong"), KeyError("wrong"), AssertionError("wrong")], ids=repr)
@pytest.mark.parametrize("when", ["always", "open"])
def test_in_a_test_a_mistake_of_a_translation_is_an_error(
    capture: str, error: Exception, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate_relu(monkeypatch, error, when)
    ours = ORTModule(relu_of_linear())
    with pytest.raises(Mistake, match=r"aten\.relu\.default.*wrong") as caught:
        for batch in (3, 5):
            ours(torch.randn(batch, 4))
    assert caught.value.__cause__ is error


def test_in_a_test_a_mistake_of_the_lowering_is_an_error(capture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortmodule_c.lowering.lower._source", lambda node: 1 / 0)
    with pytest.raises(Mistake, match="division by zero"):
        ORTModule(relu_of_linear())(torch.randn(3, 4))


@pytest.mark.parametrize(
    "wrong", [lambda b, x: b.unsqueeze(x, 0), lambda b, x: b.transpose(x, [1, 0])], ids=["rank", "order"]
)
def test_a_translation_with_results_of_other_sizes_than_pytorch_is_mistaken(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, aten.relu.default, wrong)
    with pytest.raises(Mistake, match=r"aten\.relu\.default"):
        ORTModule(relu_of_linear())(torch.randn(3, 4))


@pytest.mark.usefixtures("users")
def test_for_users_the_op_of_a_mistaken_translation_runs_in_pytorch(
    capture: str, monkeypatch: pytest.MonkeyPatch, debug_log: pytest.LogCaptureFixture
) -> None:
    translate_relu(monkeypatch, ZeroDivisionError("by design"))
    eager, ours = pair(relu_of_linear())
    assert_same_step(eager, ours, torch.randn(3, 4))
    [record] = ours.fallback_report()
    assert record.name == "aten.relu.default"
    assert record.cause.startswith("a mistake of ortmodule_c") and "ZeroDivisionError: by design" in record.cause
    assert told(debug_log, "by design")


@pytest.mark.usefixtures("users", "export_only")
def test_for_users_a_module_runs_in_pytorch_if_its_lowering_is_mistaken(
    monkeypatch: pytest.MonkeyPatch, debug_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ortmodule_c.lowering.lower._source", lambda node: 1 / 0)
    eager, ours = pair(relu_of_linear())
    assert_same_step(eager, ours, torch.randn(3, 4))
    [record] = ours.fallback_report()
    assert record.name == "Sequential"
    assert record.cause.startswith("a mistake of ortmodule_c") and "division by zero" in record.cause
    assert told(debug_log, "division by zero")


def test_what_a_translation_refuses_is_no_mistake(capture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    translate_relu(monkeypatch, Unsupported("not today"))
    eager, ours = pair(relu_of_linear())
    with pytest.warns(UserWarning, match=r"aten\.relu\.default runs in PyTorch: not today"):
        assert_same_step(eager, ours, torch.randn(3, 4))


@pytest.mark.usefixtures("export_only")
def test_memory_that_runs_out_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    translate_relu(monkeypatch, MemoryError("none left"))
    with pytest.raises(MemoryError, match="none left"):
        ORTModule(relu_of_linear())(torch.randn(3, 4))


@pytest.mark.parametrize("op", TABLE, ids=str)
def test_a_translation_takes_all_arguments_of_its_op(op: OpOverload) -> None:
    arguments = op._schema.arguments
    for given in (arguments, [a for a in arguments if not a.has_default_value()]):
        inspect.signature(TABLE[op]).bind(
            None, *[0 for a in given if not a.kwarg_only], **{a.name: 0 for a in given if a.kwarg_only}
        )
