"""What rewrites and fusion touch gives eager PyTorch's results and gradients, special values included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import DebugOptions, ORTModule

INF, NAN = float("inf"), float("nan")


def corners(dtype: torch.dtype) -> Tensor:
    """Special values of a dtype, each beside each other one in some broadcast of two vectors."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([0, 1, 2, 3, 7, info.max - 1, info.max, info.min, -1 if info.min < 0 else 255], dtype=dtype)
    info = torch.finfo(dtype)
    special = [0.0, 1.0, 1 + info.eps, 0.5, 3.0, info.tiny, info.smallest_normal / 8, info.max, INF, NAN]
    return torch.tensor([*special, *(-v for v in special)], dtype=dtype)


class Applied(nn.Module):
    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.f(*inputs)


def equal_or_nan(a: Tensor, b: Tensor) -> None:
    """Bit for bit, so that -0 is not 0; any NaN is like another."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if a.is_floating_point():
        assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan()), f"{a} is not {b}"


def check(f: Callable[..., Tensor], *inputs: Tensor, grad: Tensor | None = None) -> None:
    """Outputs are eager's bit for bit and, if `grad` is given, gradients within an ulp or two."""
    wants = grad is not None
    mine, theirs = ([x.clone().requires_grad_(wants and x.is_floating_point()) for x in inputs] for _ in range(2))
    module = ORTModule(Applied(f), DebugOptions(fallback="error"))
    got, want = module(*mine), f(*theirs)
    equal_or_nan(got.detach(), want.detach())
    if grad is None:
        return
    got.backward(grad)
    want.backward(grad)
    for a, b in zip(mine, theirs, strict=True):
        if b.grad is not None:
            eps = torch.finfo(b.dtype).eps
            torch.testing.assert_close(a.grad, b.grad, rtol=2 * eps, atol=0, equal_nan=True)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "add_zero": lambda x: x + 0.0,
    "add_minus_zero": lambda x: x + -0.0,
    "sub_zero": lambda x: x - 0.0,
    "sub_minus_zero": lambda x: x - -0.0,
    "from_zero": lambda x: 0.0 - x,
    "zero_plus": lambda x: 0.0 + x,
    "mul_one": lambda x: x * 1.0,
    "mul_almost_one": lambda x: x * 1.0000005,
    "mul_minus_one": lambda x: x * -1.0,
    "div_one": lambda x: x / 1.0,
    "div_almost_one": lambda x: x / 1.0000003,
    "neg_neg": lambda x: torch.neg(-x),
    "one_over": lambda x: 1 / x,
    "ones_over": lambda x: torch.ones(()).to(x.dtype) / x,
    "one_over_sqrt": lambda x: 1 / torch.sqrt(x),
    "pow_1": lambda x: x**1,
    "pow_2": lambda x: x**2,
    "pow_3": lambda x: x**3,
    "pow_half": lambda x: x**0.5,
    "pow_minus_half": lambda x: x**-0.5,
    "pow_minus_1": lambda x: x**-1,
    "pow_minus_2": lambda x: x**-2,
    "square": torch.square,
    "dropout_nothing": lambda x: torch.dropout(x, 0.0, True),
    "sum_of_one": lambda x: x[:, None].sum(1),
    "mean_of_one": lambda x: x[:, None].mean(1),
    "amax_of_one": lambda x: x[:, None].amax(1),
    "there_and_back": lambda x: x.double().float() if x.dtype == torch.float32 else x.float().double(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_neg": lambda x, y: x + -y,
    "neg_add": lambda x, y: -x + y,
    "sub_neg": lambda x, y: x - -y,
    "mul_reciprocal": lambda x, y: x * y.reciprocal(),
    "max_twice": lambda x, y: torch.maximum(x, y) - torch.maximum(y, x),
    "where_both": lambda x, y: torch.where(x > y, x, y),
}
FLOATS = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_one(name: str, dtype: torch.dtype) -> None:
    x = corners(dtype)
    check(FUNCTIONS[name], x)
    for scale in (1.0, 0.25, -2.0, 0.0):
        check(FUNCTIONS[name], x, grad=torch.full_like(x, scale))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_a_function_of_two(name: str, dtype: torch.dtype) -> None:
    x = corners(dtype)
    check(BINARY[name], x[:, None], x)
    check(BINARY[name], x[:, None], x, grad=torch.ones(len(x), len(x), dtype=dtype))


@pytest.mark.parametrize("exponent", [2.000001, 1.9999999, 0.50000001, 3.000002, 1.0000001])
def test_an_exponent_is_not_rounded(exponent: float) -> None:
    x = torch.tensor([1e-3, 0.7, 1.0, 3.0, 1e5], dtype=torch.float64)
    got = ORTModule(Applied(lambda x: x**exponent))(x)
    torch.testing.assert_close(got, x**exponent, rtol=1e-14, atol=0)


# ---- dtypes inside a program ----

PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[torch.dtype, ...]]] = {
    "floats_between_integers": (
        lambda a, b, c: (a.float() / b.float() * c.float()).long(),
        (torch.int64, torch.int64, torch.int64),
    ),
    "doubles_between_floats": (
        lambda x, y: (x.double() + y.double() - x.double()).float(),
        (torch.float32, torch.float32),
    ),
    "floats_between_doubles": (lambda x, y: (x.float() * y.float() + 1).double(), (torch.float64, torch.float64)),
    "halves_between_floats": (lambda x, y: (x.bfloat16() + y.bfloat16()).float() * 3, (torch.float32, torch.float32)),
    "longs_between_floats": (lambda x: (x.long() * 3 + 1).float() / 2, (torch.float32,)),
    "ints_between_longs": (lambda a, b: (a.int() * b.int() + 1).long() * 2, (torch.int64, torch.int64)),
    "bytes_between_ints": (lambda a, b: (a.byte() - b.byte()).int() - 1, (torch.int32, torch.int32)),
    "bools_between_floats": (lambda x, y: x.bool().float() * 2 + (y != 0).float(), (torch.float32, torch.float32)),
    "wrapping_ints": (lambda a, b: (a + b) // 2 + a * b, (torch.int32, torch.int32)),
    "to_int_and_back": (lambda x: x.int().float() + x.short().float() + x.char().float(), (torch.float32,)),
    "double_to_byte": (lambda x: x.byte().double() + x.short().double() + x.long().double(), (torch.float64,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_in_the_dtypes_written(name: str) -> None:
    f, dtypes = PROGRAMS[name]
    values = [corners(dtype) for dtype in dtypes]
    shape = [max(len(v) for v in values)] * len(values)
    grid = [v.reshape([-1 if i == k else 1 for i in range(len(shape))]) for k, v in enumerate(values)]
    check(f, *grid)


def test_a_division_in_float32_is_not_one_of_integers() -> None:
    check(lambda a, b, c: (a.float() / b.float() * c.float()).long(), *(torch.tensor([v]) for v in (7, 2, 2)))


NUMBERS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NUMBERS += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("to", NUMBERS, ids=str)
@pytest.mark.parametrize("source", NUMBERS, ids=str)
def test_a_cast_is_eager_s(source: torch.dtype, to: torch.dtype) -> None:
    edges = [2.0**k + d for k in (7, 8, 15, 16, 24, 31, 32, 53, 63, 64) for d in (-1, 0, 1, 0.75)]
    values = torch.tensor([0.0, -0.0, 1.5, 300.0, 1e10, 3e9, 1e-40, 65520.0, NAN, INF, *edges], dtype=torch.float64)
    x = torch.cat([values, -values]).to(source)
    check(lambda x: x.to(to), x)
    if source.is_floating_point:  # inside a program
        check(lambda x: (x * 1.5).to(to).to(torch.float64) + 1, x)


# ---- sums over what was repeated ----


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_sum_over_one_axis_keeps_what_was_repeated_along_another(n: int) -> None:
    torch.manual_seed(0)
    a, b, w = (torch.randn(n) for _ in range(3))
    check(lambda a, b, w: ((a[:, None] + b[None, :]).sum(1) * w).sum(), a, b, w, grad=torch.tensor(1.0))
    check(lambda x: x.unsqueeze(1).expand(n, n).sum(0), a, grad=w)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_position_embeddings_are_summed_over_the_batch_where_it_is_as_long_as_the_sequence(length: int) -> None:
    torch.manual_seed(0)
    x, positions, w = torch.randn(length, length, 4), torch.randn(length, 4), torch.randn(length, length, 4)
    check(lambda x, p: x + p, x, positions, grad=w)


def test_a_bias_has_its_gradient_where_batch_and_features_coincide() -> None:
    torch.manual_seed(0)
    linear, w = nn.Linear(3, 4), torch.randn(4)

    def loss(x: Tensor) -> Tensor:
        return (nn.functional.linear(x, linear.weight, linear.bias).sum(1) * w).mean()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x).sum(1) * w).mean()

    x = torch.randn(4, 3)
    loss(x).backward()
    want, linear.bias.grad = linear.bias.grad, None
    ORTModule(Loss())(x).backward()
    torch.testing.assert_close(linear.bias.grad, want)


# ---- layers written out ----


def test_log_of_softmax_is_minus_infinity_where_the_softmax_is_zero() -> None:
    x = torch.tensor([[0.0, -200.0, 1.0], [-INF, 0.0, 0.0], [NAN, 1.0, 2.0]])
    got = ORTModule(Applied(lambda x: torch.log(torch.softmax(x, -1))))(x)
    torch.testing.assert_close(got, torch.log(torch.softmax(x, -1)), equal_nan=True)
