"""Rows of one value normalize to zeros, however small epsilon is: their mean is that value, to the bit."""

import pytest
import torch

from case import Case, assert_close, run_grad, type_text
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


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 1), (1, 2, 16), (3, 4, 33), (1, 1, 4099)], ids=str)
def test_group_norm(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> None:
    samples, channels, inner = shape
    x = VALUES.to(dtype).expand(-1, channels * inner).reshape(1, -1, inner).expand(samples, -1, -1).contiguous()
    text = f"input %x : {type_text(x)}\n%y, %m, %r = GroupNorm(%x) {{num_groups=7, epsilon=1e-12}}\nreturn %y, %m, %r\n"
    _C.set_isa(isa)
    try:
        plan = _C.Session(text, {}).plan([x], [False], [False] * 3)
        y, mean, rstd = plan.forward([x], 0)[0]
    finally:
        _C.set_isa(None)
    assert torch.equal(y, torch.zeros_like(x))
    assert torch.equal(mean.to(dtype), VALUES.to(dtype).T.expand(samples, -1))
    assert torch.equal(rstd[:, :-1], torch.full_like(rstd[:, :-1], 1e6)) and rstd.isfinite().all()


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 300, 300), (3, 1, 70), (33, 1), (700, 1, 3), (2, 1, 4099)], ids=str)
def test_batch_norm(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> None:
    x = VALUES.to(dtype).reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape[0], -1, *shape[2:]).contiguous()
    start = torch.zeros(len(VALUES), dtype=dtype)
    inputs = f"input %x : {type_text(x)}\ninput %s : {type_text(start)}\n"
    text = (
        f"{inputs}%y, %m, %r, %a, %b = BatchNorm(%x, _, _, %s, %s) {{epsilon=1e-12, momentum=1.0}}\nreturn %y, %a, %b\n"
    )
    _C.set_isa(isa)
    try:
        plan = _C.Session(text, {}).plan([x, start], [False] * 2, [False] * 3)
        y, mean, var = plan.forward([x, start], 0)[0]
    finally:
        _C.set_isa(None)
    assert torch.equal(y, torch.zeros_like(x))
    assert torch.equal(mean, VALUES.to(dtype).flatten())
    assert (var[:-1] <= (VALUES[:-1].flatten().double() * 1e-8) ** 2).all()


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("n", [1, 3, 16, 33])
def test_slopes_of_layer_normalization_where_numbers_are_large(n: int, isa: str) -> None:
    x, dy = torch.full((2, n), 2.0**110), torch.arange(2.0 * n).view(2, n)
    case = Case("LayerNormalization", [x], torch.zeros_like, {"epsilon": 1e-12}, outputs=3)
    _C.set_isa(isa)
    try:
        dx = run_grad(case, [dy, None, None])[0]
    finally:
        _C.set_isa(None)
    assert_close(dx, (dy - dy.mean(-1, keepdim=True)) * 1e6, f"gradient on {isa}")
