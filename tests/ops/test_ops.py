"""Every row of every table: forward, gradient, finite differences, threads, open dims."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from case import Case, assert_close, expected, expected_grad, free_inputs, run, run_grad, wanted
from ortmodule_c import _C

CASES: list[Case] = []
for path in sorted(Path(__file__).parent.glob("cases_*.py")):
    CASES += importlib.import_module(path.stem).CASES

FLOAT_CASES = [c for c in CASES if _C.ops()[c.op][2] and wanted(c)]
DERIVATIVE_CASES = [
    c for c in FLOAT_CASES if c.derivative and any(t is not None and t.dtype == torch.float64 for t in c.inputs)
]


def out_grads(case: Case, outputs: list[Tensor]) -> list[Tensor | None]:
    g = torch.Generator().manual_seed(7)
    n = next((k for k in (case.differentiable, case.compare) if k is not None), len(outputs))
    grads: list[Tensor | None] = [
        torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype) if y.dtype.is_floating_point else None
        for y in outputs[:n]
    ]
    return grads + [None] * (case.outputs - n)


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_equals_torch(case: Case, isa: str) -> None:
    _C.set_isa(isa)
    try:
        got = run(case)
    finally:
        _C.set_isa(None)
    want = expected(case)
    for k, y in enumerate(want[: case.compare]):
        assert_close(got[k], y, f"output {k} on {isa}", case.scale)


@pytest.mark.parametrize("case", {c.op: c for c in CASES}.values(), ids=str)
def test_an_attribute_that_nobody_reads_is_refused(case: Case) -> None:
    with pytest.raises(NotImplementedError, match="it has no attribute 'auto_pad'"):
        run(replace(case, attrs={**case.attrs, "auto_pad": "SAME_UPPER"}))


@pytest.mark.parametrize("case", {c.op: c for c in CASES if c.attrs}.values(), ids=str)
def test_an_attribute_of_another_kind_is_refused(case: Case) -> None:
    name = next(iter(case.attrs))
    with pytest.raises(ValueError, match=f"attribute '{name}' is "):
        run(replace(case, attrs={**case.attrs, name: ["a", "b"]}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_open_dims_give_the_same(case: Case) -> None:
    for got, want in zip(run(case, dynamic=True), run(case), strict=True):
        assert torch.equal(
            got.nan_to_num() if got.is_floating_point() else got,
            want.nan_to_num() if want.is_floating_point() else want,
        )


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("case", FLOAT_CASES, ids=str)
def test_gradient_equals_autograd(case: Case, isa: str) -> None:
    douts = out_grads(case, run(case))
    want = expected_grad(case, douts)
    _C.set_isa(isa)
    try:
        got = run_grad(case, douts)
    finally:
        _C.set_isa(None)
    for i, g in want.items():
        mine = got[i] if got[i] is not None else torch.zeros_like(case.inputs[i])
        assert_close(
            mine, g if g is not None else torch.zeros_like(mine), f"gradient of input {i} on {isa}", case.scale
        )


@pytest.mark.parametrize("case", DERIVATIVE_CASES, ids=str)
def test_gradient_equals_finite_differences(case: Case) -> None:
    """Central differences along one random direction per input."""
    douts = out_grads(case, run(case))
    grads = run_grad(case, douts)
    step = 1e-6
    for i in wanted(case):
        direction = torch.randn(case.inputs[i].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        values = []
        for sign in (1, -1):
            inputs = list(case.inputs)
            inputs[i] = case.inputs[i] + sign * step * direction
            moved = Case(case.op, inputs, case.torch, case.attrs, case.consts, case.outputs)
            values.append(sum((y * d).sum() for y, d in zip(run(moved), douts, strict=True) if d is not None))
        slope = float(values[0] - values[1]) / (2 * step)
        mine = float((grads[i] * direction).sum()) if grads[i] is not None else 0.0
        assert mine == pytest.approx(slope, rel=1e-4, abs=1e-5), f"input {i}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_do_not_change_a_bit(case: Case) -> None:
    many = run(case)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = run(case)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(many, one, strict=True):
        assert torch.equal(
            a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_are_not_written(case: Case) -> None:
    before = [None if t is None else t.clone() for t in case.inputs]
    outputs = run(case)
    if case in FLOAT_CASES:
        run_grad(case, out_grads(case, outputs))
    for i in free_inputs(case):
        same = torch.equal(
            before[i].nan_to_num() if before[i].is_floating_point() else before[i],
            case.inputs[i].nan_to_num() if case.inputs[i].is_floating_point() else case.inputs[i],
        )
        assert same, f"input {i} was written to"
