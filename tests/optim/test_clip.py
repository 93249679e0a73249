"""clip_grad_norm_ beside PyTorch's, and clipping within a step."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from beside import FLOATS, assert_close, assert_equal, give_gradients, parameters
from ortmodule_c.optim import FusedAdam, FusedSGD, clip_grad_norm_

# Of 16 bits PyTorch rounds norms and factor, which ours does not.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm_type", [2, 2.0, math.inf, "inf", 1.0, 3.0, 0.0, -math.inf], ids=str)
@pytest.mark.parametrize("max_norm", [1.0, 1e9, 0.0, -1.0, math.inf], ids=str)
def test_scales_as_pytorch_does(max_norm: float, norm_type: float, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    give_gradients(ours, theirs, seed=0)
    if math.isinf(float(norm_type)):  # which PyTorch has not of no elements
        ours, theirs = ([p for p in params if p.numel()] for params in (ours, theirs))
    got = clip_grad_norm_(ours, max_norm, norm_type)
    want = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(got, want, **tolerance)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True, **tolerance)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norms_that_are_not_finite(norm_type: float, value: float) -> None:
    ours, theirs = ([p for p in parameters() if p.numel()] for _ in range(2))
    give_gradients(ours, theirs, seed=0)
    for params in (ours, theirs):
        params[1].grad[500] = value
    before = [p.grad.clone() for p in ours]
    with pytest.raises(RuntimeError, match=f"total norm of order {norm_type} for gradients from `parameters`"):
        clip_grad_norm_(ours, 1.0, norm_type, error_if_nonfinite=True)
    assert_equal([p.grad for p in ours], before)
    got, want = clip_grad_norm_(ours, 1.0, norm_type), nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert_close([p.grad for p in ours], [p.grad for p in theirs])


def test_finite_norms_pass_the_check() -> None:
    ours, theirs = parameters(), parameters()
    give_gradients(ours, theirs, seed=0)
    assert clip_grad_norm_(ours, 1.0, error_if_nonfinite=True) == clip_grad_norm_(theirs, 1.0)
    assert_equal([p.grad for p in ours], [p.grad for p in theirs])


def test_squares_neither_overflow_nor_vanish() -> None:
    p = torch.zeros(4, requires_grad=True)
    for value in (1e30, 1e-30):
        p.grad = torch.full((4,), value)
        assert clip_grad_norm_(p, math.inf).item() == pytest.approx(2 * value)


def test_what_is_given() -> None:
    p = torch.zeros(3, requires_grad=True)
    assert clip_grad_norm_(p, 1.0) == 0 and clip_grad_norm_([], 1.0) == 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert clip_grad_norm_((q for q in ()), 1.0) == 0
    p.grad = torch.ones(3)
    version = p.grad._version
    norm = clip_grad_norm_(iter([p]), 1.0)
    assert norm.shape == () and norm.dtype == torch.float32 and p.grad._version > version and len(told) <= 1


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)], ids=str)
def test_dtypes_together(dtypes: tuple[torch.dtype, ...]) -> None:
    ours, theirs = ([p for dtype in dtypes for p in parameters(dtype)] for _ in range(2))
    give_gradients(ours, theirs, seed=0)
    got, want = clip_grad_norm_(ours, 1.0), nn.utils.clip_grad_norm_(theirs, 1.0)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtypes[0]], atol=0)


def test_gradients_however_they_lie() -> None:
    def given() -> list[Tensor]:
        params = [torch.zeros(4, 6, 5, 7, requires_grad=True) for _ in range(3)]
        g = torch.Generator().manual_seed(0)
        values = torch.randn(4, 6, 5, 7, generator=g)
        params[0].grad = values.to(memory_format=torch.channels_last)
        params[1].grad = torch.randn(4, 12, 5, 7, generator=g)[:, ::2]
        params[2].grad = values.clone()
        return params

    ours, theirs = given(), given()
    torch.testing.assert_close(clip_grad_norm_(ours, 1.0), nn.utils.clip_grad_norm_(theirs, 1.0))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_sparse_gradients_go_to_pytorch() -> None:
    ours, theirs = torch.zeros(4, 2, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
    for p in (ours, theirs):
        p.grad = torch.eye(4, 2).to_sparse().coalesce()
    results = []
    for clip, p in ((clip_grad_norm_, ours), (nn.utils.clip_grad_norm_, theirs)):
        try:
            results.append(float(clip([p], 0.5)))
        except Exception as error:
            results.append(str(error))
    assert results[0] == results[1]


@pytest.mark.parametrize("optimizer", [FusedAdam, FusedSGD])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_within_a_step(max_norm: float, optimizer: type) -> None:
    """Over all groups together; gradients stay as they are."""
    ours, theirs = parameters(), parameters()
    a = optimizer([{"params": ours[:3]}, {"params": ours[3:], "lr": 0.1}], lr=0.2, max_grad_norm=max_norm)
    b = optimizer([{"params": theirs[:3]}, {"params": theirs[3:], "lr": 0.1}], lr=0.2)
    for step in range(5):
        give_gradients(ours, theirs, seed=step)
        before = [p.grad.clone() for p in ours]
        norm = nn.utils.clip_grad_norm_(theirs, max_norm)
        a.step(), b.step()
        assert a.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert_equal([p.grad for p in ours], before)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
