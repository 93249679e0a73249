"""Autocast inside a forward: what it casts, and what runs in PyTorch because it reaches only its parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wrapped import Function, float_sum, pair

pytestmark = pytest.mark.filterwarnings("ignore:ortmodule_c")

BODIES: dict[str, tuple[Callable[..., Tensor], dict[str, nn.Module]]] = {
    "linear": (lambda m, x: m.layer(x).relu().softmax(-1), {"layer": nn.Linear(4, 4)}),
    "loss": (lambda m, x: F.cross_entropy(m.layer(x[0]), torch.arange(4)), {"layer": nn.Linear(4, 4)}),
    "attention": (lambda m, x: F.scaled_dot_product_attention(m.layer(x), x, x), {"layer": nn.Linear(4, 4)}),
    "multi-head attention": (lambda m, x: m.layer(x, x, x)[0], {"layer": nn.MultiheadAttention(4, 2)}),
    "einsum": (lambda m, x: torch.einsum("bac,dc->bad", x, m.layer.weight), {"layer": nn.Linear(4, 4)}),
    "einsum, wide": (lambda m, x: torch.einsum("bac,dc->bad", x, m.layer.weight).float(), {"layer": nn.Linear(4, 4)}),
    "tensordot": (lambda m, x: torch.tensordot(x, m.layer.weight, 1), {"layer": nn.Linear(4, 4)}),
    "lstm": (lambda m, x: m.layer(x)[0], {"layer": nn.LSTM(4, 4)}),
    "lstm cell": (lambda m, x: m.layer(x[0])[0], {"layer": nn.LSTMCell(4, 4)}),
    "bilinear": (lambda m, x: m.layer(x, x), {"layer": nn.Bilinear(4, 4, 3)}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_region_of_autocast_gives_what_it_gives_in_pytorch(name: str) -> None:
    body, members = BODIES[name]

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return body(module, x)

    torch.manual_seed(0)
    eager, ours = pair(Function(forward, **members))
    x = torch.randn(4, 4, 4)
    want, got = eager(x), ours(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    for out in (want, got):
        float_sum(out).backward()
    for (parameter, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), parameter
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=3e-2, atol=3e-2)
