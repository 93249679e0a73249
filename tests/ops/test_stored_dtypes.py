"""What is stored as another dtype than it is computed of: the same bits as with casts of its own beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from case import type_text
from cases_elementwise import ONNX_CODE
from ortmodule_c import _C

HALVES = (torch.bfloat16, torch.float16)
SHAPES = [(3, 5), (2, 512), (2, 513), (1, 1300), (4, 1), (0, 7), (3, 0), (40, 1030)]  # about blocks of 512


@pytest.fixture(params=_C.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> object:
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(None)


def run(nodes: list[str], outputs: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    lines = [f"input %{name} : {type_text(t)}" for name, t in inputs.items()]
    given = list(inputs.values())
    session = _C.Session("\n".join([*lines, *nodes, f"return {outputs}", ""]), {})
    plan = session.plan(given, [False] * len(given), [False] * session.n_outputs, plain=True)
    return plan.forward(given, 0)[0]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def assert_same_bits(one: list[Tensor], two: list[Tensor]) -> None:
    for a, b in zip(one, two, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
        assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


def of_norms(ops: list[tuple[str, str]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For ops and their statistics, with gamma and without."""

    def each(test: Callable[..., None]) -> Callable[..., None]:
        for names, values in (("half", HALVES), ("gamma", ["_", "%gamma"]), ("shape", SHAPES), (("op", "kept"), ops)):
            test = pytest.mark.parametrize(names, values, ids=str if names in ("half", "shape") else None)(test)
        return test

    return each


def parameters(shape: tuple[int, int], gamma: str) -> dict[str, Tensor]:
    return {"gamma": numbers(shape[1], seed=3)} if gamma != "_" else {}


@of_norms([("LayerNormalization", "%m, %r"), ("RmsNorm", "%r")])
def test_y_is_rounded_as_it_is_stored(
    op: str, kept: str, shape: tuple[int, int], gamma: str, half: torch.dtype
) -> None:
    inputs = {"x": numbers(*shape)} | parameters(shape, gamma)
    to = ONNX_CODE[half]
    one = run([f"%y, {kept} = {op}(%x, {gamma}) {{to={to}}}"], f"%y, {kept}", inputs)
    nodes = [f"%w, {kept} = {op}(%x, {gamma})", f"%y = Cast(%w) {{to={to}}}"]
    assert_same_bits(one, run(nodes, f"%y, {kept}", inputs))


@of_norms([("LayerNormGrad", "%m, %r"), ("RmsNormGrad", "%r")])
def test_a_gradient_of_y_is_widened_as_it_is_read(
    op: str, kept: str, shape: tuple[int, int], gamma: str, half: torch.dtype
) -> None:
    inputs = {"dy": numbers(*shape).to(half), "x": numbers(*shape, seed=1)} | parameters(shape, gamma)
    inputs |= {name[1:]: numbers(shape[0], 1, seed=2) for name in kept.split(", ")}
    outputs = "%dx, %dgamma, %dbeta" if op == "LayerNormGrad" else "%dx, %dgamma"
    one = run([f"{outputs} = {op}(%dy, %x, {gamma}, {kept})"], outputs, inputs)
    nodes = ["%w = Cast(%dy) {to=1}", f"{outputs} = {op}(%w, %x, {gamma}, {kept})"]
    assert_same_bits(one, run(nodes, outputs, inputs))


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((9, 5), [1]), ((9, 5), [0]), ((3, 40000), [1]), ((40000, 3), [0]), ((4, 6, 70), [0, 2]), ((300, 300), [0, 1]),
     ((0, 3), [0]), ((3, 0), [0]), ((1, 1), [0])],
    ids=str,
)  # fmt: skip
def test_a_sum_is_widened_as_it_is_stored(
    shape: tuple[int, ...], axes: list[int], keepdims: int, half: torch.dtype
) -> None:
    """In parts and whole, by rows and by columns, and where it is more than half precision holds."""
    x = numbers(*shape).to(half)
    x[:1] *= 20000
    given = f"const %axes : i64[{len(axes)}] = {axes}"
    one = run([given, f"%y = ReduceSum(%x, %axes) {{keepdims={keepdims}, to=1}}"], "%y", {"x": x})
    nodes = [given, f"%s = ReduceSum(%x, %axes) {{keepdims={keepdims}}}", "%y = Cast(%s) {to=1}"]
    assert_same_bits(one, run(nodes, "%y", {"x": x}))


@pytest.mark.parametrize(("x", "to"), [("f32", 16), ("f32", 1), ("f64", 1), ("i64", 1), ("bf16", 11), ("f16", 16)])
def test_sums_of_other_dtypes_are_refused(x: str, to: int) -> None:
    with pytest.raises(TypeError, match=rf"sums of {x} are not kept as"):
        _C.transform(f"input %x : {x}[2,3]\n%y = ReduceSum(%x) {{to={to}}}\nreturn %y\n", "specialize")


@pytest.mark.parametrize(("x", "to"), [("f64", 16), ("bf16", 10), ("f32", 11), ("f16", 1)])
def test_other_dtypes_are_refused(x: str, to: int) -> None:
    with pytest.raises(TypeError, match=r"what is made of .* cannot be"):
        _C.transform(f"input %x : {x}[2,3]\n%y, %r = RmsNorm(%x) {{to={to}}}\nreturn %y\n", "specialize")
