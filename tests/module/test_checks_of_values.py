"""What a forward asserts of the values of its tensors holds, or raises, as in eager."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from by_dynamo import compiled
from checking import CHECKS, by_assertion, by_deferred_function, by_distribution, caught
from ortmodule_c import DebugOptions, ORTModule, ORTModuleError
from wrapped import Function, assert_same_step, pair

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore:ortmodule_c")]
GOOD, BAD = torch.ones(2, 4), torch.full((2, 4), torch.nan)


def error_of(call: Any, *args: Any) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as raised:
        call(*args)
    return raised.type, str(raised.value)


@pytest.mark.parametrize("capture", ["auto", "export", "dynamo"])
@pytest.mark.parametrize("forward", CHECKS)
def test_a_check_raises_what_it_raises_in_eager(forward: Any, capture: Any) -> None:
    eager = Function(forward)
    ours = ORTModule(Function(forward), DebugOptions(capture=capture))
    assert error_of(ours, BAD) == error_of(eager, BAD)
    assert_same_step(eager, ours, GOOD)
    assert error_of(ours, BAD) == error_of(eager, BAD)
    with torch.no_grad():
        assert error_of(ours, BAD) == error_of(eager, BAD)
    assert_same_step(eager, ours, GOOD)


def test_an_assertion_that_is_caught() -> None:
    eager, ours = pair(Function(caught))
    for x in (GOOD, BAD, GOOD):
        assert_same_step(eager, ours, x)


@pytest.mark.parametrize("forward", [by_assertion, by_deferred_function])
def test_a_check_in_a_graph_of_dynamos_raises_what_dynamo_makes_of_it(forward: Any) -> None:
    ours, dynamos = compiled(Function(forward)), torch.compile(Function(forward), backend="eager")
    for model in (ours, dynamos):
        model(GOOD)
    assert error_of(ours, BAD) == error_of(dynamos, BAD) == (RuntimeError, "x is not finite")


def test_a_check_that_may_not_run_in_pytorch_is_refused() -> None:
    ours = ORTModule(Function(by_deferred_function), DebugOptions(fallback="error"))
    with pytest.raises(ORTModuleError, match="_assert_async"):
        ours(GOOD)


def test_distributions_elsewhere_check_what_they_are_given() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ORTModule(Function(by_distribution), DebugOptions(capture="dynamo"))(GOOD)
    with pytest.raises(ValueError, match="scale"):
        Normal(torch.zeros(1), -torch.ones(1))


def test_a_distribution_that_is_not_to_check_stays_in_the_graph() -> None:
    def forward(_s: Any, x: Tensor) -> Tensor:
        return Categorical(logits=x * x, validate_args=False).entropy()

    eager, ours = pair(Function(forward))
    assert_same_step(eager, ours, torch.randn(3, 4))
    assert ours.stats()["graph_breaks"] == 0
    assert ours.stats()["graphs"] > 0


@pytest.mark.parametrize("check", [torch._assert, lambda met, said: torch._check(met, lambda: said)])
def test_a_check_of_a_size_stays_in_the_graph_and_holds_for_the_next_size(check: Any) -> None:
    def forward(_s: Any, x: Tensor) -> Tensor:
        check(x.shape[0] % 2 == 0, "an odd number of rows")
        check(x.ndim == 2, "not a matrix")
        return x * x

    eager = Function(forward)
    ours = ORTModule(Function(forward), DebugOptions(capture="export", fallback="error"))
    for rows in (2, 4, 6):
        assert_same_step(eager, ours, torch.ones(rows, 4))
    for bad in (torch.ones(3, 4), torch.ones(2, 4, 1)):
        assert error_of(ours, bad) == error_of(eager, bad)
    assert_same_step(eager, ours, torch.ones(8, 4))
