"""What the core is given for an ATen op: one node where there is one that means it, refused where the core says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import graphs
from wrapped import Function, assert_same_step, pair

pytestmark = pytest.mark.usefixtures("export_only")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The ops of each graph that is made, as they come in."""
    made: list[list[str]] = []
    lower = graphs.lower

    def noting(*args: Any) -> Any:
        lowered = lower(*args)
        made.append([n.op_type for n in lowered.model.graph])
        return lowered

    monkeypatch.setattr(graphs, "lower", noting)
    return made


def of(function: Callable[[Any, Tensor], Any]) -> Function:
    w, b = torch.randn(5, 4), torch.randn(5)
    return Function(function, w=nn.Parameter(w), b=nn.Parameter(b), one=nn.Parameter(b[:1].clone()))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (4,), (0, 4), (1, 1, 4)], ids=str)
@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (lambda s, x: F.linear(x, s.w, s.b), ["FusedMatMul"]),
        (lambda s, x: F.linear(x, s.w), ["FusedMatMul"]),
        (lambda s, x: F.linear(x, s.w, s.one), ["FusedMatMul", "Add"]),
    ],
    ids=["with a bias", "without", "one number added to all"],
)
def test_linear_arrives_as_one_node(
    shape: tuple[int, ...], function: Any, ops: list[str], given: list[list[str]]
) -> None:
    assert_same_step(*pair(of(function)), torch.randn(shape))
    assert given == [ops]


def test_a_product_takes_its_bias_along(given: list[list[str]]) -> None:
    assert_same_step(*pair(of(lambda s, x: torch.addmm(s.b, x, s.w.t()))), torch.randn(3, 4))
    assert given == [["Transpose", "FusedMatMul"]]


@pytest.mark.parametrize("shape", [(2, 3, 8), (3, 8), (1, 1, 8)], ids=str)
@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda s, x: F.max_pool1d(x, 3, 2, 1), "MaxPool"),
        (lambda s, x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True), "AveragePool"),
        (lambda s, x: F.adaptive_avg_pool1d(x, 3), "AdaptiveAvgPool"),
    ],
    ids=["max", "average", "adaptive"],
)
def test_pooling_over_one_dim_is_one_node(
    shape: tuple[int, ...], function: Any, op: str, given: list[list[str]]
) -> None:
    eager, ours = pair(Function(lambda s, x: function(s, s.l(x)), l=nn.Linear(8, 8)))
    assert_same_step(eager, ours, torch.randn(shape))
    assert given == [["FusedMatMul", op]]


def test_the_core_says_why_an_op_runs_in_pytorch() -> None:
    eager, ours = pair(Function(lambda s, x: (y := s.l(x), *(y > 0).aminmax()), l=nn.Linear(2, 2)))
    with pytest.warns(UserWarning, match=r"aminmax\.default runs in PyTorch: .*ReduceMin: .*bool"):
        assert_same_step(eager, ours, torch.randn(3, 2))
