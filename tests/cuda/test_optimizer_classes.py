"""The optimizers of ``ortmodule_c.optim`` where parameters are on GPUs.

Twice emulated: with tensors of the host's that go to the emulated GPU and back at each step, for what is computed; and
with tensors of CUDA that have no elements, which refuse to be waited for, for who computes it and where states are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ortmodule_c import _C
from ortmodule_c.optim import FP16_Optimizer, FusedAdam, FusedLamb, FusedSGD, clip, clip_grad_norm_, fused

SHAPES: list[tuple[int, ...]] = [(3, 5), (), (0, 4), (129, 33)]
OPTIMIZERS: dict[str, Callable[[list[Tensor]], fused.FusedOptimizer]] = {
    "adam": lambda p: FusedAdam(p, lr=torch.tensor(0.1), weight_decay=0.1),
    "clipped": lambda p: FusedAdam(p, lr=0.1, amsgrad=True, max_grad_norm=0.5),
    "masters": lambda p: FusedAdam(p, lr=0.1, master_weights=True),
    "sgd": lambda p: FusedSGD(p, lr=torch.tensor(0.1), momentum=0.9, dampening=0.5),
    "lamb": lambda p: FusedLamb(p, lr=torch.tensor(0.1)),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same values at each call."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in SHAPES]


def give_gradients(params: list[Tensor], seed: int, scale: float = 1.0) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=g) * scale).to(p.dtype)


class There:
    """`_C.optim_step` on the emulated GPU, for tensors of the host's."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, given: Any) -> Any:
        if isinstance(given, (tuple, list)):
            return type(given)(map(self.put, given))
        if isinstance(given, dict):
            return {name: self.put(value) for name, value in given.items()}
        if not isinstance(given, Tensor):
            return given
        if id(given) not in self.copies:
            self.copies[id(given)] = given, self.gpu.put(given.detach())
        return self.copies[id(given)][1]

    def step(self, rule: str, tensors: Any, groups: Any, **how: Any) -> None:
        self.copies = {}
        self.gpu.core.optim_step(rule, self.put(tensors), self.put(groups), **{**self.put(how), "provider": "gpu"})
        for host, device in self.copies.values():
            host.data.copy_(self.gpu.get(device))


@pytest.fixture
def on_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """on_gpu(True): from now on tensors of the host's count as a GPU's; on_gpu(False): no more."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(_C, "optim_step", There(gpu).step if on else step)
        monkeypatch.setattr(fused, "HOST", "nowhere" if on else "cpu")

    step = _C.optim_step
    return switch


def scaled_steps(optimizer: fused.FusedOptimizer, params: list[Tensor], overflow_at: int) -> None:
    for step in range(4):
        give_gradients(params, step, 8.0)
        optimizer.grad_scale = torch.tensor(8.0)
        optimizer.found_inf = torch.tensor(2.0 if step == overflow_at else 0.0)
        optimizer.step()


@pytest.mark.parametrize("overflow_at", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_cpu(
    on_gpu: Callable[[bool], None], name: str, dtype: torch.dtype, overflow_at: int
) -> None:
    results = []
    for on in (True, False):
        on_gpu(on)
        params = parameters(dtype)
        optimizer = OPTIMIZERS[name](params)
        scaled_steps(optimizer, params, overflow_at)
        state = optimizer.state_dict()["state"]
        results.append([params, [list(of_p.values()) for of_p in state.values()], optimizer.grad_norm])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_is_that_of_the_cpu(on_gpu: Callable[[bool], None], norm_type: float) -> None:
    results = []
    for on in (True, False):
        on_gpu(on)
        params = [p for p in parameters() if p.numel()]
        give_gradients(params, 0)
        norm = clip_grad_norm_(params, 0.5, norm_type)
        checked = clip_grad_norm_(params, 0.25, norm_type, error_if_nonfinite=True)
        results.append([norm, checked, [p.grad for p in params]])
    torch.testing.assert_close(*results)


def test_fp16_optimizer_is_that_of_the_cpu(on_gpu: Callable[[bool], None]) -> None:
    results = []
    for on in (True, False):
        on_gpu(on)
        params = parameters()
        args = {"init_scale": 8.0, "scale_window": 1, "max_scale": 16.0}
        wrapped = FP16_Optimizer(FusedAdam(params), dynamic_loss_scale=True, dynamic_loss_args=args)
        told = []
        for step in range(4):
            wrapped.zero_grad()
            wrapped.backward(sum((p * (step + 1)).sum() for p in params) * (float("inf") if step == 1 else 1.0))
            wrapped.step()
            told += [wrapped.overflow, wrapped.loss_scale]
        results.append([params, told])
    torch.testing.assert_close(*results)
    assert results[0][1] == [False, 16.0, True, 8.0, False, 16.0, False, 16.0]


# ---- tensors of CUDA that have no elements ----


class Asked:
    """In the place of `_C.optim_step`: what it was given."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def __call__(self, rule: str, tensors: Any, groups: Any, **how: Any) -> None:
        self.steps.append({"tensors": tensors, "groups": groups, **how})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """All devices have kernels; no tensor tells a number, as whoever asked would wait for the device."""
    asked = Asked()
    monkeypatch.setattr(_C, "optim_step", asked)
    for module in (fused, clip):
        monkeypatch.setattr(module, "device_refusal", lambda _: "")
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield asked


def on(*devices: str) -> list[Tensor]:
    """Parameters there; PyTorch makes fake tensors on any GPU where it has none, else on those that it has."""
    there = {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    if torch.cuda.is_available() and (missing := {*devices} - there):
        pytest.skip(f"PyTorch has no {', '.join(sorted(missing))}")
    params = [torch.empty(3, 5, device=device, requires_grad=True) for device in devices]
    for p in params:
        p.grad = torch.empty_like(p)
    return params


def test_each_device_has_a_step_in_which_nothing_waits(asked: Asked) -> None:
    params = on("cuda:1", "cuda:0", "cuda:1", "cpu")
    optimizer = FusedAdam(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="cuda:0")
    optimizer.grad_scale, optimizer.found_inf = (torch.empty((), device="cuda:0") for _ in range(2))
    optimizer.step()
    assert [(step["provider"], len(step["tensors"])) for step in asked.steps] == [
        ("cuda:1", 2),
        ("cuda:0", 1),
        ("cpu", 1),
    ]
    for step in asked.steps:
        device = torch.device(step["provider"])
        (lr,) = (group["lr"] for group in step["groups"])
        assert (lr.device, lr.dtype) == (device, torch.float64)
        assert step["grad_scale"].device == step["found_inf"].device == device
        for _, p, grad, _, counter, _, states in step["tensors"]:
            assert {t.device for t in (p, grad, counter, *states)} == {device}


def test_the_norm_stays_on_the_device(asked: Asked) -> None:
    FusedLamb(on("cuda:0")).step()
    assert asked.steps[0]["norm"].device == torch.device("cuda:0")


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD, FusedLamb])
def test_a_known_learning_rate_is_a_number(asked: Asked, kind: Any) -> None:
    optimizer = kind(on("cuda:0"), lr=0.5)
    optimizer.step()
    assert asked.steps[0]["groups"][0]["lr"] == 0.5


def test_states_are_where_pytorchs_fused_ones_are(asked: Asked) -> None:
    ours, theirs = on("cuda:0"), on("cuda:0")
    a, b = FusedAdam(ours), torch.optim.AdamW(theirs, fused=True)
    a.step()
    b.step()
    for fresh, saved in ((FusedAdam(ours), b), (torch.optim.AdamW(theirs, fused=True), a)):
        fresh.load_state_dict(copy.deepcopy(saved.state_dict()))
        for optimizer in (saved, fresh):
            (state,) = optimizer.state.values()
            kinds = {name: (t.device, t.dtype, t.shape) for name, t in state.items()}
            means = (torch.device("cuda:0"), torch.float32, (3, 5))
            assert kinds == {"step": (*means[:2], ()), "exp_avg": means, "exp_avg_sq": means}


def test_counters_of_the_cpu_follow_their_parameters(asked: Asked) -> None:
    params = on("cuda:0")
    optimizer = FusedAdam(params)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = torch.empty(())
    optimizer.load_state_dict(state)
    assert optimizer.state[params[0]]["step"].device == torch.device("cuda:0")


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD, FusedLamb])
def test_a_step_in_a_capture_is_refused_before_anything_is_changed(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    optimizer, called = kind(on("cuda:0"), lr=0.5), []
    optimizer.found_inf = torch.empty((), device="cuda:0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=f"{kind.__name__} takes no step while a CUDA graph is captured"):
        optimizer.step(lambda: called.append(1))
    assert not asked.steps and not called and not optimizer.state


def test_a_norm_over_several_devices_is_refused(asked: Asked) -> None:
    optimizer = FusedAdam(on("cuda:0", "cuda:1"), max_grad_norm=1.0)
    what = r"parameter 1 of group 0, of shape \(3, 5\), is on cuda:1, not cuda:0"
    with pytest.raises(ValueError, match=f"max_grad_norm of FusedAdam takes the norm on one device; {what}"):
        optimizer.step()
    assert not asked.steps and not any(optimizer.state[p].get("exp_avg") is not None for p in optimizer.state)


def test_a_device_that_does_not_open_is_named() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer = FusedAdam(on("cuda:2"))
        with pytest.raises(ValueError, match=r"parameter 0 of group 0, of shape \(3, 5\), is on cuda:2: .*cannot be"):
            optimizer.step()
