"""However tensors lie in memory, whoever shares it, and how many threads there are."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from beside import FLOATS, assert_close, assert_equal, assert_same_state, give_gradients, parameters, train
from ortmodule_c.optim import FusedAdam, FusedLamb, FusedSGD, clip_grad_norm_
from ortmodule_c.optim.fused import FusedOptimizer, Rows


def like(layout: Callable[[Tensor], Tensor]) -> Tensor:
    g = torch.Generator().manual_seed(3)
    return layout(torch.randn(4, 6, 5, 7, generator=g))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3),
    "permuted": lambda t: t.permute(2, 0, 3, 1),
    "gaps": lambda t: t[:, ::2],
    "offset": lambda t: t[1:],
    "dims of 1": lambda t: t[:1, :, :1].transpose(0, 1),
    "no elements": lambda t: t[:0],
}


@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_parameter", LAYOUTS)
def test_layouts(of_parameter: str, of_gradient: str) -> None:
    ours = like(LAYOUTS[of_parameter]).detach().requires_grad_()
    theirs = ours.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    around = ours.untyped_storage().nbytes() // 4
    whole = torch.as_strided(ours.detach(), (around,), (1,), 0)
    before = whole.clone()
    optimizers = FusedAdam([ours]), torch.optim.AdamW([theirs], fused=True)
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        values = torch.randn(theirs.shape, generator=g)
        room = LAYOUTS[of_gradient](torch.empty(4, 6, 5, 7))
        if room.shape != values.shape:
            room = torch.empty(values.shape[::-1]).permute(*range(3, -1, -1))
        ours.grad, theirs.grad = room.copy_(values), values
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert optimizers[0].state[ours]["exp_avg"].stride() == torch.zeros_like(ours).stride()
    touched = torch.zeros(around, dtype=torch.bool)
    torch.as_strided(touched, ours.shape, ours.stride(), ours.storage_offset()).fill_(True)
    assert torch.equal(whole[~touched], before[~touched])


def test_parameters_in_one_buffer() -> None:
    buffer = torch.randn(1000)
    ours = [buffer[:300].view(30, 10).requires_grad_(), buffer[300:999].requires_grad_()]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    train(FusedAdam(ours), 3)
    train(torch.optim.AdamW(theirs, fused=True), 3)
    assert_close(ours, theirs)


def test_parameters_that_overlap_are_updated_one_after_the_other() -> None:
    def overlapping() -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        buffer = torch.randn(1 << 17, generator=g)
        return [buffer.detach()[i * 16 :].requires_grad_() for i in range(4)]

    ours, theirs = overlapping(), overlapping()
    train(FusedAdam(ours), 2)
    train(torch.optim.AdamW(theirs, fused=True), 2)
    assert_close(ours, theirs)


SHARING: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "a transposed one": lambda w: [w, w.t()],
    "transposed first": lambda w: [w.t(), w],
    "columns": lambda w: [w[:, :3], w[:, 2:5], w[:, 1:6]],
    "columns and all": lambda w: [w[:, :3], w, w[:, 2:4]],
    "others between": lambda w: [w[:, :3], torch.ones(3), w[:, 2:5], torch.ones(2, 2)],
    "columns apart": lambda w: [w[:, :3], w[:, 3:]],
    "halves of memory": lambda w: [w[:2].t(), w[2:].t()],
}


def sharing(of: Callable[[Tensor], list[Tensor]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters in the same memory, some of which lie otherwise than their gradients will."""
    w = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [t.detach().requires_grad_() for t in of(w)]


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (FusedAdam, torch.optim.AdamW),
        (lambda p: FusedSGD(p, momentum=0.9), lambda p, **how: torch.optim.SGD(p, momentum=0.9, **how)),
    ],
    ids=["adam", "sgd"],
)
@pytest.mark.parametrize("of", SHARING.values(), ids=SHARING)
def test_memory_that_is_shared_and_copied_gets_all_updates(
    of: Callable[[Tensor], list[Tensor]], make: Callable[..., Optimizer], plain: Callable[..., Optimizer]
) -> None:
    ours, theirs = sharing(of), sharing(of)
    a, b = make(ours), plain(theirs, foreach=False)
    train(a, 3), train(b, 3)
    assert_close(ours, theirs)
    assert_same_state(a, b)


def test_lamb_takes_the_length_of_what_shared_memory_has_become() -> None:
    ours, theirs = sharing(SHARING["columns"]), sharing(SHARING["columns"])
    train(FusedLamb(ours, max_grad_norm=None), 1)
    give_gradients(theirs, seed=1)
    for p in theirs:
        FusedLamb([p], max_grad_norm=None).step()
    assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [None, 4.0])
def test_gradients_of_shared_memory_are_clipped_by_the_norm_of_all(scale: float | None, dtype: torch.dtype) -> None:
    ours, theirs = sharing(SHARING["columns and all"], dtype), sharing(SHARING["columns and all"], dtype)
    a, b = FusedSGD(ours, lr=0.5, max_grad_norm=1.0), torch.optim.SGD(theirs, lr=0.5, foreach=False)
    give_gradients(theirs, seed=0)
    give_gradients(ours, seed=0, scale=scale or 1.0)
    if scale is not None:
        a.grad_scale, a.found_inf = torch.tensor(scale), torch.tensor(0.0)
    a.step()
    assert_close([p.grad for p in ours], [p.grad for p in theirs])  # divided, not clipped
    norm = nn.utils.clip_grad_norm_(theirs, 1.0)
    b.step()
    assert_close(ours, theirs)
    assert a.grad_norm == pytest.approx(norm.item())


@pytest.mark.parametrize(("of", "parts"), [("columns and all", 3), ("others between", 2), ("halves of memory", 1)])
def test_only_shared_memory_needs_more_than_one_step(of: str, parts: int) -> None:
    params = sharing(SHARING[of])
    give_gradients(params, seed=0)
    prepared: dict[torch.device, Rows] = {}
    FusedAdam(params)._prepare(prepared, False)
    (rows,) = prepared.values()
    assert rows.scattered and [row for part in rows.parts() for row in part] == rows.rows
    assert len(rows.parts()) == parts


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    shapes = [(70000,), (3,), (300, 257), (16384,), (1, 40000)]
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 5):
            torch.set_num_threads(n)
            params = parameters(dtype, shapes)
            optimizer = FusedAdam(params, max_grad_norm=1.0)
            train(optimizer, 3)
            results.append((params, optimizer.grad_norm))
    finally:
        torch.set_num_threads(threads)
    for params, norm in results[1:]:
        assert_equal(params, results[0][0])
        assert norm == results[0][1]


def test_autograd_notices() -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = FusedAdam([p])
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert p._version == 1 and optimizer.state[p]["exp_avg"]._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_without_gradients_are_left_out() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    give_gradients(params[:2], seed=0)
    optimizer.step()
    assert set(optimizer.state) == set(params[:2])
    assert_equal(params[2:], before[2:])
    assert [p._version for p in params] == [1, 1] + [0] * (len(params) - 2)


def test_under_inference_mode_and_without_gradients() -> None:
    ours, theirs = parameters(), parameters()
    for params, optimizer in ((ours, FusedAdam(ours)), (theirs, torch.optim.AdamW(theirs, fused=True))):
        give_gradients(params, seed=0)
        with torch.no_grad():
            optimizer.step()
        with torch.inference_mode():
            optimizer.step()
    assert_close(ours, theirs)


def test_gradients_that_are_negated_when_they_are_read() -> None:
    ours, theirs = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    ours.grad = torch.randn(8, dtype=torch.complex64).conj().imag
    theirs.grad = ours.grad.clone()
    assert ours.grad.is_neg()
    norm = clip_grad_norm_(ours, 0.5, foreach=False)  # which PyTorch has for them
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    a, b = FusedAdam([ours]), torch.optim.AdamW([theirs], fused=True)
    for optimizer in (a, b):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    a.step(), b.step()
    assert_close([ours, ours.grad], [theirs, theirs.grad])


def test_infinities_and_nan_go_where_they_go_in_pytorch() -> None:
    values = torch.tensor([0.0, -0.0, 1e-45, 1e38, torch.inf, -torch.inf, torch.nan, 1e-20])
    ours, theirs = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
    optimizers = FusedAdam([ours], amsgrad=True), torch.optim.AdamW([theirs], fused=True, amsgrad=True)
    for row in (values, values.flip(0)):
        ours.grad, theirs.grad = row.expand(8, 8).clone(), row.expand(8, 8).clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "make",
    [
        lambda params: FusedAdam([{"params": params[:3], "amsgrad": True}, {"params": params[3:]}]),
        lambda params: FusedAdam(params, master_weights=True),
        lambda params: FusedAdam(params, stochastic_rounding=True),
        FusedLamb,
        FusedSGD,
        lambda params: FusedSGD(params, momentum=0.9),
    ],
)
def test_a_step_that_has_nothing_to_prepare_takes_the_same_rows(
    make: Callable[[list[Tensor]], FusedOptimizer], dtype: torch.dtype
) -> None:
    params = [*parameters(dtype), torch.ones(3, requires_grad=True)]  # the last has no gradient
    optimizer = make(params)
    give_gradients(params[:-1], seed=0)
    optimizer.step()
    optimizer.state = defaultdict(dict, reversed(optimizer.state.items()))
    for writes_grad in (False, True):
        prepared: dict[torch.device, Rows] = {}
        gathered: dict[torch.device, Rows] = {}
        optimizer._prepare(prepared, writes_grad)
        assert optimizer._gather(gathered, writes_grad)
        ((device, expected),) = prepared.items()
        rows = gathered[device]
        assert rows.rows == expected.rows and rows.rounds == expected.rounds  # of the same tensors
        assert Counter(map(id, rows.changed)) == Counter(map(id, expected.changed))


class Subclass(nn.Parameter):
    pass


def set_state(optimizer: FusedAdam, p: Tensor, name: str, value: Tensor) -> None:
    optimizer.state[p][name] = value


@pytest.mark.parametrize(
    "change",
    [
        lambda _, p: setattr(p, "grad", torch.zeros(2, 2).t()),
        lambda _, p: setattr(p, "grad", p.grad.to_sparse()),
        lambda o, p: o.state[p].pop("exp_avg"),
        lambda o, p: set_state(o, p, "exp_avg", o.state[p]["exp_avg"].double()),
        lambda o, p: set_state(o, p, "exp_avg", o.state[p]["exp_avg"].t()),
        lambda o, p: o.state.pop(p),
        lambda o, _: o.param_groups[0].update(amsgrad=True),
        lambda o, _: o.add_param_group({"params": [Subclass(torch.ones(2))]}),
        lambda o, _: o.param_groups[0].update(params=tuple(o.param_groups[0]["params"])),
        lambda _, p: setattr(p, "grad", torch._neg_view(p.grad)),
    ],
)
def test_what_is_not_as_the_core_takes_it_is_prepared(change: Callable[[FusedAdam, Tensor], Any]) -> None:
    p = torch.ones(2, 2, requires_grad=True)
    optimizer = FusedAdam([p])
    give_gradients([p], seed=0)
    optimizer.step()
    assert optimizer._gather({}, False)
    change(optimizer, p)
    assert not optimizer._gather({}, False)


def test_a_single_element_that_is_negated_is_prepared() -> None:
    p = torch.ones(1, requires_grad=True)
    optimizer = FusedAdam([p])
    give_gradients([p], seed=0)
    optimizer.step()
    p.grad = torch.tensor([1 + 2j]).conj().imag
    assert p.grad.is_neg() and p.grad.is_contiguous() and not optimizer._gather({}, False)
