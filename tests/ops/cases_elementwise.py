"""Rows of the elementwise families: unary, cast, binary, compare."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, tensor
from torch.nn import functional as F

from case import Case
from cases_movement import F64, x

F32, I64, I32, BOOL = torch.float32, torch.int64, torch.int32, torch.bool
INF, NAN = float("inf"), float("nan")

# Ends of the range, signed zeros, halves, and values that are equal between the two.
EDGES = tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -0.5, -2.5, 3.0, -3.0, 6.0, 20.0, -20.0, 80.0, -80.0, INF, -INF, NAN]
)
OTHER = tensor([0.0, 1.0, 1.0, -1.0, 2.0, 0.5, 2.5, 0.25, -1.0, 3.0, 2.0, -4.0, 2.0, 3.0, -1.0, 2.0, 1.0, INF, 1.0])
INTS = tensor([0, 1, -1, 7, -7, 8, -8, 2**40, -(2**40), 5])
INT_DIVISORS = tensor([3, -2, 4, 3, 3, -3, -5, 1000, 7, 5])


def positive(t: Tensor) -> Tensor:
    return t.abs() + 0.05


def within_one(t: Tensor) -> Tensor:
    return 0.8 * t.sin()


def above_one(t: Tensor) -> Tensor:
    return t.abs() + 1.5


def floats(
    op: str,
    f: Callable[..., Tensor],
    *,
    edges: bool = True,
    of: Callable[[Tensor], Tensor] = torch.clone,
    **attrs: object,
) -> list[Case]:
    """A function of one float, which `of` brings where it is smooth: several lengths, both classes, the range's ends."""
    inputs = [x(5, 7), x(3, 4, 33, seed=1), x(70000, seed=2), x(), x(0, 3), x(6, 5, dtype=F64)]
    rows = [Case(op, [of(t)], f, attrs) for t in inputs]
    # Gradients at the ends are compared in the rows above, where there are any.
    return rows + ([Case(op, [EDGES], f, attrs, grads=[])] if edges else [])


def clip(t: Tensor, low: Tensor | None, high: Tensor | None = None) -> Tensor:
    """torch.clamp, whose gradient at a bound is another in each version of PyTorch: here it is that of `t`."""
    t = t if low is None else torch.where(t < low, low, t)
    return t if high is None else torch.where(t > high, high, t)


def clips(low: float | None, high: float | None) -> list[Case]:
    """Between scalars, given in the graph or with its inputs."""
    rows = []
    for t in (x(5, 7), x(3, 4, 33, seed=1), x(70000, seed=2), x(), x(0, 3), x(6, 5, dtype=F64)):
        bounds = [None if v is None else tensor(v, dtype=t.dtype) for v in (low, high)]
        given = [i for i, v in enumerate(bounds, 1) if v is not None]
        rows += [Case("Clip", [t, *bounds], clip, consts=consts) for consts in ([], given)]
    return rows


CASES = [
    *floats("Abs", torch.abs),
    *floats("Acos", torch.acos, of=within_one),
    *floats("Acosh", torch.acosh, of=above_one),
    *floats("Asin", torch.asin, of=within_one),
    *floats("Asinh", torch.asinh),
    *floats("Atan", torch.atan),
    *floats("Atanh", torch.atanh, of=within_one),
    *floats("Ceil", torch.ceil),
    *floats("Cos", torch.cos),
    *floats("Cosh", torch.cosh),
    *floats("Elu", F.elu, alpha=1.0),
    *floats("Elu", lambda t: F.elu(t, 0.5), alpha=0.5),
    *floats("Elu", F.selu, alpha=1.6732632423543772, scale=1.0507009873554805),
    *floats("Elu", lambda t: F.celu(t, 2.0), alpha=2.0, input_scale=0.5),
    *floats("Erf", torch.erf),
    *floats("Exp", torch.exp),
    *floats("Exp2", torch.exp2),
    *floats("Expm1", torch.expm1),
    *floats("Floor", torch.floor),
    # PyTorch's vectorised gelu(inf) is NaN.
    *floats("Gelu", F.gelu, edges=False, approximate="none"),
    *floats("Gelu", lambda t: F.gelu(t, approximate="tanh"), approximate="tanh"),
    *floats("HardSwish", F.hardswish, edges=False),
    *floats("IsNaN", torch.isnan),
    *floats("LeakyRelu", lambda t: F.leaky_relu(t, 0.1), alpha=0.1),
    *floats("Log", torch.log, of=positive),
    *floats("Log10", torch.log10, of=positive),
    *floats("Log1p", torch.log1p, of=positive),
    *floats("Log2", torch.log2, of=positive),
    *floats("LogSigmoid", F.logsigmoid),
    *floats("Mish", F.mish),
    *floats("Neg", torch.neg),
    *floats("Reciprocal", torch.reciprocal, of=positive),
    *floats("Relu", torch.relu),
    *floats("Round", torch.round),
    *floats("Rsqrt", torch.rsqrt, of=positive),
    *floats("Sigmoid", torch.sigmoid),
    *floats("Sign", torch.sign),
    *floats("Silu", F.silu),
    *floats("Sin", torch.sin),
    *floats("Sinh", torch.sinh),
    *floats("Softplus", F.softplus),
    *floats("Softplus", lambda t: F.softplus(t, 2, 3), beta=2.0, threshold=3.0),
    *floats("Sqrt", torch.sqrt, of=positive),
    *floats("Tan", torch.tan, of=within_one),
    *floats("Tanh", torch.tanh),
    Case("Sin", [x(400) * 1e3], torch.sin),
    Case("Cos", [tensor([1e4, -1e6, 3e7])], torch.cos),
    Case("Tan", [tensor([1e4, -1e6, 3e7, 1e-3, 1.57, -1.58])], torch.tan),
    *[Case(op, [torch.linspace(-1, 1, 400)], f) for op, f in (("Acos", torch.acos), ("Asin", torch.asin))],
    *[Case(op, [torch.linspace(-10, 10, 400)], f) for op, f in (("Sinh", torch.sinh), ("Cosh", torch.cosh))],
    *[Case(op, [torch.linspace(-88, 88, 400)], f, grads=[]) for op, f in (("Sinh", torch.sinh), ("Cosh", torch.cosh))],
    *[Case("Acosh", [t], torch.acosh) for t in (torch.linspace(1, 40, 400), tensor([1.0001, 1e8, 1e12, 3e38]))],
    Case("Asinh", [tensor([1e-6, -1e-3, 1e5, -1e12, 3e38, -3e38])], torch.asinh),
    Case("Atanh", [torch.linspace(-0.999, 0.999, 400)], torch.atanh),
    Case("Atan", [tensor([1e-6, -1e-3, 0.99, 1.01, -5.0, 1e12, -3e38])], torch.atan),
    Case("Exp", [torch.linspace(-100, 90, 400)], torch.exp),
    Case("Exp2", [torch.linspace(-150, 128, 400)], torch.exp2),
    Case("Exp2", [torch.arange(-126.0, 128)], lambda t: torch.ldexp(t * 0 + 1, t.int()), grads=[]),
    Case("Log2", [torch.ldexp(torch.ones(277), torch.arange(-149, 128))], lambda t: t.log2().round(), grads=[]),
    *[
        Case(op, [tensor([1e-45, 1e-38, 0.7, 0.9999, 1.0001, 7.0, 1e6, 3e38])], f, grads=[])
        for op, f in (("Log2", torch.log2), ("Log10", torch.log10))
    ],
    Case("Tanh", [torch.linspace(-11, 11, 400)], torch.tanh),
    Case("Erf", [torch.linspace(-5, 5, 400)], torch.erf),
    Case("Abs", [INTS], torch.abs),
    Case("Neg", [INTS], torch.neg),
    *[Case("BitwiseNot", [INTS.to(t)], torch.bitwise_not) for t in (I64, I32, torch.int8, torch.uint8)],
    Case("Sign", [INTS], torch.sign),
    Case("Relu", [INTS], torch.relu),
    *[row for bounds in ((-0.5, 0.75), (0.25, None), (None, 0.25), (0.5, -0.5)) for row in clips(*bounds)],
    Case("Clip", [INTS, tensor(-5), tensor(6)], torch.clamp, consts=[1, 2]),
    Case("Clip", [tensor([2**62 + 1, -(2**62) - 1]), tensor(-(2**62))], torch.clamp, consts=[1]),
    Case("Not", [x(3, 41, dtype=BOOL)], torch.logical_not),
    Case("GeluGrad", [x(5, 7), x(5, 7, seed=1)], torch.ops.aten.gelu_backward, grads=[]),
    Case("SiluGrad", [x(5, 7), x(5, 7, seed=1)], torch.ops.aten.silu_backward, grads=[]),
    Case(
        "ReluGrad",
        [x(5, 7), F.relu(x(5, 7, seed=1))],
        lambda g, y: torch.ops.aten.threshold_backward(g, y, 0),
        grads=[],
    ),
]

BINARY: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Mod": torch.remainder,
    "FloorDiv": partial(torch.div, rounding_mode="floor"),
}
COMPARE: dict[str, Callable[..., Tensor]] = {
    "Equal": torch.eq,
    "NotEqual": torch.ne,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
}
BITWISE: dict[str, Callable[..., Tensor]] = {
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}
LOGIC: dict[str, Callable[..., Tensor]] = {"And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor}

# Equal shapes, a scalar, a short and a long period, rows, channels, both sides repeated, gaps.
SHAPES = [
    ((5, 7), (5, 7)),
    ((40, 33), ()),
    ((1,), (3, 5)),
    ((50, 48), (48,)),
    ((3, 5000), (5000,)),
    ((6, 300), (6, 1)),
    ((2, 5, 7, 9), (1, 5, 1, 1)),
    ((4, 1), (1, 600)),
    ((3, 1, 40), (1, 30, 40)),
    ((2, 1, 3, 1, 9), (2, 4, 1, 5, 9)),
    ((0, 3), (3,)),
    ((300, 700), (300, 700)),
]
for _a, _b in SHAPES:
    CASES.append(Case("Sub", [x(*_a), x(*_b, seed=1)], torch.sub))
    CASES.append(Case("Mul", [x(*_a, dtype=F64), x(*_b, dtype=F64, seed=1)], torch.mul))
    CASES.append(Case("Less", [x(*_a, dtype=I64), x(*_b, dtype=I64, seed=1)], torch.lt))
    CASES.append(Case("Where", [x(*_a, dtype=BOOL), x(*_b), x(*_a, seed=1)], torch.where))

for _op, _f in BINARY.items():
    _away = x(33, 5, seed=3)
    _away = torch.where(_away < 0, _away - 0.3, _away + 0.3)
    CASES.append(Case(_op, [x(33, 5), _away], _f))
    CASES.append(Case(_op, [x(9, dtype=F64), x(9, dtype=F64, seed=1) + 3], _f))
    CASES.append(Case(_op, [EDGES, OTHER], _f, grads=[]))
    if _op != "Div":
        CASES.append(Case(_op, [INTS, INT_DIVISORS], _f))
        CASES.append(Case(_op, [INTS.to(I32), INT_DIVISORS.to(I32)], _f))

for _type, _t in ((F32, x(33, 5)), (F64, x(33, 5, dtype=F64))):
    _d = x(33, 5, seed=3, dtype=_type) + 4
    CASES += [
        Case("Mod", [9 * _t, _d], torch.fmod, {"fmod": 1}),
        Case("Atan2", [_t, x(5, seed=1, dtype=_type)], torch.atan2),
    ]
CASES += [
    Case("Mod", [EDGES, OTHER], torch.fmod, {"fmod": 1}, grads=[]),
    *[Case("Mod", [INTS.to(t), INT_DIVISORS.to(t)], torch.fmod, {"fmod": 1}) for t in (I64, I32)],
    # All pairs: quadrants, zeros of both signs, infinities.
    Case("Atan2", [EDGES[:, None], EDGES], torch.atan2, grads=[]),
]

for _op, _f in COMPARE.items():
    CASES.append(Case(_op, [EDGES, OTHER], _f))
    CASES.append(Case(_op, [x(77, dtype=I64), x(77, dtype=I64, seed=1)], _f))
    CASES.append(Case(_op, [x(31, dtype=BOOL), x(31, dtype=BOOL, seed=1)], _f))

for _op, _f in BITWISE.items():
    for _t in (I64, I32, torch.int16, torch.int8, torch.uint8):
        CASES.append(Case(_op, [INTS.to(_t), INTS.flip(0).to(_t)], _f))
    CASES.append(Case(_op, [x(40, 33, dtype=I64), x(33, dtype=I64, seed=1)], _f))
    CASES.append(Case(_op, [x(0, 3, dtype=I64), tensor(-7)], _f))
for _way, _f in (("LEFT", torch.bitwise_left_shift), ("RIGHT", torch.bitwise_right_shift)):
    for _t in (I64, I32, torch.int16, torch.int8, torch.uint8):
        _by = tensor([0, 1, 2, 6, 7, 8, 15, 16, 31, 32, 62, 63, 64, 100, -1, -3]).to(_t)
        CASES.append(
            Case("BitShift", [tensor([1, 3, 77, 127, -1, -128]).to(_t)[:, None], _by], _f, {"direction": _way})
        )

for _op, _f in LOGIC.items():
    CASES.append(Case(_op, [x(5, 31, dtype=BOOL), x(31, dtype=BOOL, seed=1)], _f))

CASES += [
    Case("Div", [INTS, INT_DIVISORS], lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    # PyTorch leaves the least by -1 to the machine.
    *(Case(op, [tensor([-(2**63)]), tensor([-1])], lambda a, b: a) for op in ("Div", "FloorDiv")),
    Case("Mod", [tensor([-(2**63)]), tensor([-1])], lambda a, b: a * 0),
    Case("Add", [tensor([2**63 - 1]), tensor([1])], torch.add),
    Case("Max", [tensor([1.0, 2.0, 3.0]), tensor([1.0, 5.0, -1.0])], torch.maximum),
    Case("Min", [tensor([1.0, 2.0, 3.0]), tensor([1.0, 5.0, -1.0])], torch.minimum),
    Case("Pow", [x(40).abs() + 0.1, x(40, seed=1)], torch.pow),
    Case("Pow", [x(9, dtype=F64).abs() + 0.1, x(9, dtype=F64, seed=1)], torch.pow),
    Case("Pow", [EDGES, OTHER], torch.pow, grads=[]),
    *(Case("Pow", [x(3, 400), tensor(e)], torch.pow, consts=[1]) for e in (0.0, 1.0, 2.0, 3.0, -1.0, 4.0)),
    *(Case("Pow", [x(3, 400).abs() + 0.1, tensor(e)], torch.pow, consts=[1]) for e in (0.5, -0.5, 1.7)),
    Case("Pow", [tensor([0.0, 0.0, 2.0]), tensor([0.0, 2.0, 0.0])], torch.pow),
    Case("Lerp", [x(5, 31), x(31, seed=1), x(5, 1, seed=2)], torch.lerp),
    Case("Lerp", [x(5, 31, dtype=F64), x(5, 31, dtype=F64, seed=1), tensor(0.7, dtype=F64)], torch.lerp),
    Case("MulAdd", [x(5, 31), x(31, seed=1), x(5, 1, seed=2)], lambda a, b, c: a * b + c),
    Case("MulAdd", [x(5, 31, dtype=F64), tensor(0.7, dtype=F64), x(31, dtype=F64)], lambda a, b, c: a * b + c),
    Case("Where", [x(5, 31, dtype=BOOL), x(31, dtype=I64), tensor(3)], torch.where),
    Case("Where", [x(5, 31, dtype=BOOL), x(31, dtype=BOOL, seed=1), tensor(True)], torch.where),
]

ONNX_CODE = {
    torch.float32: 1,
    F64: 11,
    torch.float16: 10,
    torch.bfloat16: 16,
    I64: 7,
    I32: 6,
    torch.int16: 5,
    torch.int8: 3,
    torch.uint8: 2,
    BOOL: 9,
}


def cast(t: Tensor, to: torch.dtype) -> Case:
    # Finite differences of float64 are no use after rounding to less.
    grads = None if t.dtype != F64 and to.is_floating_point else []
    return Case("Cast", [t], lambda a: a.to(to), {"to": ONNX_CODE[to]}, grads=grads)


def casts(*inputs: Tensor, to: torch.dtype) -> Case:
    """Of several tensors by one node."""
    grads = None if inputs[0].dtype != F64 and to.is_floating_point else []
    attrs = {"to": ONNX_CODE[to]}
    return Case("Casts", inputs, lambda *ts: [t.to(to) for t in ts], attrs, outputs=len(inputs), grads=grads)


SMALL = tensor([0.0, -0.0, 1.0, -1.0, 2.75, -2.75, 100.0, 0.3])
CASES += [
    cast(SMALL.to(a), b) for a in (torch.float32, F64, I64, I32, BOOL) for b in (torch.float32, F64, I64, I32, BOOL)
]
CASES += [cast(x(70, 130), to) for to in (I64, BOOL, F64)]
CASES += [casts(x(3, 1700), x(), x(0, 4), x(1), x(9, 11), to=to) for to in (F64, I32)]
CASES += [casts(x(5, 7, dtype=dtype), x(4099, dtype=dtype), to=torch.float32) for dtype in (F64, I64)]
