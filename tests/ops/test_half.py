"""Elementwise ops on 16-bit floats, integers of every width, and programs that convert midway."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from case import DTYPE_TEXT, type_text
from cases_elementwise import ONNX_CODE
from ortmodule_c import _C

HALVES = (torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
EVERY_HALF = torch.arange(-(2**15), 2**15).to(torch.int16)
# Around the largest and the smallest float16, and where rounding is decided by evenness.
LARGE = [65504.0, 65519.0, 65520.0, 65535.0, 65536.0, 1e6, 3.4e38, float("inf"), float("nan")]
LITTLE = [0.0, 2**-14, 2**-24, 2**-25, 3 * 2**-26, 1 + 2**-9, 1 + 3 * 2**-9]
EDGES = torch.tensor(LARGE + LITTLE)


@pytest.fixture(params=_C.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> object:
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(None)


def run(nodes: str, *inputs: Tensor, outputs: int = 1) -> list[Tensor]:
    lines = [f"input %x{i} : {type_text(t)}" for i, t in enumerate(inputs)]
    names = ", ".join(f"%y{k}" for k in range(outputs))
    text = "\n".join([*lines, f"{names} = {nodes}", f"return {names}", ""])
    plan = _C.Session(text, {}).plan(list(inputs), [False] * len(inputs), [False] * outputs)
    return plan.forward(list(inputs), 0)[0]


def cast(x: Tensor, to: torch.dtype) -> Tensor:
    return run(f"Cast(%x0) {{to={ONNX_CODE[to]}}}", x)[0]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_every_half_is_widened_as_torch_does(half: torch.dtype, wide: torch.dtype) -> None:
    x = EVERY_HALF.view(half)
    assert torch.equal(cast(x, wide).nan_to_num(nan=123.0), x.to(wide).nan_to_num(nan=123.0))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_narrowing_rounds_to_nearest_even(half: torch.dtype, wide: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    scale = 10.0 ** torch.randint(-9, 6, (5000,), generator=g)
    x = torch.cat([torch.randn(5000, generator=g) * scale, EDGES, -EDGES]).to(wide)
    assert torch.equal(cast(x, half).nan_to_num(nan=123.0), x.to(half).nan_to_num(nan=123.0))


@pytest.mark.parametrize("half", HALVES)
def test_several_tensors_are_narrowed_as_one_is(half: torch.dtype) -> None:
    """Of none, of some, of more than a block, with what is at the edges of the dtype."""
    xs = [torch.randn(5000), EDGES, torch.empty(0, 3), torch.randn(()), torch.randn(7, 11)]
    got = run(f"Casts({', '.join(f'%x{i}' for i in range(len(xs)))}) {{to={ONNX_CODE[half]}}}", *xs, outputs=len(xs))
    for y, x in zip(got, xs, strict=True):
        assert torch.equal(y.nan_to_num(nan=123.0), x.to(half).nan_to_num(nan=123.0))


@pytest.mark.parametrize("half", HALVES)
def test_ops_compute_in_float32(half: torch.dtype) -> None:
    a, b = torch.randn(40, 33).to(half), torch.randn(33).to(half)
    assert torch.equal(run("Mul(%x0, %x1)", a, b)[0], a * b)
    torch.testing.assert_close(run("Gelu(%x0)", a)[0], F.gelu(a))


@pytest.mark.parametrize(("source", "to"), list(itertools.product(INTEGERS, INTEGERS)), ids=lambda d: DTYPE_TEXT[d])
def test_integers_keep_their_low_bits(source: torch.dtype, to: torch.dtype) -> None:
    x = torch.randint(-(2**40), 2**40, (1000,)).to(source)
    assert torch.equal(cast(x, to), x.to(to))


def fused(ops: str, args: list[int], imm: list[float], outs: list[int], dtypes: list[int]) -> str:
    names = ", ".join(f'"{op}"' for op in ops.split())
    program = f"ops=[{names}], args={args}, imm={imm}, outs={outs}, dtypes={dtypes}"
    return f'FusedElementwise(%x0, %x1) {{{program}, class="f32"}}'


def test_a_cast_inside_a_program_rounds() -> None:
    x, z = torch.randn(3, 700) * 20, torch.randn(700)
    order = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]  # of base/dtype.def
    imm = [0.0] * 24
    for k, to in ((1, torch.bfloat16), (3, torch.int64), (5, torch.bfloat16)):
        imm[4 * k] = float(order.index(to))
    args = [0, 1, -1, 2, -1, -1, 3, -1, -1, 2, -1, -1, 5, 0, -1, 2, -1, -1]
    a, b, c = run(fused("Add Cast Exp Cast Less Cast", args, imm, [4, 6, 7], [1, 9, 16]), x, z, outputs=3)
    torch.testing.assert_close(a, (x + z).bfloat16().float().exp(), rtol=1e-5, atol=1e-37)
    assert torch.equal(b, (x + z).long().float() < x)
    assert torch.equal(c, (x + z).bfloat16())


@pytest.mark.parametrize("n", [0, 1, 480, 500, 700])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_a_program_rounds_as_pytorch_does(to: torch.dtype, n: int) -> None:
    """What is out of range, denormal, a tie between two neighbours or no number as well."""
    x = torch.cat([torch.randn(n) * 10.0 ** torch.randint(-42, 8, (n,)), EDGES, -EDGES])
    imm = [0.0, 0.0, 0.0, 0.0, float({torch.float16: 2, torch.bfloat16: 3}[to]), *[0.0] * 7]
    (y,) = run(fused("Neg Cast Abs", [0, -1, -1, 2, -1, -1, 3, -1, -1], imm, [4], [1]), x, x, outputs=1)
    torch.testing.assert_close(y, (-x).to(to).float().abs(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("first", "then"), [HALVES, HALVES[::-1], (torch.bfloat16, torch.bfloat16)])
def test_a_program_rounds_to_one_type_after_the_other(first: torch.dtype, then: torch.dtype) -> None:
    """Also where what is rounded twice is a result, in 16 bits or widened."""
    x = torch.cat([torch.randn(500) * 10.0 ** torch.randint(-9, 7, (500,)), EDGES, -EDGES])
    imm = [0.0] * 16
    imm[4], imm[8] = (float({torch.float16: 2, torch.bfloat16: 3}[to]) for to in (first, then))
    args = [0, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1]
    code = [ONNX_CODE[torch.float32], ONNX_CODE[then], ONNX_CODE[torch.float32]]
    y, half, wide = run(fused("Neg Cast Cast Abs", args, imm, [5, 4, 4], code), x, x, outputs=3)
    (alone,) = run(fused("Neg Cast Cast Abs", args, imm, [5], code[:1]), x, x, outputs=1)
    (last,) = run(fused("Neg Cast Cast", args[:9], imm[:12], [4], code[:1]), x, x, outputs=1)
    want = (-x).to(first).to(then)
    for got, exact in ((half, want), (wide, want.float()), (last, want.float()), (y, wide.abs()), (alone, wide.abs())):
        torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)


def test_a_cast_that_changes_nothing_is_left_out_of_a_program() -> None:
    """Whoever reads it, and where it is itself a result, or two."""
    x, z = torch.randn(3, 700).bfloat16(), torch.randn(700)
    widen = "Cast Add Cast Cast"
    args = [0, -1, -1, 2, 1, -1, 3, -1, -1, 4, -1, -1]
    a, b, c, d = run(fused(widen, args, [0.0] * 16, [2, 3, 4, 5], [1, 16, 1, 1]), x, z, outputs=4)
    assert torch.equal(a, x.float())
    assert torch.equal(b, (x + z).bfloat16())
    assert torch.equal(c, x + z) and torch.equal(d, x + z)
    (alone,) = run(fused(widen, args, [0.0] * 16, [5], [1]), x, z, outputs=1)
    assert torch.equal(alone, x + z)


BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def random_nodes(seed: int, values: dict[str, torch.dtype], n: int) -> list[str]:
    """Of one operand or two of a dtype each, which are added to the values; and casts between the dtypes."""
    pick, nodes = random.Random(seed), []
    for k in range(n):
        op = pick.choice(["Add", "Mul", "Max", "ReluGrad", "Relu", "Gelu", "Sigmoid", "Dropout", "Cast", "Cast"])
        name = pick.choice(list(values))
        dtype, attributes = values[name], {"Dropout": f" {{p=0.5, subsequence={k}}}"}.get(op, "")
        other = pick.choice([v for v in values if values[v] == dtype])
        if op == "Cast":
            dtype = pick.choice(list(BITS))
            attributes = f" {{to={ONNX_CODE[dtype]}}}"
        second = f", %{other}" if op in ("Add", "Mul", "Max", "ReluGrad") else ""
        nodes.append(f"%n{k} = {op}(%{name}{second}){attributes}")
        values[f"n{k}"] = dtype
    return nodes


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("half", HALVES)
def test_a_program_has_the_bits_of_its_ops_one_by_one(half: torch.dtype, seed: int) -> None:
    """Whatever of it is kept in 16 bits, of operands that lie in a row, repeat or are one number."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(3, 17, 29), (3, 17, 29), (29,), ()]
    x = [torch.randn(s, generator=g).to(half if k != 1 else torch.float32) for k, s in enumerate(shapes)]
    values = {f"x{k}": t.dtype for k, t in enumerate(x)}
    nodes = random_nodes(seed, values, 9)
    outputs = [f"%n{k}" for k in random.Random(seed).sample(range(8), 2)] + ["%n8"]
    lines = [*(f"input %x{k} : {type_text(t)}" for k, t in enumerate(x)), *nodes, "return " + ", ".join(outputs), ""]
    session = _C.Session("\n".join(lines), {})
    fused, single = (session.plan(x, [False] * 4, [False] * 3, plain=plain).forward(x, 5)[0] for plain in (False, True))
    for name, got, want in zip(outputs, fused, single, strict=True):
        assert got.dtype == want.dtype == values[name[1:]]
        assert torch.equal(got.view(BITS[got.dtype]), want.view(BITS[got.dtype])), "\n".join([name, *nodes])


@pytest.mark.parametrize(
    "args", [[0, 1, -1, 9, -1, -1], [0, -1, -1, 2, -1, -1], [0, 1, 1, 2, -1, -1], [0, 1, -1, 3, -1, -1]]
)
def test_a_malformed_program_is_refused(args: list[int]) -> None:
    with pytest.raises(ValueError, match="FusedElementwise: malformed attribute ops or args"):
        run(fused("Add Exp", args, [0.0] * 8, [3], [1]), torch.randn(3), torch.randn(3))


@pytest.mark.parametrize("op", ["Cast", "Dropout"])
@pytest.mark.parametrize("number", [-1.0, 0.5, 2.0**32, float("inf"), float("nan")])
def test_numbers_that_an_instruction_cannot_take_are_refused(op: str, number: float) -> None:
    with pytest.raises(ValueError, match="FusedElementwise: malformed attribute imm"):
        run(fused(op, [0, -1, -1], [number, 1.0, 0.0, 0.0], [2], [1]), torch.randn(3), torch.randn(3))
