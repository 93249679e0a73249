"""Recurrent layers run in C, forward and backward, as PyTorch computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule, verify
from wrapped import Function, close, float_sum, pair

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True},
    "two layers, both ways, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without bias": {"bias": False, "batch_first": True},
}
# Of 16 bits PyTorch rounds between the parts of a step, which all that follow it are computed from.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def states_for(layer: nn.RNNBase, batch: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """A random state for each layer and direction; two for an LSTM."""
    shape = (layer.num_layers * (2 if layer.bidirectional else 1), *batch, layer.hidden_size)
    h, c = (torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2))
    return (h, c) if isinstance(layer, nn.LSTM) else h


def leaves(values: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, Tensor)]


def assert_same(
    module: nn.Module, *args: Any, wanted: Callable[[Any], Any] = lambda results: results, rtol: float | None = None
) -> ORTModule:
    """Results, and the gradients of those wanted for all parameters and arguments; everything runs in C."""
    eager, ours = pair(module)
    found = []
    for m in (eager, ours):
        given = copy.deepcopy(args)
        results = m(*given)
        float_sum(wanted(results)).backward()
        found.append((leaves(results), [t.grad for t in [*m.parameters(), *leaves(given)]]))
    rtol = rtol or TOLERANCES[found[0][0][0].dtype]
    for what, want, got in zip(("results", "gradients"), *found, strict=True):
        close(got, want, what, rtol)
    assert not ours.fallback_report()
    return ours


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_pytorchs(kind: str, options: str, given: bool) -> None:
    layer = KINDS[kind](6, 19, **OPTIONS[options])
    shape = (3, 5, 6) if layer.batch_first else (5, 3, 6)
    assert_same(layer, torch.randn(shape, requires_grad=True), *([states_for(layer, (3,))] if given else []))


# Steps, batch, inputs and hidden units: that coincide, of one element, past a panel, of several parts of the batch.
SIZES = [(3, 3, 3, 3), (1, 1, 1, 1), (7, 1, 4, 70), (2, 130, 5, 4), (4, 0, 3, 5), (3, 2, 0, 4)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_any_sizes(kind: str, sizes: tuple[int, ...]) -> None:
    steps, batch, inputs, hidden = sizes
    layer = KINDS[kind](inputs, hidden, bidirectional=True)
    assert_same(layer, torch.randn(steps, batch, inputs, requires_grad=True), states_for(layer, (batch,)))


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_without_a_batch(kind: str) -> None:
    layer = KINDS[kind](6, 5, 2, batch_first=True)
    assert_same(layer, torch.randn(4, 6, requires_grad=True), states_for(layer, ()))
    assert_same(layer, torch.randn(4, 6))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["output", "h", "c"])
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_a_loss_may_read_one_of_the_results(kind: str, which: int) -> None:
    layer = KINDS[kind](6, 5, 2)
    if kind != "lstm" and which == 2:
        pytest.skip("only an LSTM has c")
    arguments = torch.randn(4, 3, 6, requires_grad=True), states_for(layer, (3,))
    assert_same(layer, *arguments, wanted=lambda results: leaves(results)[which])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_another_dtype(kind: str, dtype: torch.dtype) -> None:
    layer = KINDS[kind](6, 19, 2, bidirectional=True).to(dtype)
    x = torch.randn(5, 3, 6, dtype=dtype, requires_grad=True)
    assert_same(layer, x, states_for(layer, (3,), dtype), rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_under_autocast_has_the_dtypes_of_eager(kind: str, given: bool) -> None:
    """An LSTM's results are of bfloat16 as an RNN's are, a GRU's of float32."""
    layer = KINDS[kind](6, 19, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(
            Function(lambda m, x, *states: m.layer(x * 1, *states), layer=layer),
            torch.randn(5, 3, 6, requires_grad=True),
            *([states_for(layer, (3,))] if given else []),
            rtol=TOLERANCES[torch.bfloat16],
        )


@pytest.mark.parametrize("value", [100.0, -100.0, torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_saturate_or_are_not_finite(kind: str, value: float) -> None:
    layer = KINDS[kind](4, 5)
    x = torch.randn(4, 3, 4)
    x[1, 0, 2] = value
    eager, ours = pair(layer)
    close(leaves(ours(x)), leaves(eager(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_change_a_bit(kind: str, dtype: torch.dtype) -> None:
    layer = KINDS[kind](40, 150).to(dtype)
    ours = ORTModule(layer)
    x = torch.randn(6, 70, 40, dtype=dtype, requires_grad=True)
    found, threads = [], torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            ours.zero_grad()
            x.grad = None
            results = leaves(ours(x))
            float_sum(results).backward()
            found.append([*results, x.grad, *[p.grad for p in ours.parameters()]])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_keeps_what_its_masks_say(kind: str) -> None:
    layer = KINDS[kind](6, 8, 3, dropout=0.4, bidirectional=True)
    assert verify(layer, torch.randn(5, 3, 6)).ok
    layer.eval()
    assert_same(layer, torch.randn(5, 3, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_shared_or_frozen(kind: str) -> None:
    layer = KINDS[kind](5, 5, 2)
    layer.weight_hh_l1 = layer.weight_hh_l0
    layer.weight_ih_l0.requires_grad_(False)
    layer.bias_hh_l0.requires_grad_(False)
    module = Function(lambda m, x: m.layer(m.layer(x)[0]), layer=layer)
    assert_same(module, torch.randn(4, 3, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_several_backwards(kind: str) -> None:
    layer = KINDS[kind](6, 5, 2)
    eager, ours = pair(layer)
    x = torch.randn(4, 3, 6)
    for m in (eager, ours):
        output, states = m(x)
        output.sum().backward(retain_graph=True)
        float_sum((output, states)).backward(retain_graph=True)
        float_sum(states).backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        close(q.grad, p.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_without_gradients(kind: str) -> None:
    layer = KINDS[kind](6, 5, 2, dropout=0.5).eval()
    eager, ours = pair(layer)
    with torch.no_grad():
        close(leaves(ours(torch.ones(4, 3, 6))), leaves(eager(torch.ones(4, 3, 6))))
    assert not ours.fallback_report()


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_projections_run_in_pytorch() -> None:
    eager, ours = pair(nn.LSTM(6, 5, proj_size=3))
    x = torch.randn(4, 3, 6)
    close(leaves(ours(x)), leaves(eager(x)))
    (record,) = ours.fallback_report()
    assert record.name == "aten.lstm.input" and "projections" in record.cause


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_steps_is_pytorchs_error(kind: str) -> None:
    eager, ours = pair(KINDS[kind](6, 5))
    ours(torch.randn(3, 2, 6))
    with pytest.raises(RuntimeError) as want:
        eager(torch.randn(0, 2, 6))
    with pytest.raises(RuntimeError) as got:
        ours(torch.randn(0, 2, 6))
    assert str(got.value) == str(want.value)
