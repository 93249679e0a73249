"""FusedLamb beside its formulas."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from beside import FLOATS, assert_equal, give_gradients, parameters, train
from ortmodule_c.optim import FusedLamb

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "weight_decay": 0.3},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True},
    {"bias_correction": False},
    {"adam_w_mode": False, "weight_decay": 0.1},
    {"grad_averaging": False},
    {"max_grad_norm": None},
    {"max_grad_norm": 1e9},
    {"maximize": True},
    {"lr": 0.0},
    {"ratio_min": 30.0},
    {"ratio_max": 0.5},
    {"ratio_min": -math.inf, "ratio_max": 0.01, "lr": 0.1},
]


def written_out(params: list[Tensor], steps: int, seed: int = 1, **options: Any) -> list[Tensor]:
    """Parameters after some steps, computed in float64."""
    o = {"lr": 1e-3, "weight_decay": 0.01, "use_nvlamb": False, "bias_correction": True, "adam_w_mode": True}
    o = {**o, "grad_averaging": True, "max_grad_norm": 1.0, "maximize": False, "ratio_min": 0.0, **options}
    now = [p.detach().double() for p in params]
    m, v = [torch.zeros_like(p) for p in now], [torch.zeros_like(p) for p in now]
    for t in range(1, steps + 1):
        give_gradients(params, seed=seed + t - 1)
        grads = [p.grad.double() for p in params]
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
        if o["max_grad_norm"] is not None:
            grads = [g * min(1.0, o["max_grad_norm"] / (norm + 1e-6)) for g in grads]
        for i, (p, given) in enumerate(zip(now, grads, strict=True)):
            g = -given if o["maximize"] else given
            if not o["adam_w_mode"]:
                g = g + o["weight_decay"] * p
            m[i] = 0.9 * m[i] + (0.1 if o["grad_averaging"] else 1.0) * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            first, second = (1 - 0.9**t, 1 - 0.999**t) if o["bias_correction"] else (1.0, 1.0)
            u = m[i] / first / ((v[i] / second).sqrt() + 1e-6)
            if o["adam_w_mode"]:
                u = u + o["weight_decay"] * p
            adapts = (o["weight_decay"] != 0 or o["use_nvlamb"]) and p.norm() > 0 and u.norm() > 0
            ratio = (
                max(o["ratio_min"], min(o.get("ratio_max", math.inf), float(p.norm() / u.norm()))) if adapts else 1.0
            )
            now[i] = p - o["lr"] * ratio * u
    return now


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_computes_its_formulas(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = parameters(dtype)
    expected = written_out(parameters(dtype), 10, **options)
    train(FusedLamb(ours, **options), 10)
    for a, b in zip(ours, expected, strict=True):
        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(a.detach().double(), b, rtol=tolerance, atol=tolerance)


def test_parameters_of_zeros_get_the_learning_rate() -> None:
    ours = [torch.zeros(40, requires_grad=True)]
    expected = written_out([torch.zeros(40, requires_grad=True)], 1, lr=0.1)
    train(FusedLamb(ours, lr=0.1), 1)
    torch.testing.assert_close(ours[0].detach().double(), expected[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            params = parameters(dtype, [(70000,), (3,), (300, 257)])
            train(FusedLamb(params), 3)
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_means_of_halves_are_kept_in_32_bits(dtype: torch.dtype) -> None:
    ours, wide = parameters(dtype), [p.detach().float().requires_grad_() for p in parameters(dtype)]
    optimizer, other = FusedLamb(ours, master_weights=True, lr=0.01), FusedLamb(wide, lr=0.01)
    for step in range(5):
        give_gradients(ours, seed=step)
        for p, q in zip(ours, wide, strict=True):
            q.grad = p.grad.float()
        optimizer.step(), other.step()
    assert_equal([optimizer.state[p]["exp_avg_sq"] for p in ours], [other.state[q]["exp_avg_sq"] for q in wide])
    assert_equal([optimizer.state[p]["master"] for p in ours], wide)
    assert_equal(ours, [q.to(dtype) for q in wide])


@pytest.mark.parametrize("name", ["amsgrad", "foreach", "capturable", "differentiable"])
def test_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=True"):
        FusedLamb(parameters(), **{name: True})


def test_bounds_of_the_ratio_are_in_order() -> None:
    with pytest.raises(ValueError, match=r"Invalid ratio_max: 0.5, with ratio_min=1.0"):
        FusedLamb([torch.zeros(3, requires_grad=True)], ratio_min=1.0, ratio_max=0.5)
