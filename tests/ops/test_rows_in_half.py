"""Every row of the op tables with its floats stored in 16 bits: as of the same numbers in float32, rounded."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from case import Case, expected, expected_grad, run, run_grad, wanted
from ortmodule_c import _C

HALVES = [torch.bfloat16, torch.float16]
STEPS = 4  # of the type at the largest number of a tensor: a gradient rule may round after each of several verbs


def of_type(case: Case, dtype: torch.dtype) -> Case:
    inputs = [t.to(dtype) if t is not None and t.is_floating_point() else t for t in case.inputs]
    return replace(case, inputs=inputs)


ROWS: dict[str, Case] = {}
for path in sorted(Path(__file__).parent.glob("cases_*.py")):
    for row in importlib.import_module(path.stem).CASES:
        if any(t is not None and t.is_floating_point() for t in row.inputs):
            ROWS.setdefault(str(of_type(row, torch.bfloat16)).replace("bf16", "half"), row)


def assert_rounded(got: Tensor, want: Tensor, dtype: torch.dtype, what: str, scale: float) -> None:
    assert got.shape == want.shape, what
    if not want.is_floating_point():
        assert torch.equal(got, want), what
        return
    assert got.dtype in (dtype, torch.float32, torch.float64), what
    want = want.to(got.dtype).double()  # what is too large for the type is infinite in it
    got = got.double()
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), what
    assert torch.equal(got[~finite].nan_to_num(nan=7.0), want[~finite].nan_to_num(nan=7.0)), what
    peak = float(want[finite].abs().max()) if finite.any() else 0.0
    off = (got - want)[finite].abs()
    assert bool((off <= scale * STEPS * torch.finfo(dtype).eps * max(peak, 2**-14)).all()), (
        f"{what}: {float(off.max())}"
    )


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_forward_and_gradient_are_those_of_float32(name: str, dtype: torch.dtype, isa: str) -> None:
    case = of_type(ROWS[name], dtype)
    exact = of_type(case, torch.float32)
    _C.set_isa(isa)
    try:
        outputs = run(case)
        n = next((k for k in (case.differentiable, case.compare) if k is not None), len(outputs))
        generator = torch.Generator().manual_seed(7)
        douts: list[Tensor | None] = [
            torch.randn(y.shape, generator=generator).to(y.dtype) if k < n and y.is_floating_point() else None
            for k, y in enumerate(outputs)
        ]
        grads = run_grad(case, douts) if _C.ops()[case.op][2] and wanted(case) else {}
    finally:
        _C.set_isa(None)
    for k, want in enumerate(expected(exact)[: case.compare]):
        assert_rounded(outputs[k], want, dtype, f"output {k}", case.scale)
    wide = [d if d is None else d.float() for d in douts]
    for i, want in expected_grad(exact, wide).items() if grads else ():
        got, x = grads[i], case.inputs[i]
        zeros = torch.zeros_like(x)
        pair = [zeros if t is None else t for t in (got, want)]
        if case.op == "Exp":  # which is made of the output: where that is infinite in 16 bits, so is the gradient
            pair = [t.where(outputs[0].isfinite(), 0) for t in pair]
        assert_rounded(*pair, dtype, f"gradient of input {i}", case.scale)
