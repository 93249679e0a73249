"""Places of maxima: of several the one that PyTorch takes, NaN before all, nothing past a row's end."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from case import type_text
from ortmodule_c import _C

WIDTHS = [1, 3, 15, 16, 17, 31, 33, 64, 67, 300, 515]
STRIDES = [1, 2, 3, 4, 5]


@pytest.fixture(params=_C.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> object:
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(None)


def corners(dtype: torch.dtype, *dims: int) -> Tensor:
    """Numbers of which many are alike, with NaN and infinities among them."""
    x = torch.randn(dims, generator=torch.Generator().manual_seed(dims[-1])).round()
    flat = x.view(-1)
    flat[::7], flat[3::11], flat[5::13] = -torch.inf, torch.inf, torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "stride", "apart"), list(itertools.product(WIDTHS, STRIDES, [1, 2])))
def test_places_are_those_of_pytorch(dtype: torch.dtype, width: int, stride: int, apart: int) -> None:
    if width + 2 < 2 * apart + 1:
        return  # no window fits
    for x in (corners(dtype, 2, 3, 4, width), torch.full((1, 1, 3, width), -torch.inf, dtype=dtype)):
        attrs = f"kernel_shape=[2, 3], strides=[1, {stride}], pads=[1, 1, 1, 1], dilations=[1, {apart}]"
        text = f"input %x : {type_text(x)}\n%y, %at = MaxPool(%x) {{{attrs}}}\nreturn %y, %at\n"
        plan = _C.Session(text, {}).plan([x], [False], [False, False])
        y, at = plan.forward([x], 0)[0]
        want, places = F.max_pool2d(x, (2, 3), (1, stride), 1, (1, apart), return_indices=True)
        torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(at, places)
