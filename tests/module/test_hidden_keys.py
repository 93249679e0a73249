"""Attention whose mask hides whole blocks of keys, which are left out: results are as if they were not."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from corners import INF, NAN
from ortmodule_c import DebugOptions, ORTModule
from wrapped import Function

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def _position(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.arange(queries)[:, None], torch.arange(keys)


def _patterns(sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """What each query sees: in float32 without the dims in which it repeats itself, else with all."""
    b, h, _, t, s = sizes
    i, j = _position(t, s)
    lengths = torch.arange(1, b + 1)[:, None, None, None] * s // (b + 1)
    some = i % 7 != 3
    patterns = {
        "keys at the end hidden": (j < lengths).expand(b, 1, 1, s),
        "keys at the front hidden, of each query": (j >= lengths).expand(b, 1, t, s),
        "causal": j <= i,
        "causal and padded": (j <= i) & (j >= lengths // 2),
        "window": (j <= i) & (j > i - 20),
        "documents": i // 50 == j // 50,
        "a window and the first keys, of each head": ((j - i).abs() < 20 + 9 * torch.arange(h)[:, None, None])
        | (j < 5),
        "blocks in turn": (i // 64 + j // 32) % 2 == 0,
        "blocks in turn, some queries blind": ((i // 64 + j // 32) % 2 == 0) & some,
        "a block of blind queries": (i < t // 2).expand(b, 1, t, s),
        "queries blind, all keys": some,
        "nothing": (j < 0).expand(t, s),
        "one key of each": j == (i * 37) % max(s, 1),
        "of each head and sample": (j + 40 * torch.arange(b * h).view(b, h, 1, 1)) % (2 * s + 1) < s // 2,
    }
    return patterns if dtype == torch.float32 else {name: p.expand(b, h, t, s) for name, p in patterns.items()}


def _all_see(pattern: Tensor) -> Tensor:
    """The pattern with all keys for queries that see none."""
    return pattern | ~pattern.any(-1, keepdim=True)


def _mask(pattern: Tensor, hides: float | None, dtype: torch.dtype) -> Tensor:
    """As booleans, or as what is added to scores: noise, and `hides` where nothing is seen."""
    if hides is None:
        return pattern.contiguous()
    return torch.where(pattern, torch.randn(pattern.shape), torch.tensor(hides, dtype=torch.float64)).to(dtype)


def _operands(b: int, h: int, kv: int, t: int, s: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(b, n, length, 12, dtype=dtype) for n, length in ((h, t), (kv, s), (kv, s))]


def _step(module: nn.Module, xs: list[Tensor], mask: Tensor, dy: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in xs]
    (y,) = module(*leaves, mask)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype).expand(y.shape))]


@functools.cache
def _attention(_dtype: torch.dtype, _adds: bool, p: float = 0) -> ORTModule:
    """One for all tests of a dtype and a kind of mask: a graph is made of each form of a mask, not of each size."""
    module = Function(lambda _, q, k, v, m: (F.scaled_dot_product_attention(q, k, v, m, dropout_p=p),))
    return ORTModule(module, DebugOptions(max_graphs=64))


# Of several blocks of 64 queries and 32 keys, the last not whole; the kernels of all dtypes cut them alike.
SIZES = [(2, 4, 4, 70, 200), (70, 1, 1, 70, 70)]
MORE_SIZES = [(2, 3, 3, 130, 130), (3, 3, 3, 3, 3), (1, 1, 1, 200, 65)]
KINDS = [*itertools.product(SIZES, TOLERANCE), *[(sizes, torch.float32) for sizes in MORE_SIZES]]
HIDING = {
    "bool": lambda _: None,
    "-inf": lambda _: -INF,
    "the lowest": lambda t: torch.finfo(t).min,
    "-1e4": lambda _: -1e4,
}


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize(("sizes", "dtype"), KINDS, ids=str)
def test_results_are_those_of_pytorch(sizes: tuple[int, ...], dtype: torch.dtype, hiding: str) -> None:
    """16 bits are compared with PyTorch in float32, which both compute in. One module meets all sizes and masks."""
    b, h, kv, t, s = sizes
    wide = torch.promote_types(dtype, torch.float32)
    ours = _attention(dtype, hiding != "bool")
    for name, drawn in _patterns(sizes, dtype).items():
        # Added to all scores of a row, -1e4 would round them away.
        pattern = _all_see(drawn) if hiding == "-1e4" else drawn
        xs, mask, dy = _operands(b, h, kv, t, s, dtype), _mask(pattern, HIDING[hiding](dtype), dtype), torch.randn(12)
        plain = mask if hiding == "bool" else mask.to(wide)
        with sdpa_kernel(SDPBackend.MATH):  # of rows of the lowest number the other one's gradients are too large
            wants = _step(ours.module, [x.to(wide) for x in xs], plain, dy.to(dtype))
        for want, got in zip(wants, _step(ours, xs, mask, dy), strict=True):
            assert got.dtype == dtype
            apart = (got.to(wide) - want).abs().max() if want.numel() else 0
            assert apart <= TOLERANCE[dtype] * max(1, want.abs().max() if want.numel() else 0), name
    assert not ours.fallback_report()


UNSEEN = -800.0  # hides without a doubt, but not so low that keys are left out


@pytest.mark.parametrize(("sizes", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("p", [0, 0.3])
def test_what_is_left_out_changes_no_bit(sizes: tuple[int, ...], dtype: torch.dtype, p: float) -> None:
    """Keys in one piece, no more than are summed up in one pass, dropout included."""
    ours = _attention(dtype, True, p)
    b, h, _, t, s = sizes
    patterns = _patterns(sizes, dtype)
    for name in ("keys at the end hidden", "causal and padded", "window", "documents", "one key of each"):
        pattern = _all_see(patterns[name])
        xs, dy = _operands(b, h, h, t, s, dtype), torch.randn(12)
        found = []
        for hides in (-INF, UNSEEN):
            torch.manual_seed(0)
            found.append(_step(ours, xs, _mask(pattern, hides, dtype).nan_to_num(0), dy))
        for left_out, computed in zip(*found, strict=True):
            assert torch.equal(left_out, computed), name


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("value", [INF, -INF, NAN, 1e30])
@pytest.mark.parametrize("where", ["a query", "a hidden key", "a hidden value", "the gradient of a result"])
def test_what_is_not_finite_shows_as_in_one_of_the_ways_of_pytorch(where: str, value: float, hiding: str) -> None:
    """A weight of 0 by infinity is NaN, also where the weight is hidden."""
    pattern = (torch.arange(130) < 40).expand(130, 130)
    mask = _mask(pattern, HIDING[hiding](torch.float32), torch.float32)
    *xs, dy = (torch.randn(1, 2, 130, 8) for _ in range(4))
    at = ["a query", "a hidden key", "a hidden value", "the gradient of a result"].index(where)
    [*xs, dy][at][0, 1, 128, 3] = value
    ours = _attention(torch.float32, hiding != "bool")
    ways = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            ways.append(_step(ours.module, xs, mask, dy))
    for got, math, flash in zip(_step(ours, xs, mask, dy), *ways, strict=True):
        finite = [way.isfinite() for way in (got, math, flash)]
        assert any(torch.equal(finite[0], way) for way in finite[1:])


def test_the_mask_of_each_run_counts() -> None:
    """Also that of a run whose backward comes after another's forward, and one that is written to between runs."""
    module = Function(lambda _, q, k, v, m: (F.scaled_dot_product_attention(q, k, v, m),))
    ours, mask = ORTModule(module), torch.zeros(4, 1, 1, 70, dtype=torch.bool)
    for seen in (5, 64, 70, 33, 0):
        mask.zero_()
        mask[..., :seen] = True
        xs, dy = _operands(4, 4, 4, 70, 70, torch.float32), torch.randn(12)
        for want, got in zip(_step(module, xs, mask, dy), _step(ours, xs, mask, dy), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    leaves = [x.requires_grad_() for x in _operands(4, 4, 4, 70, 70, torch.float32)]
    masks = [(torch.arange(70) < n).expand(1, 1, 1, 70) for n in (7, 70)]
    want, got = (
        [torch.autograd.grad(y.sum(), leaves) for (y,) in [m(*leaves, k) for k in masks]] for m in (module, ours)
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
