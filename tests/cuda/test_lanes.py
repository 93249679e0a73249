"""Programs of elementwise ops on the emulated GPU: the lanes of a thread, some of the last one, and packs."""

from __future__ import annotations

import pytest
import torch
from emulated_gpu import Gpu
from test_lines import graph, random

CALLS = {  # and whether they have the CPU's bits
    "Relu(%x0)": True,
    "Add(%x0, %x1)": True,
    "Dropout(%x0) {p=0.25, subsequence=3}": True,
    'Gelu(%x0) {approximate="tanh"}': False,
    'GeluGrad(%x1, %x0) {approximate="tanh"}': False,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "off"), [(0, 0), (1, 0), (7, 0), (8, 0), (2061, 0), (2048, 1), (2061, 4)], ids=str)
def test_each_lane_has_its_element(gpu: Gpu, call: str, dtype: torch.dtype, n: int, off: int) -> None:
    """Inputs begin `off` elements beyond where packs do."""
    inputs = [random(n, dtype=dtype, seed=i) for i in range(1 + ("%x1" in call))]
    text = graph(call, inputs)
    (want,) = gpu.on_the_cpu(text, inputs)
    plan, given = gpu.plan(text, inputs)
    if off:
        longer = [gpu.put(torch.cat([x[:off], x])) for x in inputs]
        given = [gpu.rest(x, off) for x in longer]
    (got,) = [gpu.get(t) for t in plan.forward(given, 7)[0]]
    if CALLS[call]:
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want)
