"""Functions of 16-bit floats, values and gradients to the bit as eager PyTorch rounds them.

What PyTorch has one kernel for is computed in float32 and rounded once; what it composes of several
ops is rounded after each of them.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from corners import Row, cases, few, pairs, step
from ortmodule_c import ORTModule
from wrapped import Function

HALVES = (torch.float16, torch.bfloat16)
B = 2  # pairs
ROUNDED = {
    "relu6": Row(F.relu6),
    "hardswish": Row(F.hardswish),
    "hardsigmoid": Row(F.hardsigmoid),
    "hardtanh": Row(
        lambda x: F.hardtanh(x, -0.3, 0.7),
        values=lambda t: [torch.cat([few(t), torch.tensor([0.7, -0.7, -0.3, 0.3]).to(t)])],
    ),
    "hardshrink": Row(F.hardshrink),
    "leaky relu": Row(lambda x: F.leaky_relu(x, 0.1)),
    "elu": Row(F.elu),
    "elu, alpha 0.3": Row(lambda x: F.elu(x, 0.3)),
    "selu": Row(F.selu),
    "celu": Row(lambda x: F.celu(x, 0.3)),
    "softplus": Row(F.softplus),
    "softplus, beta": Row(lambda x: F.softplus(x, beta=2, threshold=3)),
    "logsigmoid": Row(F.logsigmoid),
    "sigmoid": Row(torch.sigmoid),
    "tanh": Row(torch.tanh),
    "tanhshrink": Row(F.tanhshrink),
    "silu": Row(F.silu),
    "mish": Row(F.mish),
    "glu": Row(lambda x, y: F.glu(torch.cat([x, y]), 0), B),
    "erf": Row(torch.erf),
    "gelu tanh": Row(lambda x: F.gelu(x, approximate="tanh")),
    "exp": Row(torch.exp),
    "log": Row(torch.log),
    "sin": Row(torch.sin),
    "cos": Row(torch.cos),
    "sqrt": Row(torch.sqrt),
    "rsqrt": Row(torch.rsqrt),
    "reciprocal": Row(torch.reciprocal),
    **{f"pow {p}": Row(lambda x, p=p: x**p) for p in (0, 2, 3, 4, -1, -2, 0.5, -0.5, 1.5, 0.3)},
    "pow": Row(torch.pow, B),
    "2 pow": Row(lambda x: torch.pow(2, x)),
    "hypot": Row(torch.hypot, B),
    "xlogy": Row(torch.xlogy, B),
    "xlog1py": Row(torch.special.xlog1py, B),
    "entr": Row(torch.special.entr),
    "sinc": Row(torch.sinc),
    "angle": Row(torch.angle),
    "round to decimals": Row(lambda x: [torch.round(x, decimals=n) for n in (3, 0, -2)]),
    "fmax": Row(torch.fmax, B, signed_zeros=False),
    "fmin": Row(torch.fmin, B, signed_zeros=False),
    "isclose": Row(lambda x, y: torch.where(x.isclose(y, rtol=0.1, atol=0.5), x, y), B),
    "remainder": Row(torch.remainder, B),
    "floor divide": Row(lambda x, y: torch.div(x, y, rounding_mode="floor"), B),
    "add scaled": Row(lambda x, y: torch.add(x, y, alpha=0.3), B),
    "addcmul": Row(lambda x, y: torch.addcmul(x, x, y, value=0.3), values=lambda t: pairs(few(t))),
    "mse": Row(lambda x, y: F.mse_loss(x, y, reduction="none"), B),
    "smooth l1": Row(lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.3), B),
    "huber": Row(lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.3), B),
    "bce with logits": Row(lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), B),
}
ROUNDED = {name: replace(row, ulps=0, dtypes=HALVES) for name, row in ROUNDED.items()}


@pytest.mark.parametrize("differences", cases(ordinary=ROUNDED))
def test_values_and_gradients(differences: Callable[[], str]) -> None:
    assert not differences()


EVERYWHERE = {
    "erf": torch.erf,
    "gelu": F.gelu,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "elu": F.elu,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "rsqrt": torch.rsqrt,
    "pow 0.3": lambda x: x**0.3,
}
ROUNDED_APART = 2  # numbers between two of 16 bits, so near to the middle that the last bit of float32 tells


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("function", EVERYWHERE.values(), ids=EVERYWHERE.keys())
def test_every_number(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    module = Function(lambda _, x: (function(x),))
    with warnings.catch_warnings(), torch.backends.mkldnn.flags(enabled=False):  # it has a gelu of its own
        warnings.simplefilter("ignore")
        (want,), (slope,) = step(module, [x])
    (got,), (got_slope,) = step(ORTModule(module), [x])
    for ours, eager in ((got, want), (got_slope, slope)):
        assert ours is not None and eager is not None
        assert int((~((ours == eager) | (ours.isnan() & eager.isnan()))).sum()) <= ROUNDED_APART


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "2": lambda x: x.norm(),
    "of rows": lambda x: x.norm(dim=1),
    "3": lambda x: torch.linalg.vector_norm(x, 3),
    "7": lambda x: x.norm(7, dim=-1),
    "of matrices": torch.linalg.matrix_norm,
    "normalize": F.normalize,
    "pairwise distance": lambda x: F.pairwise_distance(x, -x),
    "dist": lambda x: torch.dist(x, -x, 4),
    "weight norm": lambda x: torch._weight_norm(x, torch.ones_like(x[:, :1])),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [300.0, 1.0, 1e-4])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_what_a_norm_sums_neither_overflows_nor_vanishes(
    norm: Callable[[Tensor], Tensor], scale: float, dtype: torch.dtype
) -> None:
    given = (torch.tensor([[0.3, -0.5, 2.0], [1.0, 0.25, -0.125]]) * scale).to(dtype)
    x, exact = given.clone().requires_grad_(), given.double().requires_grad_()
    got, want = ORTModule(Function(lambda _, x: norm(x)))(x), norm(exact)
    got.float().sum().backward()
    want.sum().backward()
    assert got.dtype == dtype and x.grad is not None and exact.grad is not None
    step_of = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=step_of, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=step_of, atol=step_of * float(exact.grad.abs().max()))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("other", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [65536.0, 1e-9, 0.50123, 1.0007, -70000.1])
def test_a_tensor_without_dims_is_multiplied_with_as_it_is(
    number: float, other: torch.dtype, dtype: torch.dtype
) -> None:
    s, x = torch.tensor(number, dtype=other), torch.tensor([0.3, -0.5, 2.0, 1.0]).to(dtype)
    both = Function(lambda _, x, s: (x * s, s * x, x / s, s / x, x + s, x - s, x > s))
    for got, want in zip(ORTModule(both)(x, s), both(x, s), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_a_product_and_its_bias_are_multiplied_with_is_not_rounded(dtype: torch.dtype) -> None:
    def forward(_: Function, c: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows, batch = c[:, 0], x.expand(2, 5, 4) / 2
        return (
            torch.addmm(c, x, y, beta=0.3, alpha=0.7),
            torch.addmv(rows, x, y[:, 0], beta=0.3, alpha=0.7),
            torch.baddbmm(c.expand(2, 5, 3), batch, y.expand(2, 4, 3), beta=0.3, alpha=0.7),
            torch.addbmm(c, batch, y.expand(2, 4, 3), beta=0.3, alpha=0.7),
        )

    c, x, y = (torch.randint(-3, 4, size).to(dtype) for size in ((5, 3), (5, 4), (4, 3)))
    module = ORTModule(Function(forward))
    got, exact = module(c, x, y), forward(module, c.double(), x.double(), y.double())
    for ours, want in zip(got, exact, strict=True):
        assert torch.equal(ours, want.to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_left_of_smoothed_targets_is_not_rounded(dtype: torch.dtype) -> None:
    def forward(_: Function, x: Tensor, target: Tensor) -> tuple[Tensor]:
        return (F.cross_entropy(x, target, label_smoothing=0.1, reduction="sum"),)

    xs = [torch.zeros(5, 7, dtype=dtype), torch.rand(5, 7).to(dtype)]
    (_, want), (_, got) = (step(m, xs)[1] for m in (Function(forward), ORTModule(Function(forward))))
    assert want is not None and got is not None and torch.equal(got, want)


@pytest.mark.parametrize("scale", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_what_rms_norm_adds_to_the_mean_is_of_the_type_it_computes_in(dtype: torch.dtype, scale: float) -> None:
    module = Function(lambda _, x: (F.rms_norm(x, (3,)),))
    x = (torch.tensor([[0.3, -0.5, 2.0], [1.0, 0.25, -0.125]]) * scale).to(dtype)
    (want,), (slope,) = step(module, [x])
    (got,), (got_slope,) = step(ORTModule(module), [x])
    assert slope is not None
    few_steps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=few_steps, atol=few_steps)
    torch.testing.assert_close(got_slope, slope, rtol=few_steps, atol=few_steps * float(slope.abs().max()))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("mode", ["trunc", "floor"])
@pytest.mark.parametrize("dtype", HALVES)
def test_quotients_of_16_bits_are_rounded_where_pytorch_rounds_them(dtype: torch.dtype, mode: str) -> None:
    def quotients(_s: Function, x: Tensor, y: Tensor) -> list[Tensor]:
        by = [y, y[:1], 1.3203125, y.flatten()[7]]
        return [torch.div(x, v, rounding_mode=mode) for v in by] + ([7.3 // y] if mode == "floor" else [])

    x, y = (torch.rand(60, 50) * 8 + 0.1).to(dtype), (torch.rand(60, 50) * 2 + 0.1).to(dtype)
    module = Function(quotients)
    for expected, got in zip(module(x, y), ORTModule(module)(x, y), strict=True):
        assert torch.equal(expected, got)


LONG = torch.ones(70_000)
SHARED = {  # by more elements than a float16 can count, or by a number of them that is no bfloat16
    "mean": (torch.mean, LONG),
    "mean of rows": (lambda x: x.mean(1), torch.randn(3, 769, generator=torch.Generator().manual_seed(0))),
    "mean of many": (torch.mean, torch.ones(10_000_000)),
    "largest": (torch.max, LONG),
    "largest of rows": (lambda x: x.amax(1), torch.ones(2, 257)),
    "largest of long rows": (lambda x: x.amax(1), torch.ones(2, 2049)),
    "what is a number": (lambda x: x.nanmean(), LONG),
    "loss": (lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)), LONG),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("reduction", "x"), SHARED.values(), ids=SHARED)
def test_a_gradient_that_many_share_is_divided_by_their_number(
    reduction: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype
) -> None:
    def slope(module: torch.nn.Module) -> Tensor:
        leaf = x.to(dtype).requires_grad_()
        y = module(leaf)
        y.backward(torch.full_like(y, 1000))
        assert leaf.grad is not None
        return leaf.grad

    module = Function(lambda _, x: reduction(x))
    assert torch.equal(slope(ORTModule(module)), slope(module))


def test_what_follows_a_product_in_one_op_is_done_before_it_is_rounded() -> None:
    def forward(_: Function, x: Tensor, y: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.baddbmm(c, x, y, beta=0, alpha=0.125),
            torch.baddbmm(c, x, y),
            torch.addmm(c[0, :, :1], x[0], y[0]),
            torch.addbmm(c[0], x[:1], y[:1], beta=0.5, alpha=0.25),
        )

    x, y, c = (torch.full(size, n).half() for size, n in (((2, 3, 64), 40.0), ((2, 64, 5), 40.0), ((2, 3, 5), -6e4)))
    module = Function(forward)
    for got, want in zip(ORTModule(module)(x, y, c), module(x, y, c), strict=True):
        assert want.isfinite().all() and torch.equal(got, want)  # the product alone is infinite


def test_a_product_is_rounded_before_a_sum_or_a_factor_that_follows_it() -> None:
    module = Function(lambda _, x, w, c: (x @ w + c, (x @ w) * 0.25))
    overflows = torch.tensor([[300.0]]), torch.tensor([[300.0]]), torch.tensor([-6e4])
    loses_a_bit = torch.tensor([[256.0, 1.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([-256.0])
    for numbers, dtype in ((overflows, torch.float16), (loses_a_bit, torch.bfloat16)):
        operands = [t.to(dtype) for t in numbers]
        for got, want in zip(ORTModule(module)(*operands), module(*operands), strict=True):
            assert torch.equal(got, want)
