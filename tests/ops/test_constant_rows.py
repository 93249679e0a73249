"""Rows of one value normalize to zeros, however small epsilon is: their mean is that value, to the bit."""

import pytest
import torch

from case import type_text
from ortmodule_c import _C

VALUES = torch.tensor([1.1, -0.3, 3.7e4, 1e-20, 0.0, 123456.7, -7e30]).reshape(-1, 1)  # of the last squares overflow


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 3, 16, 33, 100, 768, 1024, 4099])
def test_layer_normalization(n: int, dtype: torch.dtype, isa: str) -> None:
    x = VALUES.to(dtype).expand(-1, n).contiguous()
    text = f"input %x : {type_text(x)}\n%y, %m, %r = LayerNormalization(%x) {{epsilon=1e-12}}\nreturn %y, %m, %r\n"
    _C.set_isa(isa)
    try:
        plan = _C.Session(text, {}).plan([x], [False], [False] * 3)
        y, mean, rstd = plan.forward([x], 0)[0]
    finally:
        _C.set_isa(None)
    assert torch.equal(y, torch.zeros_like(x))
    assert torch.equal(mean.to(dtype), x[:, :1])
    assert torch.equal(rstd[:-1], torch.full_like(rstd[:-1], 1e6)) and rstd[-1].isfinite()
