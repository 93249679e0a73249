"""Parameters of 16 bits: masters in 32, rounding at random, and neither."""

import copy
import itertools

import pytest
import torch

from beside import HALVES, assert_equal, give_gradients, parameters, train
from ortmodule_c import _C
from ortmodule_c.optim import FusedAdam, FusedSGD

OPTIMIZERS = [lambda p, **o: FusedAdam(p, lr=1e-2, **o), lambda p, **o: FusedSGD(p, lr=1e-2, momentum=0.9, **o)]
NAMES = ["FusedAdam", "FusedSGD"]
of_each = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
of_halves = pytest.mark.parametrize("dtype", HALVES, ids=str)


@of_halves
@of_each
def test_masters_are_trained_as_if_they_were_the_parameters(optimizer, dtype: torch.dtype) -> None:
    ours, wide = parameters(dtype), [p.detach().float().requires_grad_() for p in parameters(dtype)]
    a, b = optimizer(ours, master_weights=True), optimizer(wide)
    for step in range(10):
        give_gradients(ours, seed=step)
        for p, q in zip(ours, wide, strict=True):
            q.grad = p.grad.float()
        a.step(), b.step()
    assert_equal([a.state[p]["master"] for p in ours], wide)
    assert_equal(ours, [q.to(dtype) for q in wide])
    for p, q in zip(ours, wide, strict=True):
        for name, state in b.state[q].items():
            assert_equal([a.state[p][name]], [state])


@of_halves
def test_a_parameter_that_others_have_changed_counts(dtype: torch.dtype) -> None:
    p = torch.ones(1000, dtype=dtype, requires_grad=True)
    optimizer = FusedSGD([p], lr=1e-4, master_weights=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p, torch.ones_like(p))  # too small a step for 16 bits, kept by the master
    with torch.no_grad():
        p[::2] = 3
    optimizer.step()
    expected = torch.tensor([3 - 1e-4, 1 - 2e-4]).repeat(500)
    torch.testing.assert_close(optimizer.state[p]["master"], expected, rtol=0, atol=3e-7)


@of_halves
@of_each
@pytest.mark.parametrize("mode", ["master_weights", "stochastic_rounding"])
def test_wide_states_survive_saving(mode: str, optimizer, dtype: torch.dtype) -> None:
    ours = parameters(dtype)
    a = optimizer(ours, **{mode: True})
    train(a, 3)
    twins = [p.detach().clone().requires_grad_() for p in ours]
    b = optimizer(twins, **{mode: True})
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    names = {name for p in ours for name in a.state[p]} - {"step"}
    assert ("master" in names) is (mode == "master_weights")
    assert all(b.state[q][name].dtype == torch.float32 for q in twins for name in names)
    for o in (a, b):
        torch.manual_seed(5)
        train(o, 3, seed=9)
    assert_equal(ours, twins)


@of_halves
def test_states_of_16_bits_are_widened_and_wide_ones_rounded(dtype: torch.dtype) -> None:
    theirs = parameters(dtype)
    plain = torch.optim.AdamW(theirs, fused=True)
    train(plain, 3)
    ours = [p.detach().clone().requires_grad_() for p in theirs]
    wide = FusedAdam(ours, master_weights=True)
    wide.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(wide, 1, seed=8)
    assert wide.state[ours[0]]["exp_avg"].dtype == torch.float32
    narrow = FusedAdam(ours)
    narrow.load_state_dict({**copy.deepcopy(wide.state_dict()), "param_groups": narrow.state_dict()["param_groups"]})
    train(narrow, 1, seed=9)
    assert narrow.state[ours[0]]["exp_avg"].dtype == dtype
    plain.load_state_dict(copy.deepcopy(wide.state_dict()))
    train(plain, 1, seed=9)


def neighbours(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the dtype that enclose x."""
    near = x.to(dtype)
    away = torch.nextafter(near, torch.where(near.float() > x, -torch.inf, torch.inf).to(dtype))
    near, away = near.float(), torch.where(near.float() == x, near, away).float()
    return torch.minimum(near, away), torch.maximum(near, away)


# The step is the gradient, so that the parameter becomes value - step before it is rounded.
VALUES = [1.0, -1.0, 1.5e-3, 300.0, 0.0, 3e-5, -2e-6, 1e-7]


@of_halves
@pytest.mark.parametrize("isa", _C.isas())
def test_rounding_at_random_is_right_on_average(isa: str, dtype: torch.dtype) -> None:
    repeats, draws = 512, 64
    start = torch.tensor(VALUES).to(dtype)
    step = (start.float().abs() * 3e-4 + 1e-8).to(dtype)
    exact = start.float() - step.float()
    low, high = neighbours(exact, dtype)
    total = torch.zeros(len(VALUES), dtype=torch.float64)
    _C.set_isa(isa)
    try:
        for seed in range(draws):
            torch.manual_seed(seed)
            p = start.repeat(repeats).requires_grad_()
            p.grad = step.repeat(repeats)
            FusedSGD([p], lr=1.0, stochastic_rounding=True).step()
            got = p.detach().float().view(repeats, -1)
            assert ((got == low) | (got == high)).all()
            total += got.double().sum(0)
    finally:
        _C.set_isa(None)
    mean, gap = total / (repeats * draws), (high - low).double()
    share = ((exact.double() - low) / gap.clamp(min=1e-30)).clamp(0, 1)
    deviation = gap * (share * (1 - share) / (repeats * draws)).sqrt()
    assert ((mean - exact.double()).abs() <= 5 * deviation + gap * 2.0**-13).all(), (mean - exact.double()) / gap


@of_halves
@of_each
def test_rounding_at_random_depends_on_the_generator_alone(optimizer, dtype: torch.dtype) -> None:
    shapes = [(70000,), (3,), (129, 257)]
    threads, results = torch.get_num_threads(), []
    try:
        for n, seed in ((1, 0), (2, 0), (3, 0), (2, 1)):
            torch.set_num_threads(n)
            params = parameters(dtype, shapes)
            torch.manual_seed(seed)
            train(optimizer(params, stochastic_rounding=True), 2)
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    for params in results[1:3]:
        assert_equal(params, results[0])
    assert not torch.equal(results[3][0], results[0][0])


@of_halves
def test_steps_and_tensors_draw_numbers_of_their_own(dtype: torch.dtype) -> None:
    params = [torch.ones(4096, dtype=dtype, requires_grad=True) for _ in range(2)]
    optimizer = FusedSGD(params, lr=1.0, stochastic_rounding=True)
    signs = []
    for _ in range(2):
        for p in params:
            p.detach().fill_(1)
            p.grad = torch.full_like(p, float(torch.finfo(dtype).eps) / 4)
        optimizer.step()
        signs += [p.detach() < 1 for p in params]
    for a, b in itertools.combinations(signs, 2):
        assert 0.4 < (a == b).float().mean() < 0.6


@of_halves
def test_infinities_and_nan_are_not_rounded(dtype: torch.dtype) -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    p = values.to(dtype).requires_grad_()
    p.grad = torch.zeros_like(p)
    FusedSGD([p], lr=1.0, stochastic_rounding=True).step()
    torch.testing.assert_close(p.detach().float(), values, equal_nan=True, rtol=0, atol=0)


def test_small_steps_add_up() -> None:
    """Steps of a tenth of an epsilon: lost by rounding to nearest, kept on average and by masters."""
    ends = {}
    for mode in ({}, {"stochastic_rounding": True}, {"master_weights": True}):
        p = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
        optimizer = FusedSGD([p], lr=1.0, **mode)
        p.grad = torch.full_like(p, 2.0**-12)
        for _ in range(512):
            optimizer.step()
        ends[str(mode)] = float(p.detach().float().mean())
    assert list(ends.values()) == [1.0, pytest.approx(0.875, abs=2e-3), 0.875]


def test_parameters_of_32_bits_take_no_part() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = FusedAdam(ours, master_weights=True)
    train(optimizer, 2)
    train(FusedAdam(theirs, stochastic_rounding=True), 2)
    assert_equal(ours, theirs)
    assert "master" not in optimizer.state[ours[0]]


def test_dtypes_in_one_group() -> None:
    """What each is, is what it is alone."""
    together = [p for dtype in (torch.float32, torch.bfloat16, torch.float64) for p in parameters(dtype)]
    alone = [p.detach().clone().requires_grad_() for p in together]
    a, b = FusedAdam(together), [FusedAdam([p]) for p in alone]
    for step in range(3):
        give_gradients(together, alone, seed=step)
        a.step()
        for o in b:
            o.step()
    assert_equal(together, alone)


@of_halves
def test_rounding_at_random_stays_within_the_range(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    p = torch.full((4096,), largest, dtype=dtype, requires_grad=True)
    p.grad = torch.full_like(p, -1.0)
    FusedSGD([p], lr=largest * 2.0**-12, stochastic_rounding=True).step()
    assert bool((p == largest).all())
