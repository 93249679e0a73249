"""Recurrent layers run in C, forward and backward, as PyTorch computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree

from ortmodule_c import ORTModule, ORTModuleError, verify
from wrapped import BFLOAT16, Function, assert_same_step, close, float_sum, pair, skip_without_onednns_bfloat16

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
SMOOTH = ("lstm", "gru", "tanh")  # of relu a sum that is rounded may come to lie beyond 0
OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True},
    "two layers, both ways, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without bias": {"bias": False, "batch_first": True},
}
STEPS = 4  # of a type of 16 bits, at the largest number of a tensor


def states_for(layer: nn.RNNBase, batch: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """A random state for each layer and direction; two for an LSTM."""
    shape = (layer.num_layers * (2 if layer.bidirectional else 1), *batch, layer.hidden_size)
    h, c = (torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2))
    return (h, c) if isinstance(layer, nn.LSTM) else h


def leaves(values: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


def found(module: nn.Module, args: Any, wanted: Callable[[Any], Any] = lambda results: results) -> list[Tensor]:
    """Results, and the gradients of those wanted for all parameters and arguments."""
    given = copy.deepcopy(args)
    results = module(*given)
    float_sum(wanted(results)).backward()
    return [*leaves(results), *[t.grad for t in [*module.parameters(), *leaves(given)]]]


def assert_same(module: nn.Module, *args: Any, wanted: Callable[[Any], Any] = lambda results: results) -> None:
    """Everything runs in C."""
    eager, ours = pair(module)
    close(found(ours, args, wanted), found(eager, args, wanted))
    assert not ours.fallback_report()


def assert_near(module: nn.Module, *args: Any, dtype: torch.dtype) -> None:
    """As near as 16 bits are to the same in float64, with the dtypes of eager."""
    exactly = [copy.deepcopy(a).double().detach().requires_grad_() for a in leaves(args)]
    eager, ours = pair(module)
    exact = pytree.tree_unflatten(exactly, pytree.tree_flatten(args)[1])
    with torch.autocast("cpu", enabled=False):
        want = found(copy.deepcopy(module).double(), exact)
    for got, like, true in zip(found(ours, args), found(eager, args), want, strict=True):
        assert got.dtype is like.dtype
        assert float((got - true).abs().max()) <= STEPS * torch.finfo(dtype).eps * float(true.abs().max())
    assert not ours.fallback_report()


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_pytorchs(kind: str, options: str, given: bool) -> None:
    layer = KINDS[kind](6, 19, **OPTIONS[options])
    shape = (3, 5, 6) if layer.batch_first else (5, 3, 6)
    assert_same(layer, torch.randn(shape, requires_grad=True), *([states_for(layer, (3,))] if given else []))


# Steps, batch, inputs and hidden units: that coincide, of one element, past a panel, of several parts of the batch.
SIZES = [(3, 3, 3, 3), (1, 1, 1, 1), (7, 1, 4, 70), (2, 130, 5, 4), (4, 0, 3, 5)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_any_sizes(kind: str, sizes: tuple[int, ...]) -> None:
    steps, batch, inputs, hidden = sizes
    layer = KINDS[kind](inputs, hidden, bidirectional=True)
    assert_same(layer, torch.randn(steps, batch, inputs, requires_grad=True), states_for(layer, (batch,)))


CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
}


class Steps(nn.Module):
    """A cell that Python calls step by step."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, steps: Tensor, state: Any = None) -> tuple[list[Tensor], Any]:
        outputs = []
        for x in steps:
            state = self.cell(x, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return outputs, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(3, 2, 5, 6), (1, 1, 1, 1), (4, 4, 4, 4), (2, 0, 5, 6), (2, 1, 7, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_is_pytorchs(kind: str, given: bool, bias: bool, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    steps, batch, inputs, hidden = sizes
    cell = CELLS[kind](inputs, hidden, bias=bias).to(dtype)
    h, c = (torch.randn(batch, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    states = [(h, c) if kind == "lstm" else h] if given else []
    assert_same(Steps(cell), torch.randn(steps, batch, inputs, dtype=dtype, requires_grad=True), *states)


@pytest.mark.parametrize("kind", CELLS)
def test_one_step_of_a_cell_without_a_batch(kind: str) -> None:
    assert_same(Steps(CELLS[kind](5, 6)), torch.randn(2, 5, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SMOOTH)
def test_a_cell_of_16_bits(kind: str, dtype: torch.dtype) -> None:
    assert_near(Steps(CELLS[kind](5, 6).to(dtype)), torch.randn(4, 3, 5).to(dtype).requires_grad_(), dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_without_a_batch(kind: str) -> None:
    layer = KINDS[kind](6, 5, 2, batch_first=True)
    assert_same(copy.deepcopy(layer), torch.randn(4, 6))
    assert_same(layer, torch.randn(4, 6, requires_grad=True), states_for(layer, ()))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["output", "h", "c"])
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_a_loss_may_read_one_of_the_results(kind: str, which: int) -> None:
    layer = KINDS[kind](6, 5, 2)
    if kind != "lstm" and which == 2:
        pytest.skip("only an LSTM has c")
    arguments = torch.randn(4, 3, 6, requires_grad=True), states_for(layer, (3,))
    assert_same(layer, *arguments, wanted=lambda results: leaves(results)[which])


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_doubles(kind: str) -> None:
    layer = KINDS[kind](6, 19, 2, bidirectional=True).double()
    x = torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)
    assert_same(layer, x, states_for(layer, (3,), torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", SMOOTH)
def test_a_layer_of_16_bits(kind: str, dtype: torch.dtype) -> None:
    layer = KINDS[kind](6, 19, 2, bidirectional=True).to(dtype)
    x = torch.randn(5, 3, 6).to(dtype).requires_grad_()
    assert_near(layer, x, states_for(layer, (3,), dtype), dtype=dtype)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize(("kind", "dtype"), [*[(k, torch.bfloat16) for k in SMOOTH], ("gru", torch.float16)], ids=str)
def test_a_layer_under_autocast(kind: str, dtype: torch.dtype, given: bool, around: bool) -> None:
    """A GRU's results are of float32, those of the others of 16 bits."""
    if kind == "lstm":
        skip_without_onednns_bfloat16()
    layer = KINDS[kind](6, 19, 2)
    # The first layer's input may require grad when it is traced, which PyTorch's own stand-in makes another dtype of.
    module = Function(lambda m, x, *states: m.cast(m.layer)(m.scale * x, *states), layer=layer)
    module.scale = nn.Parameter(torch.ones(()))
    module.cast = (lambda call: call) if around else torch.autocast("cpu", dtype)
    states = [states_for(layer, (3,))] if given else []
    with torch.autocast("cpu", dtype, enabled=around):
        assert_near(module, torch.randn(5, 3, 6, requires_grad=True), *states, dtype=dtype)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize(("enabled", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_an_lstm_is_cast_as_a_whole_by_onednn_alone(enabled: bool, dtype: torch.dtype) -> None:
    if enabled:
        skip_without_onednns_bfloat16()
    eager, ours = pair(nn.LSTM(6, 5))
    x = torch.randn(4, 3, 6)
    with torch.backends.mkldnn.flags(enabled=enabled), torch.autocast("cpu", torch.bfloat16):
        want, got = eager(x)[0], ours(x)[0]
    assert got.dtype is want.dtype is dtype


@pytest.mark.parametrize("value", [100.0, -100.0, torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_saturate_or_are_not_finite(kind: str, value: float) -> None:
    layer = KINDS[kind](4, 5)
    x = torch.randn(4, 3, 4)
    x[1, 0, 2] = value
    eager, ours = pair(layer)
    for got, want in zip(leaves(ours(x)), leaves(eager(x)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not ours.fallback_report()


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


REPLACED: dict[str, Callable[[nn.RNNBase, Tensor], None]] = {
    "an element": lambda layer, w: layer._flat_weights.__setitem__(1, w),
    "the list": lambda layer, w: setattr(layer, "_flat_weights", [layer._flat_weights[0], w, *layer._flat_weights[2:]]),
    "a parameter": lambda layer, w: setattr(layer, "weight_hh_l0", nn.Parameter(w)),
    "a parameter, past its layer": lambda layer, w: layer._parameters.__setitem__("weight_hh_l0", nn.Parameter(w)),
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("replace", REPLACED)
@pytest.mark.parametrize("kind", SMOOTH)
def test_a_layer_computes_with_the_list_of_its_weights(kind: str, replace: str) -> None:
    eager, ours = pair(KINDS[kind](5, 6))
    x, w = torch.randn(4, 3, 5), torch.randn(eager.weight_hh_l0.shape)
    close(ours(x)[0], eager(x)[0])
    for layer in (eager, ours.module):
        REPLACED[replace](layer, w)
    close(ours(x)[0], eager(x)[0])
    assert bool(ours.fallback_report()) is (replace in ("an element", "the list"))
    for layer in (eager, ours.module):
        layer.weight_hh_l0 = nn.Parameter(w * 2)
    close(ours(x)[0], eager(x)[0])


class OfItsList(nn.RNN):
    """Computes with the list as it is, which `nn.RNN` would make anew."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return (x @ self._flat_weights[0].T * len(self._flat_weights)).tanh()


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_forward_that_itself_looks_at_the_list_is_pytorchs() -> None:
    eager, ours = pair(OfItsList(5, 6))
    x = torch.randn(4, 3, 5)
    close(ours(x), eager(x))
    for layer in (eager, ours.module):
        layer._parameters["weight_ih_l0"] = nn.Parameter(torch.ones(6, 5))
        layer._flat_weights.append(layer._flat_weights[0])
        layer._flat_weights_names.append("weight_ih_l0")
    close(ours(x), eager(x))
    assert "looks at _flat_weights of OfItsList" in str(ours.fallback_report())


def test_an_attribute_of_that_name_is_as_any_of_another_module() -> None:
    eager, ours = pair(Function(lambda m, x: x * m._flat_weights[0] * len(m._flat_weight_refs), l=nn.Linear(1, 1)))
    for factor in (2.0, 3.0):
        for m in (eager, ours.module):
            m._flat_weights, m._flat_weight_refs = [factor], [1] * int(factor)
        close(ours(torch.ones(2)), eager(torch.ones(2)))
    assert not ours.fallback_report()


class Counting(nn.Module):
    """A parametrization that is told from another by how often it was evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.n += 1  # type: ignore[operator]
        return weight * self.n


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
@pytest.mark.parametrize("kind", SMOOTH)
def test_parametrizations_are_evaluated_as_often_as_by_pytorch(kind: str, name: str) -> None:
    layer = KINDS[kind](5, 6)
    parametrize.register_parametrization(layer, name, Counting())
    eager, ours = pair(copy.deepcopy(layer))  # the list of a copy is made anew in its first forward
    for step in range(6):
        if step == 3:
            assert not ours.fallback_report() and ours.stats()["graphs"] == 1
        if step == 4:  # its list is made anew, for once
            for m in (eager, ours.module):
                m.bias_ih_l0 = nn.Parameter(torch.ones_like(m.bias_ih_l0))
        x = torch.randn(4, 3, 5)
        close(ours(x)[0], eager(x)[0])
        close([*ours.module.buffers()], [*eager.buffers()])


@pytest.mark.parametrize("kind", SMOOTH)
def test_a_layer_to_be_called_once_is_not_verified(kind: str) -> None:
    layer = KINDS[kind](5, 6)
    parametrize.register_parametrization(layer, "weight_hh_l0", Counting())
    copied, x = copy.deepcopy(layer), torch.randn(4, 3, 5)
    with pytest.raises(ORTModuleError, match="call the module once before"):
        verify(copied, x)
    copied(x)
    assert verify(copied, x).ok


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_what_is_cached_of_parametrizations_is_pytorchs() -> None:
    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", Counting())
    eager, ours = pair(linear)
    x = torch.randn(3, 4)
    close(ours(x), eager(x))
    for module in (eager, ours):
        with parametrize.cached():
            assert torch.equal(module(x), module(x))
    close([ours(x), *ours.module.buffers()], [eager(x), *eager.buffers()])


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("enabled", [(True, False, True), (False, True, False)])
def test_onednn_may_be_switched_between_calls(enabled: tuple[bool, ...]) -> None:
    skip_without_onednns_bfloat16()
    eager, ours = pair(nn.LSTM(5, 6))
    x = torch.randn(4, 3, 5)
    for on in enabled:
        with torch.backends.mkldnn.flags(enabled=on), torch.autocast("cpu", torch.bfloat16):
            close(leaves(ours(x)), leaves(eager(x)), rtol=1e-2)


def called(module: nn.Module, *args: Any) -> str | Tensor:
    """What it gives, or the error that it raises."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            return module(*args)[0]
    except RuntimeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("double", ["input", "state"])
@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_as_foreign_under_autocast_as_in_pytorch(kind: str, double: str) -> None:
    eager, ours = pair(KINDS[kind](5, 6))
    x, states = torch.randn(4, 3, 5), states_for(eager, (3,))
    x = x.double() if double == "input" else x
    states = pytree.tree_map(torch.Tensor.double, states) if double == "state" else states
    want, got = called(eager, x, states), called(ours, x, states)
    assert isinstance(want, str) and got == want


@pytest.mark.parametrize("n", [0, 1, 3])
def test_states_are_of_as_many_layers_as_there_are(n: int) -> None:
    def forward(m: nn.Module, x: Tensor, state: Tensor) -> Tensor:
        return torch.rnn_tanh(x, state, [*m.layer.parameters()], False, 2, 0.0, True, False, False)

    eager, ours = pair(Function(forward, layer=nn.RNN(5, 6, 2, bias=False)))
    x, state = torch.randn(4, 3, 5), torch.randn(n, 3, 6)
    want, got = called(eager, x, state), called(ours, x, state)
    assert isinstance(want, str) and got == want


def behind_a_break(s: Function, x: Tensor) -> Tensor:
    if x.sum() > 1e6:
        x = x * 2
    return s.head(s.layer(x)[0].relu())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_behind_a_break_runs_in_c(kind: str) -> None:
    module = Function(behind_a_break, layer=KINDS[kind](6, 5, 2, bidirectional=True), head=nn.Linear(10, 3))
    eager, ours = pair(module)
    for length in (4, 7, 1):
        assert_same_step(eager, ours, torch.randn(length, 3, 6))
    assert {r.cause.split(":")[1] for r in ours.fallback_report()} == {" Data-dependent branching"}
    assert ours.stats()["graphs"] > 0
    if kind != "lstm" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            x = torch.randn(5, 3, 6)
            close(ours(x), eager(x), rtol=4 * BFLOAT16)


def add_noise(layer: nn.Module, _args: Any) -> None:
    layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach() + 1)


CHANGED: dict[str, Callable[[nn.RNNBase], Any]] = {
    "a parametrization": lambda layer: parametrize.register_parametrization(layer, "weight_hh_l0", Counting()),
    "spectral norm": lambda layer: parametrizations.spectral_norm(layer, "weight_hh_l0"),
    "another weight": lambda layer: setattr(layer, "weight_hh_l0", nn.Parameter(torch.ones(20, 5))),
    "data": lambda layer: setattr(layer.weight_hh_l0, "data", torch.ones(20, 5)),
    "a hook before it": lambda layer: layer.register_forward_pre_hook(add_noise),
    "no bias": lambda layer: layer.bias_hh_l0.data.zero_(),
    "frozen": lambda layer: layer.weight_hh_l0.requires_grad_(False),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_layer_behind_a_break_may_change(name: str, before: bool) -> None:
    torch.manual_seed(0)
    module = Function(behind_a_break, layer=nn.LSTM(6, 5), head=nn.Linear(5, 3))
    eager, ours = pair(module)
    for step in range(4):
        if step == (0 if before else 2):
            for m in (eager, ours.module):
                torch.manual_seed(1)
                CHANGED[name](m.layer)
        for m in (eager, ours):
            m.zero_grad()
        torch.manual_seed(step)
        assert_same_step(eager, ours, torch.randn(4, 3, 6))
