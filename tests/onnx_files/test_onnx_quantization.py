"""Products of whole numbers that stand for floats: exact, and rounded once."""

from __future__ import annotations

import pytest
import torch
from test_onnx_layers import made
from torch import Tensor
from torch.nn import functional as F

import ortmodule_c
from ortmodule_c import NotExportable


def whole(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    ends = torch.iinfo(dtype)
    return torch.randint(ends.min, ends.max + 1, shape).to(dtype)


def stored(y: Tensor, zero: Tensor) -> Tensor:
    """Halves go to even numbers before what stands for 0 is added."""
    ends = torch.iinfo(zero.dtype)
    return (y.round() + zero).clamp(ends.min, ends.max).to(zero.dtype)


@pytest.mark.parametrize("rows", [False, True])
def test_products_of_matrices(rows: bool) -> None:
    kind = "uint8[3]" if rows else "uint8"
    head = f"net (uint8[3, 40] a, int8[40, 5] b, {kind} az, int8[5] bz) => (int32[3, 5] y)"
    a, b, az, bz = (
        whole(3, 40),
        whole(40, 5, dtype=torch.int8),
        whole(3)[: 3 if rows else 1],
        whole(5, dtype=torch.int8),
    )
    module = ortmodule_c.onnx.load(made(f"{head} {{ y = MatMulInteger(a, b, az, bz) }}", {}))
    given = az if rows else az[0]
    expected = (a.long() - az.long()[:, None]) @ (b.long() - bz.long())
    assert torch.equal(module(a, b, given, bz), expected.int())


def test_sums_have_32_bits() -> None:
    module = ortmodule_c.onnx.load(
        made("net (uint8[1, 40000] a, uint8[40000, 1] b) => (int32[1, 1] y) { y = MatMulInteger(a, b) }", {})
    )
    a = torch.full((1, 40000), 255, dtype=torch.uint8)
    assert module(a, a.T.contiguous()).item() == 40000 * 255**2 - 2**32


def test_products_of_matrices_that_stand_for_floats() -> None:
    scalars = "float[3] sa, uint8[3] za, uint8[40, 5] b, float[5] sb, uint8[5] zb, float s, int8 z"
    text = f"net (uint8[3, 40] a, {scalars}) => (int8[3, 5] y) {{ y = QLinearMatMul(a, sa, za, b, sb, zb, s, z) }}"
    a, b, za, zb, sa, sb = whole(3, 40), whole(40, 5), whole(3), whole(5), torch.rand(3), torch.rand(5)
    s, z = torch.tensor(800.0), torch.tensor(7, dtype=torch.int8)
    exact = (a.double() - za[:, None]) * sa[:, None].double() @ ((b.double() - zb) * sb.double())
    y = ortmodule_c.onnx.load(made(text, {}))(a, sa, za, b, sb, zb, s, z)
    assert torch.equal(y, stored(exact / s, z)) and y.float().std() > 1


def test_halves_go_to_even_numbers_whatever_stands_for_0() -> None:
    scalars = "float one, uint8 zero, uint8[1, 1] b, float two, uint8 odd"
    node = "y = QLinearMatMul(a, one, zero, b, one, zero, two, odd)"
    text = f"net (uint8[4, 1] a, {scalars}) => (uint8[4, 1] y) {{ {node} }}"
    numbers = torch.tensor([[1], [3], [5], [7]], dtype=torch.uint8)
    zero, one = torch.tensor(0, dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8)
    y = ortmodule_c.onnx.load(made(text, {}))(numbers, torch.tensor(1.0), zero, one[None, None], torch.tensor(2.0), one)
    assert y.flatten().tolist() == [1, 3, 3, 5]


SAID = "strides = [2, 1], pads = [1, 0, 1, 2], group = 2"


def test_convolutions() -> None:
    head = "net (uint8[2, 4, 6, 7] x, int8[6, 2, 3, 3] w, uint8 xz, int8[6] wz) => (int32[A, B, C, D] y)"
    x, w, xz, wz = whole(2, 4, 6, 7), whole(6, 2, 3, 3, dtype=torch.int8), whole(1)[0], whole(6, dtype=torch.int8)
    padded = F.pad(x.double() - xz, (0, 2, 1, 1))
    expected = F.conv2d(padded, w.double() - wz[:, None, None, None], stride=(2, 1), groups=2)
    y = ortmodule_c.onnx.load(made(f"{head} {{ y = ConvInteger<{SAID}>(x, w, xz, wz) }}", {}))(x, w, xz, wz)
    assert torch.equal(y, expected.int())


def test_convolutions_that_stand_for_floats() -> None:
    scalars = "float sx, uint8 zx, int8[6, 2, 3, 3] w, float[6] sw, int8[6] zw, float s, uint8 z, int32[6] b"
    node = f"y = QLinearConv<{SAID}>(x, sx, zx, w, sw, zw, s, z, b)"
    text = f"net (uint8[2, 4, 6, 7] x, {scalars}) => (uint8[A, B, C, D] y) {{ {node} }}"
    x, w, b = whole(2, 4, 6, 7), whole(6, 2, 3, 3, dtype=torch.int8), torch.randint(-9000, 9000, (6,)).int()
    sx, sw, s = torch.rand(()), torch.rand(6), torch.tensor(900.0)
    zx, zw, z = whole(1)[0], whole(6, dtype=torch.int8), torch.tensor(100, dtype=torch.uint8)
    padded = F.pad(x.double() - zx, (0, 2, 1, 1))
    sums = F.conv2d(padded, w.double() - zw[:, None, None, None], b.double(), stride=(2, 1), groups=2)
    expected = stored(sums * (sx.double() * sw.double() / s)[:, None, None], z)
    y = ortmodule_c.onnx.load(made(text, {}))(x, sx, zx, w, sw, zw, s, z, b)
    assert torch.equal(y, expected) and y.float().std() > 1


@pytest.mark.parametrize(("dtype", "code", "name"), [(torch.uint8, 3, "uint8"), (torch.float32, 6, "float")])
def test_bits_of_a_number_are_those_of_another(dtype: torch.dtype, code: int, name: str) -> None:
    """Of 8 bits each, or of numbers that are known when a graph is made."""
    model = made(f"net ({name}[4] x) => (y) {{ y = BitCast<to = {code}>(x) }}", {}, opset=26)
    x = torch.tensor([0, 1, 127, 200]).to(dtype)
    wanted = {3: torch.int8, 6: torch.int32}[code]
    assert torch.equal(ortmodule_c.onnx.load(model)(x), x.view(wanted))
    model = made(f"net ({name}[4] x) => (y) {{ y = BitCast<to = 11>(x) }}", {}, opset=26)
    with pytest.raises(
        NotExportable, match=r"BitCast of domain ai.onnx, .*: bits of torch\.\w+ as those of torch.float64"
    ):
        ortmodule_c.onnx.load(model)(x)
