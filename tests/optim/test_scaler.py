"""torch.amp.GradScaler and FP16_Optimizer."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from beside import assert_close, assert_equal, give_gradients, parameters
from ortmodule_c.optim import FP16_Optimizer, FusedAdam, FusedLamb, FusedSGD

PAIRS = {
    "adam": (FusedAdam, torch.optim.AdamW),
    "sgd": (FusedSGD, torch.optim.SGD),
    "momentum": (lambda p: FusedSGD(p, momentum=0.9), lambda p, **o: torch.optim.SGD(p, momentum=0.9, **o)),
}


def scaled_steps(optimizer: Optimizer, params: list[Tensor], clip: bool, overflow_at: int) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        factor = math.inf if step == overflow_at else 1.0
        g = torch.Generator().manual_seed(step)
        loss = sum((p * torch.randn(p.shape, generator=g)).sum() * factor for p in params)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("overflow_at", [0, 2, 9])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_grad_scaler(name: str, clip: bool, overflow_at: int) -> None:
    ours, theirs = parameters(), parameters()
    fused, plain = PAIRS[name]
    a, b = fused(ours), plain(theirs)
    assert scaled_steps(a, ours, clip, overflow_at) == scaled_steps(b, theirs, clip, overflow_at)
    assert_close(ours, theirs)
    assert_close([p.grad for p in ours], [p.grad for p in theirs])  # divided by the scale


@pytest.mark.parametrize("optimizer", [FusedAdam, FusedSGD, FusedLamb])
def test_the_scale_comes_off_before_the_clip(optimizer: Any) -> None:
    ours, theirs = parameters(), parameters()
    a, b = optimizer(ours, max_grad_norm=0.5), optimizer(theirs, max_grad_norm=0.5)
    give_gradients(ours, seed=0, scale=1024.0)
    give_gradients(theirs, seed=0)
    a.grad_scale = torch.tensor(1024.0)
    a.step(), b.step()
    assert_equal(ours, theirs)
    assert a.grad_norm == b.grad_norm
    assert_equal([p.grad for p in ours], [p.grad for p in theirs])


def test_a_step_that_is_skipped_changes_nothing() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    give_gradients(params, seed=0)
    optimizer.found_inf = torch.tensor(1.0)
    before = [(p.detach().clone(), p._version) for p in params]
    optimizer.step()
    assert_equal(params, [p for p, _ in before])
    assert [p._version for p in params] == [v for _, v in before] and not optimizer.state


def train(wrapped: FP16_Optimizer, params: list[Tensor], steps: int, clip: bool = False, overflow_at: int = -1) -> None:
    for step in range(steps):
        wrapped.zero_grad()
        g = torch.Generator().manual_seed(step)
        factor = math.inf if step == overflow_at else 1.0
        wrapped.backward(sum((p * torch.randn(p.shape, generator=g)).sum() * factor for p in params))
        if clip:
            norm = wrapped.clip_master_grads(1.0)
            assert (norm == -1) is (step == overflow_at)
        wrapped.step()
        assert wrapped.overflow is (step == overflow_at)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("of", [FusedAdam, torch.optim.AdamW], ids=["FusedAdam", "AdamW"])
def test_fp16_optimizer(of: Any, clip: bool) -> None:
    ours, theirs = parameters(), parameters()
    args = {"init_scale": 8.0, "scale_window": 2, "min_scale": 4.0, "max_scale": 16.0}
    wrapped = FP16_Optimizer(of(ours), dynamic_loss_scale=True, dynamic_loss_args=args)
    train(wrapped, ours, 8, clip, overflow_at=1)
    assert wrapped.loss_scale == 16.0  # 8, 4 at the overflow, and doubled up to its bound
    plain = FP16_Optimizer(torch.optim.AdamW(theirs), static_loss_scale=1.0)
    for step in range(8):
        if step != 1:
            plain.zero_grad()
            g = torch.Generator().manual_seed(step)
            plain.backward(sum((p * torch.randn(p.shape, generator=g)).sum() for p in theirs))
            if clip:
                plain.clip_master_grads(1.0)
            plain.step()
    assert_close(ours, theirs)


def gradients_of(wrapped: FP16_Optimizer, params: list[Tensor], seed: int, factor: float = 1.0) -> None:
    g = torch.Generator().manual_seed(seed)
    wrapped.backward(sum((p * torch.randn(p.shape, generator=g)).sum() * factor for p in params))
    wrapped.update_master_grads()


@pytest.mark.parametrize("factor", [1.0, math.inf], ids=["", "overflowed"])
@pytest.mark.parametrize("by", ["zero_grad", "load_state_dict"])
@pytest.mark.parametrize("of", [FusedAdam, torch.optim.AdamW], ids=["FusedAdam", "AdamW"])
def test_a_batch_that_is_left_out_leaves_nothing_behind(of: Any, by: str, factor: float) -> None:
    ours, theirs = parameters(), parameters()
    for params, discards in ((ours, True), (theirs, False)):
        wrapped = FP16_Optimizer(of(params), dynamic_loss_scale=True)
        if discards:
            state = copy.deepcopy(wrapped.state_dict())
            gradients_of(wrapped, params, 0, factor)
            if by == "zero_grad":
                wrapped.zero_grad()
            else:
                wrapped.load_state_dict(state)
                for p in params:
                    p.grad = None
        for seed in (1, 2):
            gradients_of(wrapped, params, seed)
            wrapped.step()
            wrapped.zero_grad()
            assert not wrapped.overflow and wrapped.loss_scale == 2.0**16
    assert_equal(ours, theirs)


def test_static_scale_stays() -> None:
    params = parameters()
    wrapped = FP16_Optimizer(FusedAdam(params), static_loss_scale=128.0)
    train(wrapped, params, 3, overflow_at=1)
    assert wrapped.loss_scale == 128.0


def test_dynamic_scale_has_a_least_value() -> None:
    params = parameters()
    args = {"init_scale": 2.0, "min_scale": 2.0}
    wrapped = FP16_Optimizer(FusedAdam(params), dynamic_loss_scale=True, dynamic_loss_args=args)
    train(wrapped, params, 2, overflow_at=1)
    assert wrapped.loss_scale == 2.0


def test_state_of_fp16_optimizer() -> None:
    ours, theirs = parameters(), parameters()
    a, b = (FP16_Optimizer(FusedAdam(p), dynamic_loss_scale=True) for p in (ours, theirs))
    train(a, ours, 3, overflow_at=2)
    train(b, theirs, 3, overflow_at=2)
    fresh = FP16_Optimizer(FusedAdam(ours), dynamic_loss_scale=True)
    fresh.load_state_dict(copy.deepcopy(a.state_dict()))
    assert fresh.overflow and fresh.loss_scale == a.loss_scale
    train(fresh, ours, 3), train(b, theirs, 3)
    assert_equal(ours, theirs)
    assert fresh.param_groups is fresh.optimizer.param_groups and fresh.state is fresh.optimizer.state


def test_half_precision_with_masters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).to(torch.float16)
    wrapped = FP16_Optimizer(
        FusedAdam(model.parameters(), lr=1e-2, master_weights=True, max_grad_norm=1.0), dynamic_loss_scale=True
    )
    x = torch.randn(64, 8, dtype=torch.float16)
    losses = []
    for _ in range(60):
        wrapped.zero_grad()
        loss = ((model(x).float() - x.float().sum(1, keepdim=True)) ** 2).mean()
        wrapped.backward(loss)
        wrapped.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_of_float16_are_clipped_with_their_scale(norm_type: float) -> None:
    """Of these a third is next to nothing in float16 without the scale, and their norm with it is infinite there."""
    start = torch.linspace(-1, 1, 30)
    gradient = torch.linspace(-2, 2, 30)
    gradient[::3] *= 1e-7
    factor = 0.5 / float(torch.linalg.vector_norm(gradient, norm_type))
    for clips in (True, False):
        p = nn.Parameter(start.half())
        wrapped = FP16_Optimizer(FusedAdam([p], eps=1e-12, master_weights=True), static_loss_scale=2.0**14)
        wrapped.backward((p * gradient).sum() * (1.0 if clips else factor))
        if clips:
            norm = wrapped.clip_master_grads(0.5, norm_type)
            assert norm == pytest.approx(0.5 / factor, rel=1e-3)
        wrapped.step()
        mean = wrapped.state[p]["exp_avg"]
        torch.testing.assert_close(mean, 0.1 * factor * gradient, rtol=5e-3, atol=1e-12)
        assert not wrapped.overflow
    p.grad = torch.full_like(p, math.inf)
    assert wrapped.clip_master_grads(0.5) == -1
    wrapped.step()
    assert wrapped.overflow
    with pytest.raises(ValueError, match="of float16 are of order 2 or infinity"):
        wrapped.clip_master_grads(0.5, 3)
    with pytest.raises(ValueError, match="of float16 keep their scale until the step"):
        wrapped.update_master_grads()


def test_what_fp16_optimizer_does_not_take() -> None:
    inner = FusedAdam(parameters())
    with pytest.raises(TypeError, match=r"takes an optimizer of torch\.optim, not FP16_Optimizer"):
        FP16_Optimizer(FP16_Optimizer(inner))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dynamic_loss_args has no window, but init_scale, scale_window"):
        FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args={"window": 1})
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="Invalid loss scale"):
            FP16_Optimizer(inner, static_loss_scale=scale)
