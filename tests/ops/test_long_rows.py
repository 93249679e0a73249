"""Rows of a million numbers are summed up as exactly as short ones, next to PyTorch in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from case import Case, assert_close, expected, run
from ortmodule_c import _C

ROW = torch.full((1, 1 << 20), 1.1)


def exact(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *more: function(x.double(), *more).float()


CASES = [
    Case("ReduceSum", [ROW], exact(torch.sum)),
    Case(
        "AdaptiveAvgPool", [ROW.view(1, 1, 1024, 1024)], exact(lambda x: x.mean((2, 3), True)), {"output_size": [1, 1]}
    ),
    Case("Softmax", [ROW], exact(lambda x: F.softmax(x, -1)), {"axis": -1}),
    Case("LogSoftmax", [ROW], exact(lambda x: F.log_softmax(x, -1)), {"axis": -1}),
    Case("RmsNorm", [ROW], exact(lambda x: F.rms_norm(x, x.shape[1:]))),
    Case("CrossEntropy", [ROW, torch.tensor([7])], exact(F.cross_entropy)),
]


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.op)
def test_relative_to_each_number(case: Case, isa: str) -> None:
    _C.set_isa(isa)
    try:
        got = run(case)[0]
    finally:
        _C.set_isa(None)
    ratio = got / expected(case)[0].view_as(got)
    assert_close(ratio, torch.ones_like(ratio), f"{case.op} on {isa}")
