"""Steps of optimizers on the emulated GPU, which are the CPU's: rules are written once for both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAUNCH_FAILED = 719
HALVES = FLOATS[2:]
SHAPES: Sequence[tuple[int, ...]] = [(3, 5), (1000,), (), (1,), (0, 4), (129, 257), (17, 1, 3)]  # some of several parts

LAMB = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "ratio_max": math.inf}
RULES: dict[str, tuple[str, dict[str, float]]] = {
    "adam": ("adam", {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "decay": 0, "bias_correction": 1}),
    "adamw": ("adam", {"beta1": 0.3, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1, "decay": 2, "amsgrad": 1}),
    "decay after": ("adam", {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "decay": 1}),
    "maximized": ("adam", {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "bias_correction": 1, "maximize": 1}),
    "sgd": ("sgd", {"weight_decay": 0.1}),
    "momentum": ("sgd", {"momentum": 0.9, "dampening": 0.1}),
    "nesterov": ("sgd", {"momentum": 0.9, "nesterov": 1, "weight_decay": 0.1}),
    "lamb": ("lamb", {**LAMB, "decay": 2, "bias_correction": 1}),
    "lamb with l2": ("lamb", {**LAMB, "grad_averaging": 1, "use_nvlamb": 1}),
    "lamb within bounds": ("lamb", {**LAMB, "decay": 2, "ratio_min": 0.3, "ratio_max": 0.7}),
}
STATES = {"adam": 3, "sgd": 1, "lamb": 2, "scale": 0}


class Optimizer:
    """Tensors of one device and their steps; the same ones on each."""

    def __init__(self, gpu: Gpu, on_gpu: bool, rule: str, group: dict[str, float], dtype: torch.dtype) -> None:
        self.gpu, self.on_gpu, self.rule, self.group, self.dtype = gpu, on_gpu, rule, {"lr": 0.1, **group}, dtype
        g = torch.Generator().manual_seed(0)
        self.params = [self.put(torch.randn(s, generator=g).to(dtype)) for s in SHAPES]
        self.masters: list[Any] = [None] * len(SHAPES)
        self.state_dtype = dtype
        self.states: list[list[Any]] = []
        counts = rule in ("adam", "lamb")
        self.steps: list[Any] = [self.put(torch.zeros(())) if counts else None for _ in SHAPES]
        self.given: list[Any] = []  # kept: memory that is free is written to at once, whoever still reads it
        self.grads: list[Any] = []
        self.norm: Any = None
        self.done = 0

    def put(self, t: Tensor) -> Any:
        return self.gpu.put(t) if self.on_gpu else t

    def get(self, tensors: Sequence[Any]) -> list[Tensor]:
        return [self.gpu.get(t) if self.on_gpu else t for t in tensors]

    def with_masters(self) -> None:
        self.masters = [self.put(t.float()) for t in self.get(self.params)]

    def step(self, number: int = 0, scale: float = 1.0, **how: Any) -> None:
        g = torch.Generator().manual_seed(number)
        self.grads = [self.put((torch.randn(s, generator=g) * scale).to(self.dtype)) for s in SHAPES]
        self.given += self.grads
        if not self.states:
            n = STATES[self.rule]
            self.states = [[self.put(torch.zeros(s, dtype=self.state_dtype)) for _ in range(n)] for s in SHAPES]
        rows = [
            (i % 2, *row, self.done == 0, tuple(states))
            for i, (*row, states) in enumerate(
                zip(self.params, self.grads, self.masters, self.steps, self.states, strict=True)
            )
        ]
        groups = [self.group, {**self.group, "lr": 0.03}]
        self.done += 1
        there = {name: self.put(value) if isinstance(value, Tensor) else value for name, value in how.items()}
        self.given += there.values()
        with self.gpu.waits_for_nothing():
            self.gpu.core.optim_step(
                self.rule, rows, groups, norm=self.norm, provider="gpu" if self.on_gpu else "cpu", **there
            )

    def step_with_norm(self, **how: Any) -> float:
        self.norm = self.put(torch.zeros((), dtype=torch.float64))
        self.step(**how)
        return self.get([self.norm])[0].item()

    def everything(self) -> list[Tensor]:
        states = [t for states in self.states for t in states]
        every = [*self.params, *self.grads, *self.masters, *states, *self.steps]
        return self.get([t for t in every if t is not None])


def assert_same(a: Optimizer, b: Optimizer, exactly: bool = True) -> None:
    for ours, theirs in zip(a.everything(), b.everything(), strict=True):
        if exactly:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs)


def both(gpu: Gpu, rule: str, dtype: torch.dtype, **more: float) -> tuple[Optimizer, Optimizer]:
    name, group = RULES[rule]
    return Optimizer(gpu, True, name, group | more, dtype), Optimizer(gpu, False, name, group | more, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_the_cpu(gpu: Gpu, rule: str, dtype: torch.dtype) -> None:
    a, b = both(gpu, rule, dtype)
    for number in range(3):
        for optimizer in (a, b):
            optimizer.step(number)
    assert_same(a, b, exactly="lamb" not in rule)  # whose lengths are sums in another order


@pytest.mark.parametrize("rule", ["adamw", "nesterov", "lamb"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("random", [0, 1])
def test_halves_with_wide_states(gpu: Gpu, rule: str, dtype: torch.dtype, masters: bool, random: int) -> None:
    a, b = both(gpu, rule, dtype, stochastic_rounding=random)
    for optimizer in (a, b):
        optimizer.state_dtype = torch.float32
        if masters:
            optimizer.with_masters()
        for number in range(2):
            optimizer.step(number, seed=2**40 + number)
    assert_same(a, b, exactly="lamb" not in rule)


@pytest.mark.parametrize("rule", ["adam", "momentum", "lamb"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_scaled_gradients_are_clipped(gpu: Gpu, rule: str, norm_type: float, max_norm: float) -> None:
    a, b = both(gpu, rule, torch.float32)
    how = {"grad_scale": torch.tensor(1024.0), "max_norm": max_norm, "norm_type": norm_type}
    norms = [optimizer.step_with_norm(scale=1024.0, **how) for optimizer in (a, b)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    assert_same(a, b, exactly=False)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_clipping_alone(gpu: Gpu, dtype: torch.dtype) -> None:
    a, b = Optimizer(gpu, True, "scale", {}, dtype), Optimizer(gpu, False, "scale", {}, dtype)
    norms = [optimizer.step_with_norm(max_norm=1.0) for optimizer in (a, b)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    assert_same(a, b, exactly=False)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_tells_of_an_overflow(gpu: Gpu, bad: float, norm_type: float) -> None:
    optimizer = Optimizer(gpu, True, "scale", {}, torch.float32)
    assert not optimizer.step_with_norm(scale=bad, norm_type=norm_type) < float("inf")


@pytest.mark.parametrize("rule", ["adam", "momentum", "lamb"])
def test_numbers_that_the_device_alone_knows(gpu: Gpu, rule: str) -> None:
    """A learning rate, and whether the step is left out, counters included."""
    a, b = both(gpu, rule, torch.float32)
    a.group["lr"] = a.put(torch.tensor(0.1, dtype=torch.float64))
    for number, left_out in enumerate([0.0, 2.0, 0.0]):
        before = a.get(a.params)
        for optimizer in (a, b):
            optimizer.step(number, grad_scale=torch.tensor(8.0), found_inf=torch.tensor(left_out))
        if left_out:
            assert all(torch.equal(*pair) for pair in zip(a.get(a.params), before, strict=True))
        assert_same(a, b, exactly=rule != "lamb")


def test_a_number_of_another_kind_is_refused(gpu: Gpu) -> None:
    p, rate = gpu.put(torch.ones(5)), gpu.put(torch.ones(()))
    rows = [(0, p, p, None, None, True, ())]
    with pytest.raises(TypeError, match="group 0: lr is f32, not f64"):
        gpu.core.optim_step("sgd", rows, [{"lr": rate}], provider="gpu")
    with pytest.raises(TypeError, match="norm is f32, not f64"):
        gpu.core.optim_step("sgd", rows, [{"lr": 1.0}], norm=rate, provider="gpu")
    with pytest.raises(ValueError, match="found_inf has 5 elements, not 1"):
        gpu.core.optim_step("sgd", rows, [{"lr": 1.0}], found_inf=p, provider="gpu")


def test_a_step_is_few_launches(gpu: Gpu) -> None:
    params = [gpu.put(torch.ones(5)) for _ in range(200)]
    rows = [(0, p, gpu.put(torch.ones(5)), None, gpu.put(torch.zeros(())), True, (p_, q_)) for p, p_, q_ in
            ((p, gpu.put(torch.zeros(5)), gpu.put(torch.zeros(5))) for p in params)]  # fmt: skip
    before = gpu.counted().launches
    gpu.core.optim_step("adam", rows, [{"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}], provider="gpu")
    assert gpu.counted().launches - before <= 10
    assert torch.equal(gpu.get(params[199]), gpu.get(params[0]))


def test_tensors_that_share_memory_are_updated_in_turn(gpu: Gpu) -> None:
    results = []
    for on_gpu in (True, False):
        optimizer = Optimizer(gpu, on_gpu, "sgd", {}, torch.float32)
        p, g = optimizer.put(torch.ones(3000)), optimizer.put(torch.linspace(0, 1, 3000))
        rows = [(0, p, g, None, None, True, ()), (1, p, g, None, None, True, ())]
        groups = [{"lr": 0.1, "weight_decay": 0.5}, {"lr": 0.3, "weight_decay": 0.7}]
        gpu.core.optim_step("sgd", rows, groups, provider="gpu" if on_gpu else "cpu")
        results += optimizer.get([p])
    assert torch.equal(*results)


def test_whichever_call_fails_it_is_an_exception_and_the_next_step_works(gpu: Gpu) -> None:
    """Each call to the driver in turn; whether the stream is captured need not be known."""
    p, g, norm = gpu.put(torch.ones(5)), gpu.put(torch.ones(5)), gpu.put(torch.zeros((), dtype=torch.float64))

    def step() -> float:
        rows = [(0, p, g, None, None, True, ())]
        gpu.core.optim_step("sgd", rows, [{"lr": 0.0}], max_norm=1.0, norm=norm, provider="gpu")
        return gpu.get(norm).item()

    told, most = [], 40
    for n in range(most):
        gpu.fail(n, None, LAUNCH_FAILED)
        try:
            step()
        except RuntimeError as failure:
            assert "CUDA_ERROR" in str(failure) or "CUDA error" in str(failure)
            told.append(n)
        gpu.fail(-1, None, 0)
        assert step() == pytest.approx(5**0.5)
    assert 3 < len(told) < most  # its memory, and three kernels
