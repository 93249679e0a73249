"""A backward that has begun, as Python sees it: gradients in any order, each once, and what it refuses."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from ortmodule_c import _C

LAYERS = 4
TEXT = "".join(f"input %w{i} : f32[8,8] grad\n" for i in range(LAYERS))
TEXT += "input %x : f32[8,8]\n%h0 = Tanh(%x)\n"
TEXT += "".join(f"%p{i} = MatMul(%h{i}, %w{i})\n%h{i + 1} = Tanh(%p{i})\n" for i in range(LAYERS))
TEXT += f"return %h{LAYERS}\n"

Step = tuple[_C.Plan, _C.Run, list[Tensor], list[Tensor], list[Tensor | None]]


def step(**options: bool) -> Step:
    """A plan, a run of it, what it was given and gave, and its gradients."""
    torch.manual_seed(0)
    given = [torch.randn(8, 8) for _ in range(LAYERS + 1)]
    plan = _C.Session(TEXT, {}).plan(given, [*[True] * LAYERS, False], [True], **options)
    outputs, run = plan.forward(given, 0)
    expected = plan.backward(run, given, outputs, [torch.ones(8, 8)])
    outputs, run = plan.forward(given, 0)
    return plan, run, given, outputs, expected


def test_the_last_layer_comes_first() -> None:
    plan, _, _, _, _ = step()
    inputs, gradients, outputs, douts = plan.uses(0)
    assert gradients[:LAYERS] == sorted(gradients[:LAYERS], reverse=True)
    assert plan.n_forward < min(gradients[:LAYERS]) and max(gradients) <= plan.n_steps
    assert all(read <= done for read, done in zip(inputs, gradients, strict=True)) and inputs[0] == 0 < inputs[1]
    assert [plan.n_forward < end <= plan.n_steps for end in (*outputs, *douts)] == [True, True]
    with pytest.raises(ValueError, match="backward 1 of a plan with 1"):
        plan.uses(1)


@pytest.mark.parametrize("order", [[[3], [2], [1], [0]], [[0], [3], [1, 2]], [[3, 1], [4, 2], [0]], [[0, 1, 2, 3]]])
def test_gradients_in_any_order(order: list[list[int]]) -> None:
    plan, run, given, outputs, expected = step()
    backward = plan.begin(run, given, outputs, [torch.ones(8, 8)])
    for some in order:
        for i, grad in zip(some, backward.take(some), strict=True):
            assert grad is expected[i] is None if i == LAYERS else torch.equal(grad, expected[i])
    assert backward.take([0, 3]) == [None, None]  # they are gone
    backward.end()


def test_what_is_taken_is_nobody_elses() -> None:
    plan, run, given, outputs, expected = step()
    backward = plan.begin(run, given, outputs, [torch.ones(8, 8)])
    for i in (3, 2, 1, 0):
        [grad] = backward.take([i])
        assert grad is not None and torch.equal(grad, expected[i])
        for t in (grad, given[i]):
            t.fill_(torch.nan)


def test_it_holds_what_it_reads_until_it_ends() -> None:
    plan, run, given, outputs, expected = step()
    before = _C.pool_stats()["used_bytes"]
    backward = plan.begin(run, given, outputs, [torch.ones(8, 8)])
    del run, outputs, given
    gc.collect()
    [last] = backward.take([3])
    [first] = backward.take([0])
    assert torch.equal(last, expected[3]) and torch.equal(first, expected[0])
    backward.end()
    backward.end()
    with pytest.raises(ValueError, match="this backward has ended"):
        backward.take([1])
    del backward
    gc.collect()
    assert _C.pool_stats()["used_bytes"] < before


@pytest.mark.parametrize("retain_graph", [False, True])
def test_one_that_is_given_up(retain_graph: bool) -> None:
    plan, run, given, outputs, expected = step(retain_graph=retain_graph)
    douts = [torch.ones(8, 8)]
    plan.begin(run, given, outputs, douts)  # nothing has run
    backward = plan.begin(run, given, outputs, douts, keep=True)
    backward.take([3])
    assert torch.equal(plan.backward(run, given, outputs, douts, keep=True)[0], expected[0])
    assert torch.equal(backward.take([0])[0], expected[0])
    del backward
    backward = plan.begin(run, given, outputs, douts)
    backward.take([3])
    del backward
    if retain_graph:
        assert torch.equal(plan.backward(run, given, outputs, douts)[0], expected[0])
    else:
        with pytest.raises(RuntimeError, match="backward ran already"):
            plan.backward(run, given, outputs, douts)


def test_what_it_refuses() -> None:
    plan, run, given, outputs, _ = step()
    douts = [torch.ones(8, 8)]
    with pytest.raises(TypeError, match="run: expected what forward gave"):
        plan.begin(None, given, outputs, douts)
    with pytest.raises(ValueError, match="input: expected 5 tensors, got 4"):
        plan.begin(run, given[:4], outputs, douts)
    other = step()[0]
    with pytest.raises(ValueError, match="belongs to another plan"):
        other.begin(run, given, outputs, douts)
    backward = plan.begin(run, given, outputs, douts)
    with pytest.raises(ValueError, match="there is no 5 among 5"):
        backward.take([0, 5])
    with pytest.raises(TypeError):
        backward.take(["0"])
    with pytest.raises(OverflowError):
        backward.take([-1])
    assert backward.take([0])[0] is not None
