"""How results are compared: what rounds otherwise passes, what computes something else does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from compare import difference, step
from samples import Case, Sample, copies

EMBEDDING, HEADS, TOKENS = 6, 2, 4
UNITS = 256  # by which the planted factors are off


class _Attention(nn.Module):
    """Multihead attention written out, its scores, probabilities and gradients changed by a factor."""

    def __init__(self, like: nn.MultiheadAttention, scores: float = 1, probabilities: float = 1, slope: float = 1):
        super().__init__()
        self.module = like
        self.factors = scores, probabilities, slope

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        like, (scores, probabilities, slope) = self.module, self.factors
        q, k, v = nn.functional.linear(x, like.in_proj_weight, like.in_proj_bias).chunk(3, -1)
        q, k, v = (t.view(TOKENS, HEADS, -1).transpose(0, 1) for t in (q, k, v))
        s = (q * (scores / math.sqrt(EMBEDDING // HEADS))) @ k.mT
        p = (s + mask).softmax(-1) * probabilities
        y = like.out_proj((p @ v).transpose(0, 1).reshape(TOKENS, EMBEDDING))
        return y * slope + (y - y * slope).detach()


class _PyTorch(nn.Module):
    def __init__(self, like: nn.MultiheadAttention) -> None:
        super().__init__()
        self.module = like

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.module(x, x, x, attn_mask=mask, need_weights=False)[0]


def _told(dtype: torch.dtype, seed: int, **factors: float) -> str:
    def make(kind: Callable[..., nn.Module] = _PyTorch, **factors: float) -> nn.Module:
        torch.manual_seed(seed)
        return kind(nn.MultiheadAttention(EMBEDDING, HEADS, dtype=dtype), **factors)

    torch.manual_seed(seed)
    mask = torch.zeros(TOKENS, TOKENS, dtype=dtype).masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -math.inf)
    case = Case(make, [torch.randn(TOKENS, EMBEDDING, dtype=dtype).requires_grad_(), mask], "")
    want, got = (step(m, copies(case.tensors), 1) for m in (make(), make(_Attention, **factors)))
    return difference(case, want, got, native=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_another_order_of_roundings_is_no_difference(dtype: torch.dtype) -> None:
    assert [_told(dtype, seed) for seed in range(20)] == [""] * 20


@pytest.mark.parametrize("what", ["scores", "probabilities", "slope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_factor_that_is_off_by_some_units_is_found(dtype: torch.dtype, what: str) -> None:
    off = 1 + UNITS * torch.finfo(dtype).eps
    assert all(_told(dtype, seed, **{what: off}) for seed in range(20))


def test_what_is_not_computed_is_found() -> None:
    assert _told(torch.float32, 0, scores=0)


def test_what_is_chosen_among_equals_is_compared() -> None:
    x = torch.tensor([2.0, 2.0, 1.0], requires_grad=True)
    case = Case(lambda: Sample(lambda x: x.amax()), [x], "")
    want, got = (step(Sample(f), copies(case.tensors), 1) for f in (lambda x: x.amax(), lambda x: x.max(0).values))
    assert difference(case, want, got, native=True)
