"""FusedAdam beside the optimizers that its modes stand for."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from beside import FLOATS, assert_close, assert_equal, assert_same_state, give_gradients, parameters, train
from ortmodule_c import _C
from ortmodule_c.optim import AdamWMode, FusedAdam, FusedLamb, FusedSGD

L2, TRANSFORMERS, TORCH = AdamWMode.ADAM_L2_REGULARIZATION, AdamWMode.ADAMW_TRANSFORMERS, AdamWMode.ADAMW_TORCH

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": torch.tensor(1e-2, dtype=torch.float64)},
    {"weight_decay": 0.0},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.5},
    {"betas": (0.3, 0.5), "eps": 1e-3},
    {"betas": (0.0, 0.999)},
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", [TORCH, L2], ids=lambda m: m.name)
def test_computes_what_pytorch_does(mode: AdamWMode, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    plain = torch.optim.AdamW if mode is TORCH else torch.optim.Adam
    a, b = FusedAdam(ours, adam_w_mode=mode, **options), plain(theirs, fused=True, **options)
    train(a, 20)
    train(b, 20)
    assert_close(ours, theirs)
    assert_same_state(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", [TORCH, L2], ids=lambda m: m.name)
def test_computes_what_pytorch_does_op_by_op(mode: AdamWMode, options: dict[str, Any]) -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    plain = torch.optim.AdamW if mode is TORCH else torch.optim.Adam
    train(FusedAdam(ours, adam_w_mode=mode, **options), 20)
    train(plain(theirs, foreach=False, fused=False, **options), 20)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class OfTransformers(Optimizer):
    """AdamW with decay after the step and eps before the correction, written out."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float, corrected: bool) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "corrected": corrected})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                s.setdefault("t", 0), s.setdefault("m", torch.zeros_like(p)), s.setdefault("v", torch.zeros_like(p))
                s["t"] += 1
                s["m"] = 0.9 * s["m"] + (1 - 0.9) * p.grad
                s["v"] = 0.999 * s["v"] + (1 - 0.999) * p.grad**2
                length = group["lr"]
                if group["corrected"]:
                    length *= math.sqrt(1 - 0.999 ** s["t"]) / (1 - 0.9 ** s["t"])
                p.sub_(length * s["m"] / (s["v"].sqrt() + 1e-6))
                p.sub_(group["lr"] * group["weight_decay"] * p)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_mode_of_transformers(weight_decay: float, corrected: bool) -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    numbers = {"lr": 1e-2, "weight_decay": weight_decay}
    a = FusedAdam(ours, adam_w_mode=TRANSFORMERS, bias_correction=corrected, **numbers)
    train(a, 20)
    train(OfTransformers(theirs, corrected=corrected, **numbers), 20)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mode", "eps", "weight_decay"), [(L2, 1e-8, 0), (TRANSFORMERS, 1e-6, 0), (TORCH, 1e-8, 0.01)])
def test_defaults_are_those_of_what_the_mode_stands_for(mode: AdamWMode, eps: float, weight_decay: float) -> None:
    group = FusedAdam(parameters(), adam_w_mode=mode).param_groups[0]
    assert (group["eps"], group["weight_decay"], group["lr"], group["betas"]) == (eps, weight_decay, 1e-3, (0.9, 0.999))


@pytest.mark.parametrize("isa", _C.isas())
def test_every_instruction_set_computes_the_same(isa: str) -> None:
    ours, theirs = parameters(), parameters()
    train(FusedAdam(theirs), 3)
    _C.set_isa(isa)
    try:
        train(FusedAdam(ours), 3)
    finally:
        _C.set_isa(None)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def plain_of(mode: AdamWMode, params: list[Tensor], **options: Any) -> Optimizer:
    return (torch.optim.AdamW if mode is TORCH else torch.optim.Adam)(params, fused=True, weight_decay=0.1, **options)


def fused_of(mode: AdamWMode, params: list[Tensor], **options: Any) -> Optimizer:
    return FusedAdam(params, adam_w_mode=mode, weight_decay=0.1, **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("mode", [TORCH, L2], ids=lambda m: m.name)
@pytest.mark.parametrize("ways", [(plain_of, fused_of), (fused_of, plain_of)], ids=["from torch", "to torch"])
def test_states_are_interchangeable(ways: Any, mode: AdamWMode, amsgrad: bool, dtype: torch.dtype) -> None:
    before, after = ways
    changed, kept = parameters(dtype), parameters(dtype)
    a, b = before(mode, changed, amsgrad=amsgrad, lr=3e-3), before(mode, kept, amsgrad=amsgrad, lr=3e-3)
    train(a, 5), train(b, 5)
    other = after(mode, changed, amsgrad=not amsgrad)
    other.load_state_dict(copy.deepcopy(a.state_dict()))
    assert other.param_groups[0]["lr"] == 3e-3 and other.param_groups[0]["amsgrad"] is amsgrad
    assert set(plain_of(mode, parameters()).param_groups[0]) <= set(other.param_groups[0])
    train(other, 5, seed=9), train(b, 5, seed=9)
    assert_close(changed, kept)
    assert_same_state(other, b)


def test_what_the_state_of_pytorch_does_not_say_stays() -> None:
    optimizer = FusedAdam(parameters(), adam_w_mode=L2, bias_correction=False)
    optimizer.load_state_dict(torch.optim.AdamW(parameters(), capturable=False, foreach=True).state_dict())
    group = optimizer.param_groups[0]
    assert group["adam_w_mode"] == L2 and not group["bias_correction"] and not group["decoupled_weight_decay"]
    assert group["fused"] is None and not group["foreach"]  # so that PyTorch chooses for itself


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0, dtype=torch.float64), torch.tensor([3.0])], ids=repr)
def test_steps_of_older_states(step: Any) -> None:
    ours, theirs = parameters(), parameters()
    optimizers = FusedAdam(ours), torch.optim.AdamW(theirs, fused=True)
    for o in optimizers:
        train(o, 3)
    state = copy.deepcopy(optimizers[0].state_dict())
    for of_p in state["state"].values():
        of_p["step"] = step
    optimizers[0].load_state_dict(state)
    assert optimizers[0].state[ours[0]]["step"].dtype == torch.float32
    for o in optimizers:
        train(o, 1, seed=7)
    assert_close(ours, theirs)


def test_state_is_loaded_without_trust() -> None:
    optimizer = FusedAdam(parameters())
    train(optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh = FusedAdam(parameters())
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_same_state(fresh, optimizer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies(copied: Any) -> None:
    optimizer = FusedAdam(parameters(), max_grad_norm=0.5, set_grad_none=False)
    train(optimizer, 2)
    again = copied(optimizer)
    assert again.max_grad_norm == 0.5 and not again.set_grad_none
    train(optimizer, 2), train(again, 2)
    assert_equal(again.param_groups[0]["params"], optimizer.param_groups[0]["params"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fused": False}, "fused=False"),
    ({"foreach": True}, "foreach=True"),
    ({"capturable": True}, "capturable=True"),
    ({"differentiable": True}, "differentiable=True"),
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"lr": math.nan}, "Invalid learning rate: nan"),
    ({"lr": torch.ones(2)}, "learning rate as a tensor must have 1 element, not 2"),
    ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
    ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
    ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
    ({"max_grad_norm": 0.0}, "Invalid max_grad_norm: 0.0"),
    ({"adam_w_mode": 3}, "Invalid adam_w_mode: 3, expected one of AdamWMode.ADAM_L2_REGULARIZATION"),
    ({"adam_w_mode": True}, "Invalid adam_w_mode: True"),  # of apex, where it is AdamW: here 1 would be another
    ({"adam_w_mode": np.True_}, "Invalid adam_w_mode: "),
    ({"adam_w_mode": torch.tensor(True)}, "Invalid adam_w_mode: "),
    ({"adam_w_mode": "adamw"}, "Invalid adam_w_mode: 'adamw'"),
    ({"master_weights": True, "stochastic_rounding": True}, "stochastic_rounding=True has no use"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=lambda x: str(x)[:40])
def test_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        FusedAdam(parameters(), **options)
    numbers = {k: v for k, v in options.items() if k in FusedAdam(parameters()).defaults}
    if numbers:
        optimizer = FusedAdam(parameters())
        with pytest.raises(ValueError, match=text):
            optimizer.add_param_group({"params": parameters(), **numbers})


def test_a_bound_of_infinity_takes_the_norm_alone() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(ours, max_grad_norm=math.inf)
    assert optimizer.grad_norm is None
    train(optimizer, 1)
    train(FusedAdam(theirs), 1)
    assert_equal(ours, theirs)
    assert optimizer.grad_norm is not None and 0 < optimizer.grad_norm < math.inf


@pytest.mark.parametrize(("options", "text"), [({"betas": 0.9}, "betas"), ({"max_grad_norm": "1"}, "max_grad_norm")])
def test_what_is_no_number_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"{text} must be .* not "):
        FusedAdam(parameters(), **options)


@pytest.mark.parametrize(
    "given", [[], [1], [torch.ones(2, requires_grad=True) * 2], torch.ones(2), [{"lr": 1.0}]], ids=repr
)
def test_what_is_no_parameters_is_refused_in_the_words_of_pytorch(given: Any) -> None:
    errors = []
    for optimizer in (FusedAdam, torch.optim.AdamW):
        with pytest.raises((TypeError, ValueError, KeyError)) as raised:
            optimizer(given)
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("make", [FusedAdam, FusedLamb, FusedSGD])
@pytest.mark.parametrize("lr", ["0.01", None, np.array([0.01]), np.array("0.01"), np.array(1j)], ids=repr)
def test_a_learning_rate_is_a_number(make: Any, lr: Any) -> None:
    with pytest.raises(TypeError, match=r"learning rate must be a number, not .* of \w+"):
        make(parameters(), lr=lr)


@pytest.mark.parametrize(("make", "plain"), [(FusedAdam, torch.optim.AdamW), (FusedSGD, torch.optim.SGD)])
@pytest.mark.parametrize("lr", [np.array(0.1), np.array(1), np.float32(0.1)], ids=repr)
def test_a_number_of_numpy_counts_as_it_is_at_each_step(make: Any, plain: Any, lr: Any) -> None:
    ours, theirs, lr = parameters(), parameters(), copy.copy(lr)
    optimizers = [o(params, lr=lr, weight_decay=0.0) for o, params in ((make, ours), (plain, theirs))]
    for factor in (1, 2):
        if isinstance(lr, np.ndarray):
            lr *= factor
        for optimizer in optimizers:
            train(optimizer, 2)
    assert_close(ours, theirs)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        make(parameters(), lr=np.array(-1.0))


def test_named_parameters() -> None:
    optimizers = []
    for make in (FusedAdam, torch.optim.AdamW):
        optimizer = make([(f"p{i}", p) for i, p in enumerate(parameters())])
        train(optimizer, 2)
        optimizers.append(optimizer)
    ours, theirs = optimizers
    assert ours.param_groups[0]["param_names"] == theirs.param_groups[0]["param_names"]
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert_same_state(ours, theirs)


def test_schedule_of_a_learning_rate_in_a_tensor() -> None:
    ours, theirs = parameters(), parameters()
    for params, make in ((ours, FusedAdam), (theirs, torch.optim.AdamW)):
        optimizer = make(params, lr=torch.tensor(0.1), fused=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(4):
            train(optimizer, 1)
            schedule.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 / 16)
    assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("saved", "loaded", "lacking"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), FusedAdam, "betas, eps"),
        (torch.optim.RMSprop, FusedAdam, "betas"),
        (torch.optim.AdamW, FusedSGD, "momentum, dampening"),
        (torch.optim.Adagrad, FusedLamb, "betas"),
    ],
    ids=["sgd-adam", "rmsprop-adam", "adamw-sgd", "adagrad-lamb"],
)
def test_the_state_of_another_optimizer_is_refused(
    saved: Callable[..., Any], loaded: Callable[..., Any], lacking: str
) -> None:
    """PyTorch's own raise a KeyError, at their next step."""
    other, optimizer = saved(parameters()), loaded(parameters())
    train(other, 1)
    train(optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"group 0 of the state is not one of {loaded.__name__}: it lacks {lacking}$"):
        optimizer.load_state_dict(other.state_dict())
    assert str(optimizer.state_dict()) == str(before)
    train(optimizer, 1)


@pytest.mark.parametrize("n", range(6))
def test_arguments_go_by_position_as_in_pytorch(n: int) -> None:
    given = (1e-2, (0.8, 0.9), 1e-6, 0.3, True)[:n]
    ours, theirs = parameters(), parameters()
    train(FusedAdam(ours, *given), 3)
    train(torch.optim.AdamW(theirs, *given), 3)
    assert_close(ours, theirs)


def test_the_order_of_onnxruntime_is_refused() -> None:
    """Where the third argument is bias_correction."""
    for given in ((True,), (True, (0.9, 0.999)), (True, (0.9, 0.999), 1e-6, L2)):
        with pytest.raises(TypeError, match=r"(betas|epsilon value) must be (two|a) number"):
            FusedAdam(parameters(), 1e-3, *given)  # type: ignore[arg-type]


def test_sparse_gradients_are_refused_in_the_words_of_pytorch() -> None:
    p = torch.zeros(4, 2, requires_grad=True)
    p.grad = torch.eye(4, 2).to_sparse()
    errors = []
    for optimizer in (FusedAdam([p]), torch.optim.Adam([p])):
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("p", "what"),
    [
        (torch.zeros(2, 3, dtype=torch.complex64), "is complex"),
        (torch.zeros(2, 3, device="meta"), "is on meta"),
    ],
    ids=["complex", "meta"],
)
def test_parameters_without_kernels_are_named(p: Tensor, what: str) -> None:
    p.requires_grad_().grad = torch.zeros_like(p)
    optimizer = FusedAdam([{"params": parameters()}, {"params": [torch.zeros(1, requires_grad=True), p]}])
    with pytest.raises(ValueError, match=rf"FusedAdam .* parameter 1 of group 1, of shape \(2, 3\), {what}"):
        optimizer.step()


def test_gradient_of_another_dtype_is_refused() -> None:
    with pytest.raises((TypeError, RuntimeError)):
        p = torch.zeros(2, requires_grad=True)
        p.grad = torch.zeros(2, dtype=torch.float64)
        FusedAdam([p]).step()


def test_closure_hooks_and_schedule() -> None:
    ours, theirs = parameters(), parameters()
    logs: list[list[str]] = [[], []]
    for params, log, optimizer in (
        (ours, logs[0], FusedAdam(ours, lr=0.1)),
        (theirs, logs[1], torch.optim.AdamW(theirs, lr=0.1, fused=True)),
    ):
        optimizer.register_step_pre_hook(lambda *_, log=log: log.append("before"))
        optimizer.register_step_post_hook(lambda *_, log=log: log.append("after"))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=9)

        def closure(params: list[Tensor] = params, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = sum((p**2).sum() for p in params)
            loss.backward()
            return loss

        for _ in range(6):
            log.append(f"{optimizer.step(closure).item():.4f}")
            schedule.step()
    assert logs[0] == logs[1] and logs[0][1] == "after"
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("none", [True, False])
def test_zero_grad(none: bool) -> None:
    params = parameters()
    optimizer = FusedAdam(params, set_grad_none=none)
    give_gradients(params, seed=0)
    optimizer.zero_grad()
    assert all((p.grad is None) if none else not p.grad.any() for p in params)
    give_gradients(params, seed=0)
    optimizer.zero_grad(set_to_none=not none)
    assert all((p.grad is None) is not none for p in params)
