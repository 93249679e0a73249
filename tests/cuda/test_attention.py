"""Attention and its gradient on the emulated GPU, beside the CPU's: more tiles than one, groups of heads, dropout."""

from __future__ import annotations

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor

from case import DTYPE_TEXT

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
B, H, KV, T, S, D = 1, 4, 2, 70, 130, 12
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def step(gpu: Gpu, provider: str, inputs: list[Tensor], dy: Tensor, how: str) -> list[Tensor]:
    """y, dq, dk and dv."""
    put, get = (gpu.put, gpu.get) if provider == "gpu" else (Tensor.clone, Tensor.clone)
    lines = [f"input %{n} : {DTYPE_TEXT[t.dtype]}{[*t.shape]} grad" for n, t in zip("qkv", inputs, strict=True)]
    text = "\n".join([*lines, f"%y, %lse = Attention(%q, %k, %v) {{{how}}}", "return %y", ""]).replace(", ", ",")
    given = [put(t) for t in inputs]
    plan = gpu.core.Session(text, {}, provider=provider).plan(given, [True] * 3, [True])
    outputs, run = plan.forward(given, 11)
    return [get(t) for t in (*outputs, *plan.backward(run, given, outputs, [put(dy)]))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["is_causal=0", "is_causal=1", "is_causal=1,p=0.4,subsequence=9"])
def test_a_step_is_that_of_the_cpu(gpu: Gpu, dtype: torch.dtype, how: str) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = (B, H, T, D), (B, KV, S, D), (B, KV, S, D), (B, H, T, D)
    *inputs, dy = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    found, expected = (step(gpu, provider, inputs, dy, how) for provider in ("gpu", "cpu"))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_same_probabilities_are_dropped(gpu: Gpu) -> None:
    """Values are one for each key, so that y shows which of them a query has kept; 37 keys share no counters evenly."""
    q, k, v = torch.zeros(2, 3, 9, 4), torch.zeros(2, 3, 37, 4), torch.eye(37).expand(2, 3, 37, 37).contiguous()
    dy = torch.zeros(2, 3, 9, 37)
    found, expected = (step(gpu, name, [q, k, v], dy, "p=0.5,subsequence=3")[0] for name in ("gpu", "cpu"))
    assert torch.equal(found == 0, expected == 0) and 0.4 < (found == 0).double().mean() < 0.6


def test_heads_that_are_too_long_for_registers_are_refused(gpu: Gpu) -> None:
    x = torch.zeros(1, 1, 2, 129)
    with pytest.raises(NotImplementedError, match="no kernel for heads of 129 and 129 elements"):
        step(gpu, "gpu", [x, x, x], x, "is_causal=0")
