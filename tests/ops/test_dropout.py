"""Dropout: its bits against Philox written out, on every instruction set, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ortmodule_c import _C

TEXT = {torch.float32: "f32", torch.float64: "f64"}
SEED, SUBSEQUENCE = 0x1234_5678_9ABC_DEF0, 77


def philox(seed: int, subsequence: int, n: int) -> Tensor:
    """What elements 0 .. n-1 draw, as int64: four words of Philox4x32-10, then these with their halves exchanged."""
    mask = 0xFFFFFFFF
    words: list[int] = []
    for counter in range((n + 7) // 8):
        c = [counter & mask, counter >> 32, subsequence, 0]
        k = [seed & mask, seed >> 32]
        for _ in range(10):
            p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(q >> 32) ^ c[1] ^ k[0], q & mask, (p >> 32) ^ c[3] ^ k[1], p & mask]
            k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
        words += c + [(w << 16 & mask) | w >> 16 for w in c]
    return torch.tensor(words[:n])


def drop(x: Tensor, p: float, seed: int = SEED, subsequence: int = SUBSEQUENCE) -> tuple[Tensor, Tensor]:
    """Output, and the gradient of its sum."""
    node = f"%y = Dropout(%x) {{p={p}, subsequence={subsequence}}}"
    text = f"input %x : {TEXT[x.dtype]}[{x.numel()}] grad\n{node}\nreturn %y\n"
    plan = _C.Session(text, {}).plan([x], [True], [True])
    outputs, state = plan.forward([x], seed)
    return outputs[0], plan.backward(state, [x], outputs, [torch.ones_like(x)])[0]


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("dtype", TEXT)
@pytest.mark.parametrize("n", [0, 1, 5, 16, 511, 512, 513, 5000])
def test_keeps_what_philox_says(n: int, dtype: torch.dtype, isa: str) -> None:
    x = torch.randn(n, dtype=dtype)
    _C.set_isa(isa)
    try:
        y, dx = drop(x, 0.1)
    finally:
        _C.set_isa(None)
    factor = (philox(SEED, SUBSEQUENCE, n) >= int(0.1 * 2**32)).to(dtype) * torch.tensor(1 / 0.9, dtype=dtype)
    assert torch.equal(y, x * factor)
    assert torch.equal(dx, factor)


def test_keeps_one_minus_p_of_the_elements() -> None:
    for p in (0.1, 0.5, 0.9):
        y, _ = drop(torch.ones(200_000), p)
        assert float((y != 0).double().mean()) == pytest.approx(1 - p, abs=5e-3)


def test_elements_that_share_a_word_are_independent() -> None:
    for p in (0.1, 0.5, 0.9):
        kept = (drop(torch.ones(800_000), p)[0] != 0).reshape(-1, 2, 4).double()
        assert float((kept[:, 0] * kept[:, 1]).mean()) == pytest.approx((1 - p) ** 2, abs=3e-3)


def test_seed_and_stream_give_other_masks() -> None:
    x = torch.ones(1000)
    masks = [drop(x, 0.5, seed, subsequence)[0] for seed, subsequence in ((1, 1), (2, 1), (1, 2), (1 + (1 << 32), 1))]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 300 < int((a != b).sum()) < 700


def test_threads_do_not_change_a_bit() -> None:
    x = torch.randn(300_000)
    many = drop(x, 0.3)[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = drop(x, 0.3)[0]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(many, one)


def test_p_of_one_keeps_nothing() -> None:
    y, dx = drop(torch.randn(1000), 1.0)
    assert not y.any()
    assert not dx.any()
