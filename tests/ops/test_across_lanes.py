"""Reductions of a row: what stands out is found in every lane, and nothing past the row's end."""

from __future__ import annotations

import pytest
import torch

from case import type_text
from ortmodule_c import _C

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
LONGEST = 70


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin", "ReduceSum"])
def test_one_element_stands_out(op: str, dtype: torch.dtype, isa: str) -> None:
    """Row i of n is of ones, but for its element i."""
    torch_op = {"ReduceMax": torch.amax, "ReduceMin": torch.amin, "ReduceSum": torch.sum}[op]
    special = [7.0, -7.0] + ([torch.inf, -torch.inf, torch.nan] if dtype.is_floating_point else [])
    _C.set_isa(isa)
    try:
        for n in range(1, LONGEST):
            x = torch.ones(len(special), n, n, dtype=dtype)
            for rows, number in zip(x, special, strict=True):
                rows.fill_diagonal_(number)
            text = f"input %x : {type_text(x)}\nconst %a : i64[1] = [2]\n%y = {op}(%x, %a) {{keepdims=0}}\nreturn %y\n"
            got = _C.Session(text, {}).plan([x], [False], [False]).forward([x], 0)[0][0]
            torch.testing.assert_close(got, torch_op(x, 2), rtol=0, atol=0, equal_nan=True)
    finally:
        _C.set_isa(None)
