"""Functions of single elements at the corners of their dtype, against eager PyTorch."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from corners import FLOATS, INF, INTEGERS, NAN, Row, broken, cases, corners, few, moderate, pairs
from ortmodule_c import ORTModule
from wrapped import Function, pair

B, T = 2, 3  # pairs, triples
ELEMENTWISE = {
    "abs": Row(torch.abs, ulps=0),
    "ceil": Row(torch.ceil, ulps=0),
    "floor": Row(torch.floor, ulps=0),
    "round": Row(torch.round, ulps=0),
    "sign": Row(torch.sign, ulps=0),
    "neg": Row(torch.neg, ulps=0),
    "relu": Row(torch.relu, ulps=0),
    "clamp": Row(lambda x: x.clamp(-1, 0.5), ulps=0),
    "clamp low": Row(lambda x: x.clamp(min=0), ulps=0),
    "clamp high": Row(lambda x: x.clamp(max=1), ulps=0),
    "clamp crossed": Row(lambda x: x.clamp(1, -1), ulps=0),
    "clamp nan": Row(lambda x: x.clamp(min=NAN), ulps=0),
    "clamp infinite": Row(lambda x: x.clamp(-INF, INF), ulps=0),
    "clamp tensors": Row(torch.clamp, T, ulps=0),
    "clamp low tensor": Row(lambda x, y: x.clamp(min=y), B, ulps=0, signed_zeros=False),
    "clamp high tensor": Row(lambda x, y: x.clamp(max=y), B, ulps=0, signed_zeros=False),
    "hardtanh": Row(F.hardtanh, ulps=0),
    "hardtanh wide": Row(lambda x: F.hardtanh(x, -0.5, 2), ulps=0),
    "relu6": Row(F.relu6, ulps=0),
    "clamp at zero": Row(lambda x: (x.clamp(0, 6), x.clamp(max=-0.0)), ulps=0, values=lambda t: [few(t)]),
    "hardswish": Row(F.hardswish),
    "hardsigmoid": Row(F.hardsigmoid),
    "hardshrink": Row(F.hardshrink),
    "hardshrink, all": Row(lambda x: F.hardshrink(x, 0.0)),
    "hardshrink, nothing": Row(lambda x: F.hardshrink(x, -1.0)),
    "softshrink": Row(F.softshrink),
    "tanhshrink": Row(F.tanhshrink, floor=1),
    "softsign": Row(F.softsign),
    "threshold": Row(lambda x: F.threshold(x, 0.5, 2.0)),
    "leaky relu": Row(lambda x: F.leaky_relu(x, 0.1)),
    "leaky relu, negative slope": Row(lambda x: F.leaky_relu(x, -0.5)),
    "leaky relu, no slope": Row(lambda x: F.leaky_relu(x, 0.0)),
    "prelu": Row(lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype))),
    "elu": Row(F.elu),
    "elu, negative alpha": Row(lambda x: F.elu(x, -0.5)),
    "elu, alpha 0": Row(lambda x: F.elu(x, 0.0)),
    "elu, alpha 2": Row(lambda x: F.elu(x, 2.0)),
    "selu": Row(F.selu),
    "celu": Row(F.celu),
    "celu, alpha 2": Row(lambda x: F.celu(x, 2.0), signed_zeros=False),
    "celu, alpha 0.1": Row(lambda x: F.celu(x, 0.1), ulps=8),
    "celu, alpha 0.3": Row(lambda x: F.celu(x, 0.3), ulps=8),
    "celu, negative alpha": Row(lambda x: F.celu(x, -2.0)),
    "softplus": Row(F.softplus),
    "softplus, beta": Row(lambda x: F.softplus(x, beta=2, threshold=3)),
    "softplus, negative beta": Row(lambda x: F.softplus(x, beta=-2)),
    "logsigmoid": Row(F.logsigmoid),
    "sigmoid": Row(torch.sigmoid, floor=0.1),
    "tanh": Row(torch.tanh, floor=1),
    "silu": Row(F.silu),
    "mish": Row(F.mish, floor=1),
    # Dense numbers of float32 PyTorch leaves to oneDNN, whose gelu(inf) is NaN, though PyTorch's own is inf.
    "gelu": Row(lambda x: F.gelu(torch.stack([x, x], -1)[..., 0]), floor=1),
    "gelu tanh": Row(lambda x: F.gelu(x, approximate="tanh"), ulps=8, floor=1),
    "erf": Row(torch.erf),
    "exp": Row(torch.exp),
    "expm1": Row(torch.expm1, floor=1),
    "log": Row(torch.log),
    "log1p": Row(torch.log1p),
    "log2": Row(torch.log2),
    "log10": Row(torch.log10),
    "exp2": Row(torch.exp2),
    "sin": Row(torch.sin, floor=1),
    "cos": Row(torch.cos, floor=1),
    "tan": Row(torch.tan, ulps=8, floor=1),
    "atan": Row(torch.atan),
    "asin": Row(torch.asin),
    "acos": Row(torch.acos),
    "asinh": Row(torch.asinh),
    "acosh": Row(torch.acosh),
    "atanh": Row(torch.atanh),
    "sinh": Row(torch.sinh),
    "cosh": Row(torch.cosh),
    "sqrt": Row(torch.sqrt),
    "rsqrt": Row(torch.rsqrt),
    "reciprocal": Row(torch.reciprocal),
    "square": Row(torch.square),
    "isnan": Row(lambda x: torch.where(x.isnan(), 1.0, x), ulps=0),
    "nan to num": Row(torch.nan_to_num, ulps=0),
    "frac": Row(torch.frac, ulps=0),
    "trunc": Row(torch.trunc, ulps=0),
    **{f"pow {p}": Row(lambda x, p=p: x**p) for p in (0, 1, 2, 3, 4, -1, -2, 0.5, -0.5, 1.5, -1.5, INF, -INF, NAN)},
    **{f"{p} pow": Row(lambda x, p=p: torch.pow(p, x)) for p in (0, 1, 2, 0.5, -2, INF, NAN)},
    "pow": Row(torch.pow, B, ulps=8),
    "add": Row(torch.add, B, ulps=0),
    "sub": Row(torch.sub, B, ulps=0),
    "mul": Row(torch.mul, B),
    "div": Row(torch.div, B),
    "div by number": Row(lambda x: x / 3.0),
    "number div": Row(lambda x: 3.0 / x),
    "mul by 0": Row(lambda x: x * 0.0),
    "div floor": Row(lambda x, y: torch.div(x, y, rounding_mode="floor"), B),
    "div trunc": Row(lambda x, y: torch.div(x, y, rounding_mode="trunc"), B),
    "remainder": Row(torch.remainder, B),
    "remainder of number": Row(lambda x: torch.remainder(x, 0.7)),
    "fmod": Row(torch.fmod, values=lambda t: pairs(moderate(t))),
    "maximum": Row(torch.maximum, B, ulps=0),
    "minimum": Row(torch.minimum, B, ulps=0),
    "fmax": Row(torch.fmax, B, ulps=0),
    "fmin": Row(torch.fmin, B, ulps=0),
    "where": Row(lambda x, y, z: torch.where(x > 0, y, z), T, ulps=0),
    "where, branch not taken": Row(lambda x: torch.where(x > 0, x.sqrt(), x.exp())),
    "masked fill": Row(lambda x, y: x.masked_fill(y > 0, 2.0), B, ulps=0),
    "lerp": Row(torch.lerp, T, floor=3, signed_zeros=False),
    "lerp by number": Row(lambda x, y: torch.lerp(x, y, 0.3), B, floor=3, signed_zeros=False),
    "addcmul": Row(lambda x, y, z: torch.addcmul(x, y, z, value=2), T, floor=1),
    "addcmul, near the largest": Row(lambda x, y: torch.addcmul(x, x, y, value=0.3), B, floor=1),
    "add scaled": Row(lambda x, y: torch.add(x, y, alpha=0.3), B),
    "sub scaled": Row(lambda x, y: torch.sub(x, y, alpha=0.3), B),
    "rsub scaled": Row(lambda x, y: torch.rsub(x, y, alpha=0.3), B),
    "addcdiv": Row(lambda x, y, z: torch.addcdiv(x, y, z, value=2), T, floor=1),
    "hypot": Row(torch.hypot, B),
    "atan2": Row(torch.atan2, B),
    "logaddexp": Row(torch.logaddexp, B, floor=1),
    "xlogy": Row(torch.xlogy, B),
    "xlogy of numbers": Row(lambda x: (torch.xlogy(0.5, x), torch.xlogy(x, 2), torch.xlogy(x, 0.0))),
    "xlog1py": Row(torch.special.xlog1py, B),
    "entr": Row(torch.special.entr),
    "sinc": Row(torch.sinc, floor=1),
    "logit": Row(torch.logit),
    "logit, eps": Row(lambda x: torch.logit(x, 0.1)),
    "angle": Row(torch.angle, ulps=0),
    "round to decimals": Row(lambda x: [torch.round(x, decimals=n) for n in (3, 0, -2)], ulps=0),
    "ldexp": Row(lambda x, y: torch.ldexp(x, y.detach()), B),
    "rrelu": Row(F.rrelu),
    "isclose": Row(lambda x, y: torch.where(x.isclose(y, rtol=0.1, atol=0.5), x, y), B, ulps=0),
    "isclose, NaN": Row(lambda x, y: torch.where(x.isclose(y, equal_nan=True), x, y), B, ulps=0),
    "copysign": Row(torch.copysign, B, ulps=0),
    "heaviside": Row(lambda x, y: torch.heaviside(x.detach(), y.detach()) + x, B),
    "glu": Row(lambda x, y: F.glu(torch.cat([x, y]), 0), B, floor=0.1),
    **{
        f"compare {f.__name__}": Row(lambda x, y, f=f: torch.where(f(x, y), x, 3.0), B, ulps=0)
        for f in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
    },
    "compare 0": Row(lambda x: (torch.where(x > 0, x, 2.0), torch.where(x < 0, x, 2.0), torch.where(x == 0, x, 2.0))),
    "logical": Row(lambda x, y: torch.where(x.logical_and(y) ^ y.logical_or(x), x, y), B, ulps=0),
    "to bool": Row(lambda x: torch.where(x.bool(), x, 5.0), ulps=0),
}


@pytest.mark.parametrize("differences", cases(ordinary=ELEMENTWISE, special=ELEMENTWISE, largest=ELEMENTWISE))
def test_values_and_gradients(differences: Callable[[], str]) -> None:
    assert not differences()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_denormals_are_kept(dtype: torch.dtype) -> None:
    x = torch.full((1000,), torch.finfo(dtype).smallest_normal / 4, dtype=dtype, requires_grad=True)
    half, positive, twice = ORTModule(Function(lambda _, x: (x * 0.5, x > 0, (x * 3 - x).relu())))(x)
    assert positive.all() and torch.equal(half, x * 0.5) and torch.equal(twice, x * 2)
    (dx,) = torch.autograd.grad(half, x, x.detach())
    assert torch.equal(dx, x * 0.5)


@pytest.mark.host
def test_denormals_are_flushed_where_the_caller_asks_for_it() -> None:
    ours = ORTModule(Function(lambda _, x: (x * 0.5, x > 0)))
    x = torch.full((70000,), torch.finfo(torch.float32).tiny)
    for flush in (False, True, False):
        torch.set_flush_denormal(flush)
        try:
            half, positive = ours(x)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(half.view(torch.int32) == 0, torch.full(x.shape, flush))
        assert positive.all()


def _rounded(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: torch.div(x, y, rounding_mode=mode)


ON_INTEGERS: dict[str, Callable[[Tensor], Any]] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "sign": torch.sign,
    "bits": lambda x: (~x, x & 6, x | 1, x ^ -1 if x.dtype.is_signed else x ^ 255, x << 3, x >> 1),
    "square": torch.square,
    "cube": lambda x: x**3,
    "relu": torch.relu,
    "clamp": lambda x: (x.clamp(-2, 5), x.clamp(min=1), x.clamp(max=0)),
    "rounding": lambda x: (x.floor(), x.ceil(), x.round(), x.trunc()),
    "numbers": lambda x: (x + 300, x * 3, 5 - x, x * 1000),
    "reductions": lambda x: (x.sum(), x.prod(), x.amax(), x.amin(), x.any(), x.cumsum(0)),
    "positions of extremes": lambda x: (x.argmax(), x.argmin(), x.max(0), x.min(0)),
    "scans": lambda x: (x.cumprod(0), x.diff(), x.sort()),
    "triangles": lambda x: (x[:9].view(3, 3).tril(-1), x[:9].view(3, 3).triu(5)),
    "linspace and logspace": lambda x: (
        torch.linspace(0, 10, 7, dtype=torch.int64) + x[0],
        torch.linspace(9.7, -9.7, 50, dtype=torch.int64),
        torch.linspace(4.3, x[3], 50, dtype=torch.int64),
        torch.linspace(x[4], 40.7, 50, dtype=torch.int64),
        torch.logspace(x[1], 2.9, 9, dtype=torch.int64),
    ),
    "floats": lambda x: (x.float(), x.double() / 2, x / 3, x.float().mean()),
}
OF_TWO_INTEGERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "__lshift__": lambda x, y: x << y,
    "__rshift__": lambda x, y: x >> y,
    **{f.__name__: f for f in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)},
    **{
        f.__name__: f
        for f in (torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.lt, torch.ge, torch.eq)
    },
}
DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{f.__name__: f for f in (torch.floor_divide, torch.remainder, torch.fmod, torch.div)},
    **{mode: _rounded(mode) for mode in ("floor", "trunc")},
}


def _flat(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else [t for v in values for t in _flat(v)]


@functools.cache
def integer_results(dtype: torch.dtype) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Ours and PyTorch's of each function, all of which are computed by one module."""
    x = corners(dtype)
    a, b = pairs(x)
    divides = (b != 0) & ~((a == torch.iinfo(dtype).min) & (b == -1))  # the rest is refused or undefined
    n, d = a[divides], b[divides]

    def forward(_: Any, *xs: Tensor) -> dict[str, Any]:
        x, a, b, n, d = xs
        outputs = {name: f(x) for name, f in ON_INTEGERS.items()}
        outputs |= {name: f(a, b) for name, f in OF_TWO_INTEGERS.items()}
        return outputs | {name: f(n, d) for name, f in DIVISIONS.items()}

    eager, ours = pair(Function(forward))
    got, want = ours(x, a, b, n, d), eager(x, a, b, n, d)
    assert not broken(ours)
    return {name: (_flat(got[name]), _flat(want[name])) for name in want}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", [*ON_INTEGERS, *OF_TWO_INTEGERS, *DIVISIONS])
def test_integers(name: str, dtype: torch.dtype) -> None:
    for ours, eager in zip(*integer_results(dtype)[name], strict=True):
        assert ours.dtype == eager.dtype
        assert torch.equal(ours, eager)
