"""Attention whose masks, scores or operands are infinite, NaN or absent, against eager PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from corners import INF, NAN, step
from ortmodule_c import ORTModule
from wrapped import Function

_attend = F.scaled_dot_product_attention
ROW_MASKED = torch.tensor([[0.5, -1, 0, 2], [-INF] * 4, [-INF, 1, 0, -0.5], [0, 0, -INF, 0]])
ATTENTION: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "trained mask with a row of -inf": (
        lambda q, k, v, m: _attend(q, k, v, m + ROW_MASKED),
        [(2, 3, 4, 8)] * 3 + [(4, 4)],
    ),
    "trained mask of heads": (lambda q, k, v, m: _attend(q, k, v, m + ROW_MASKED), [(2, 3, 4, 8)] * 3 + [(3, 1, 4)]),
    "trained mask of three dims": (lambda q, k, v, m: _attend(q, k, v, m + ROW_MASKED), [(3, 4, 8)] * 3 + [(3, 4, 4)]),
    "mask with a row of -inf": (lambda q, k, v: _attend(q, k, v, ROW_MASKED), [(2, 3, 4, 8)] * 3),
    "bool mask": (lambda q, k, v: _attend(q, k, v, ROW_MASKED > -INF), [(2, 3, 4, 8)] * 3),
    "nothing attended to": (lambda q, k, v: _attend(q, k, v, ROW_MASKED > INF), [(2, 3, 4, 8)] * 3),
    "written out": (lambda q, k, v, m: (q @ k.mT + m + ROW_MASKED).softmax(-1) @ v, [(2, 3, 4, 8)] * 3 + [(4, 4)]),
    "written out, filled": (
        lambda q, k, v: (q @ k.mT).masked_fill(ROW_MASKED < 0, -INF).softmax(-1) @ v,
        [(2, 3, 4, 8)] * 3,
    ),
    "heads of no elements": (_attend, [(2, 3, 4, 0), (2, 3, 4, 0), (2, 3, 4, 8)]),
    "values of no elements": (_attend, [(2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 0)]),
    "values of no elements, several blocks": (_attend, [(1, 1, 70, 8), (1, 1, 100, 8), (1, 1, 100, 0)]),
    "no queries": (_attend, [(2, 3, 0, 8), (2, 3, 4, 8), (2, 3, 4, 8)]),
    "no keys": (_attend, [(2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8)]),
    "no samples": (_attend, [(0, 3, 4, 8)] * 3),
    "one token": (lambda q, k, v: _attend(q, k, v, is_causal=True), [(2, 3, 1, 8)] * 3),
    "causal, more queries": (
        lambda q, k, v: _attend(q, k, v, is_causal=True),
        [(2, 3, 6, 8), (2, 3, 4, 8), (2, 3, 4, 8)],
    ),
    "causal, more keys": (lambda q, k, v: _attend(q, k, v, is_causal=True), [(2, 3, 3, 8), (2, 3, 4, 8), (2, 3, 4, 8)]),
}


@pytest.mark.parametrize("row", ATTENTION.items(), ids=lambda r: r[0])
def test_attention(row: tuple[str, Any]) -> None:
    _, (attend, shapes) = row
    xs = [torch.randn(shape) for shape in shapes]
    module = Function(lambda _, *xs: (attend(*xs),))
    (want, want_grads), (got, got_grads) = step(module, xs), step(ORTModule(module), xs)
    for ours, eager in zip(got + got_grads, want + want_grads, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("batch", "mask"),
    [((1, 1, 1), (2, 1, 1, 4, 5)), ((1, 2), (3, 1, 1, 5)), ((2, 3), (1, 2, 3, 4, 5)), ((2,), (2, 2, 4, 5))],
    ids=str,
)
def test_a_mask_wider_than_the_scores_is_refused(batch: tuple[int, ...], mask: tuple[int, ...]) -> None:
    """Also where the values are as wide as the mask: PyTorch adds it to the scores in place."""
    xs = torch.randn(*batch, 4, 8), torch.randn(*batch, 5, 8), torch.randn(*[3 if n == 1 else n for n in batch], 5, 8)
    module = Function(lambda _, *xs: _attend(*xs))
    for m in (module, ORTModule(module)):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            m(*xs, torch.randn(mask))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("operand", "backend"),
    # Written out, a masked score that is NaN is one still; in one kernel, NaN in a query is not seen everywhere.
    [(0, SDPBackend.MATH), (1, SDPBackend.FLASH_ATTENTION), (2, SDPBackend.MATH)],
    ids=["query", "key", "value"],
)
def test_nan_goes_where_it_goes_in_pytorch(operand: int, backend: SDPBackend, is_causal: bool) -> None:
    xs = [torch.randn(1, 2, 70, 8) for _ in range(3)]
    xs[operand][0, 1, 2, 3] = NAN
    module = Function(lambda _, q, k, v: (_attend(q, k, v, is_causal=is_causal),))
    with sdpa_kernel(backend):
        want, want_grads = step(module, xs)
    got, got_grads = step(ORTModule(module), xs)
    for ours, eager in zip(got + got_grads, want + want_grads, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5, equal_nan=True)


TOKENS = 70  # more than a block of queries
MASKS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "-inf here and there": {"attn_mask": torch.eye(TOKENS).roll(3, 1).mul(-INF).nan_to_num(0, neginf=-INF)},
    "a row of -inf": {"attn_mask": torch.zeros(TOKENS, TOKENS).index_fill(0, torch.tensor(2), -INF)},
    "a row of false": {"attn_mask": torch.ones(TOKENS, TOKENS).index_fill(0, torch.tensor(2), 0) > 0},
    "a column of inf": {"attn_mask": torch.zeros(TOKENS, TOKENS).index_fill(1, torch.tensor(3), INF)},
    "a NaN": {
        "attn_mask": torch.zeros(TOKENS, TOKENS).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(NAN))
    },
}


def _specials(t: Tensor) -> Tensor:
    """Where an element is NaN or infinite, and with which sign."""
    return torch.where(t.isfinite(), 0, t).nan_to_num(2, posinf=1, neginf=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_specials_are_where_one_of_the_ways_of_pytorch_has_them(mask: dict[str, Any], dtype: torch.dtype) -> None:
    """Its kernel and what it computes in several ops part at them: in each result ours are those of one."""
    options = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in mask.items()}
    module = Function(lambda _, q, k, v: (_attend(q, k, v, **options),))
    ours = ORTModule(module)
    for operand in range(3):
        for value in (INF, -INF, NAN):
            xs = [torch.randn(1, 2, TOKENS, 8, dtype=dtype) for _ in range(3)]
            xs[operand][0, 1, 2, 3] = value
            ways = []
            for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
                with sdpa_kernel(backend):
                    ways.append(step(module, xs))
            got, got_grads = step(ours, xs)
            wants = zip(*[[*outputs, *grads] for outputs, grads in ways], strict=True)
            for t, (math, flash) in zip([*got, *got_grads], wants, strict=True):
                assert any(torch.equal(_specials(t), _specials(way)) for way in (math, flash)), (operand, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_with_one_key_have_no_gradient(dtype: torch.dtype) -> None:
    hidden = torch.full((TOKENS, TOKENS), -INF, dtype=dtype).diagonal_scatter(torch.zeros(TOKENS, dtype=dtype))
    ours = ORTModule(Function(lambda _, q, k, v: (_attend(q * 30, k, v, hidden),)))
    _, (dq, dk, _) = step(ours, [torch.randn(2, 3, TOKENS, 8, dtype=dtype) for _ in range(3)])
    assert dq is not None and dk is not None and not dq.any() and not dk.any()
