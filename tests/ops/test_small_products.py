"""Products too small to pack: of many the bits are those of each product alone."""

import itertools

import pytest
import torch

from case import run
from cases_elementwise import x
from cases_matmul import fused
from ortmodule_c import _C

SIZES = [
    (1, 1, 1),
    (3, 1, 3),
    (3, 3, 3),
    (4, 4, 4),
    (1, 17, 30),
    (17, 1, 30),
    (8, 8, 8),
    (2, 33, 7),
    (5, 6, 0),
    (9, 8, 8),
    (1, 3, 33),
]


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_are_those_of_one(size: tuple[int, int, int], dtype: torch.dtype, isa: str) -> None:
    m, n, k = size
    _C.set_isa(isa)
    try:
        for ta, tb, biased in itertools.product((0, 1), repeat=3):
            a = x(5, *((k, m) if ta else (m, k)), dtype=dtype)
            b = x(5, *((n, k) if tb else (k, n)), dtype=dtype, seed=1)
            bias = x(n, dtype=dtype, seed=2) if biased else None
            many = run(fused(a, b, bias, ta, tb, -1.5))[0]
            for i in range(5):
                assert torch.equal(many[i], run(fused(a[i], b[i], bias, ta, tb, -1.5))[0])
    finally:
        _C.set_isa(None)
