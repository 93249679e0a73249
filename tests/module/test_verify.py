"""verify() tells rounding from faults, finds the place, and leaves everything as it was."""

from __future__ import annotations

import importlib
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError, verify
from ortmodule_c.lowering.builder import Builder, Val
from ortmodule_c.lowering.translations.registry import TABLE, aten

Fault = Callable[[Builder, Val], Any]


class Tower(nn.Module):
    """A step with dropout, batch statistics and two outputs, the first of them a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)  # before batch statistics its gradient would be rounding only
        self.middle = nn.Sequential(nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4))
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        y = self.last(self.middle(self.first(x)))
        return y if target is None else (nn.functional.cross_entropy(y, target), y)


@pytest.fixture
def tower() -> Tower:
    torch.manual_seed(3)
    return Tower()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Translates tanh wrongly."""
    return lambda wrong: monkeypatch.setitem(TABLE, aten.tanh.default, wrong)


def wrong_value(b: Builder, x: Val) -> Any:
    return b.emit("Sigmoid", x)


def wrong_gradient(b: Builder, x: Val) -> Any:
    return b.emit("Add", b.emit("Tanh", x), b.emit("Sub", x, b.detached(x)))


def wrong_when_unobserved(b: Builder, x: Val) -> Any:
    observed = sum(v.name.startswith("probe") for v in b.draft.graph.inputs)
    return b.emit("Tanh", x) if observed > 1 else b.emit("Sigmoid", x)


def test_a_right_step_is_found_right(tower: Tower, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(tower, torch.randn(6, 6), target=torch.randint(5, (6,)))
    assert found.ok and found.place is None and not found.notes
    assert str(found) + "\n" == capsys.readouterr().out
    assert repr(found) == f"<Verification of {len(found.rows)} tensors: equal within rounding>"
    names = {(r.kind, r.name) for r in found.rows}
    assert {n for kind, n in names if kind == "gradient"} == dict(tower.named_parameters()).keys()
    assert {n for kind, n in names if kind == "buffer"} == dict(tower.named_buffers()).keys()
    assert sum(kind == "output" for kind, _ in names) == 2
    assert all(0 <= r.eager_from_exact < 1e-5 for r in found.rows if r.eager_from_exact is not None)


def test_dropout_drops_the_same_elements_on_both_sides() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.dropout(x, 0.25)
            y = nn.functional.scaled_dot_product_attention(y, x, x, dropout_p=0.3) + nn.functional.dropout(y, 0.5)
            return nn.functional.dropout(x, 1.0) + nn.functional.dropout(y, 0.2)

    assert verify(Attention(), torch.randn(2, 3, 4, 5, requires_grad=True)).ok


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("layer", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_features_and_selu_drop_the_same_on_both_sides(layer: type[nn.Module], p: float) -> None:
    shape = (3, 5, *{"Dropout1d": (4,), "Dropout3d": (2, 3, 4)}.get(layer.__name__, (4, 4)))
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(math.prod(shape[1:])), nn.Unflatten(1, shape[1:]), layer(p))
    model(torch.zeros(shape))
    wrapped = ORTModule(model)
    assert verify(wrapped, torch.randn(shape, requires_grad=True)).ok
    wrapped(torch.randn(shape)).sum().backward()
    assert wrapped.fallback_report() == []


def test_random_numbers_of_pytorch_are_alike_too() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert verify(Noise(), torch.randn(2, 3, 4, 4, requires_grad=True)).ok


def test_random_numbers_of_both_kinds_cannot_be_compared() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5) + torch.randn_like(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = verify(Both(), torch.randn(5, 6, requires_grad=True))
    assert found.ok is None and "not comparable" in str(found)


class Generators:
    """Those of two GPUs, as far as PyTorch tells of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = [torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [*self.states])
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: setattr(self, "states", [*states]))

    def draw(self) -> None:
        self.states[1] = self.states[1] + 1


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("runs", ["in C", "in PyTorch"])
def test_random_states_of_gpus_tell_who_draws_and_are_left_as_they_were(
    monkeypatch: pytest.MonkeyPatch, runs: str
) -> None:
    """By an op that drops within its kernel, as attention on a GPU does, which the core's dropout stands for."""
    generators = Generators(monkeypatch)
    with torch.library._scoped_library("omc_verify", "DEF") as library:
        library.define("drops(Tensor x) -> Tensor")
        library.impl("drops", lambda x: generators.draw() or x * 2, "CPU")
        library.impl("drops", torch.empty_like, "Meta")
        op = torch.ops.omc_verify.drops.default
        if runs == "in C":
            monkeypatch.setitem(TABLE, op, lambda b, x: b.emit("Dropout", x, p=0.5, subsequence=b.subsequence()))

        class Drops(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return op(x)

        found = verify(Drops(), torch.ones(3, 4))
    assert [s.tolist() for s in generators.states] == [[0, 0], [0, 0]]
    if runs == "in C":
        assert found.ok is None and "draws random numbers in a kernel" in str(found)
    else:
        assert found.ok and "no run in float64: PyTorch draws other random numbers there" in found.notes


@pytest.mark.parametrize("wrapped", [False, True])
def test_everything_is_left_as_it_was(tower: Tower, wrapped: bool) -> None:
    tower.calls = 0
    tower.register_forward_pre_hook(lambda m, args: None)
    model = ORTModule(tower) if wrapped else tower
    x, target = torch.randn(6, 6, requires_grad=True), torch.randint(5, (6,))
    model(x, target)[0].backward()
    before = {n: t.clone() for n, t in tower.state_dict().items()}
    grads = {n: p.grad.clone() for n, p in tower.named_parameters() if p.grad is not None}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    verify(model, x, target)
    for n, t in tower.state_dict().items():
        assert torch.equal(t, before[n])
    for n, p in tower.named_parameters():
        assert p.grad is not None and torch.equal(p.grad, grads[n])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1] and (np.random.get_state()[1] == states[2]).all()
    assert tower.training


def test_inputs_that_require_grad_have_a_row(tower: Tower) -> None:
    x = torch.randn(6, 6, requires_grad=True)
    found = verify(tower, x)
    assert found.ok and any(r.kind == "gradient" and "input" in r.name for r in found.rows)
    assert x.grad is None


def test_sparse_gradients_are_compared() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert verify(nn.Embedding(5, 3, sparse=True), torch.tensor([1, 4, 1])).ok


def test_without_gradients_outputs_and_buffers_are_compared(tower: Tower) -> None:
    tower.eval()
    with torch.no_grad():
        found = verify(tower, torch.randn(6, 6))
    assert found.ok and {r.kind for r in found.rows} == {"output", "buffer"}


def test_what_is_nan_on_both_sides_is_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[1, 2] = float("nan")
    found = verify(model, torch.randn(5, 4))
    assert found.ok and [r.remark for r in found.rows if r.kind == "output"] == [
        "5 of 15 elements are infinite or NaN on both sides"
    ]
    assert "infinite or NaN on both sides" in capsys.readouterr().out


def test_under_autocast(tower: Tower) -> None:
    tower.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert verify(tower, torch.randn(6, 6)).ok


@pytest.mark.parametrize(
    "wrong,what,alone",
    [
        (wrong_value, "the value of tanh", True),
        (wrong_gradient, "the gradient of", True),
        (wrong_when_unobserved, "the value of tanh", False),
    ],
)
def test_a_fault_is_found_and_placed(
    tower: Tower, fault: Callable[[Fault], None], wrong: Fault, what: str, alone: bool
) -> None:
    fault(wrong)
    found = verify(tower, torch.randn(6, 6))
    assert not found.ok and found.place is not None
    assert found.place.what.startswith(what) and found.place.alone is alone
    if what == "the value of tanh":
        assert found.place.submodule == "middle.1" and "tanh" in found.place.op
    assert __file__ in found.place.line


def test_a_module_in_double_is_not_held_to_its_own_rounding() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU6()) for _ in range(8)]
    assert verify(nn.Sequential(*layers).double(), torch.randn(4, 8, dtype=torch.float64)).ok


class TestFirstSteps:
    """DebugOptions(verify=N)."""

    @pytest.fixture
    def compared(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
        module = importlib.import_module("ortmodule_c.verify")
        found: list[Any] = []
        original = module.compare
        monkeypatch.setattr(module, "compare", lambda *a: found.append(original(*a)) or found[-1])
        yield found

    def test_only_the_first_training_steps_are_compared(self, tower: Tower, compared: list[Any]) -> None:
        model = ORTModule(tower, DebugOptions(verify=2))
        with torch.no_grad():
            model(torch.randn(6, 6))
        for _ in range(4):
            model(torch.randn(6, 6)).sum().backward()
        assert [found.ok for found in compared] == [True, True]

    def test_training_is_the_same_as_without(self, tower: Tower) -> None:
        x = torch.randn(6, 6)
        losses = []
        for steps in (0, 3):
            torch.manual_seed(0)
            model = ORTModule(tower, DebugOptions(verify=steps))
            losses.append([model(x).square().sum().item() for _ in range(4)])
        assert losses[0] == losses[1]

    def test_a_step_that_is_out_is_warned_about(self, tower: Tower, fault: Callable[[Fault], None]) -> None:
        fault(wrong_value)
        with pytest.warns(UserWarning, match="differs from PyTorch's(.|\n)*they part at the value of tanh"):
            ORTModule(tower, DebugOptions(verify=1))(torch.randn(6, 6))

    def test_or_is_an_error(self, tower: Tower, fault: Callable[[Fault], None]) -> None:
        fault(wrong_value)
        with pytest.raises(ORTModuleError, match="they part at the value of tanh"):
            ORTModule(tower, DebugOptions(verify=1, fallback="error"))(torch.randn(6, 6))

    def test_a_negative_number_is_refused(self) -> None:
        with pytest.raises(ValueError, match="verify is -1"):
            DebugOptions(verify=-1)

    @pytest.mark.parametrize("failing", ["Masks", "_rows", "random_states"])
    def test_whatever_fails_of_a_comparison_is_told_and_does_not_stop_the_training(
        self, tower: Tower, monkeypatch: pytest.MonkeyPatch, failing: str
    ) -> None:
        def fail(*_: Any) -> Any:
            raise RuntimeError("CUDA error: out of luck")

        monkeypatch.setattr(importlib.import_module("ortmodule_c.verify"), failing, fail)
        model = ORTModule(tower, DebugOptions(verify=1))
        with pytest.warns(UserWarning, match="cannot be compared: RuntimeError: CUDA error: out of luck"):
            model(torch.randn(6, 6)).sum().backward()
        assert tower.last.weight.grad is not None and not model.fallback_report()

    def test_arguments_that_cannot_be_copied_do_not_stop_the_training(self) -> None:
        class Scaled(nn.Module):
            def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
                return x * 2

        x = torch.randn(3, requires_grad=True)
        with pytest.warns(UserWarning, match="cannot be compared: verify cannot copy the arguments"):
            out = ORTModule(Scaled(), DebugOptions(verify=1))(x, torch.Generator())
        assert torch.equal(out, x * 2)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
class TestGraphsOfDynamo:
    """A module of several graphs, with Python in between."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.dropped = nn.Dropout(0.4)
            self.last = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Dropout(0.3))
            self.factor = 3

        def forward(self, x: Tensor) -> Tensor:
            h = self.dropped(self.dropped(self.first(x)))
            return self.last(h if h.sum() > 1e9 else h * 2) * self.factor

    @pytest.fixture
    def branching(self) -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(3)
        return self.Branching()

    def test_dropout_is_alike_in_all_of_them(self, branching: nn.Module) -> None:
        found = verify(branching, torch.randn(6, 6))
        assert found.ok and not found.notes and all(r.ours_from_exact is not None for r in found.rows)

    def test_the_graphs_stay(self, branching: nn.Module) -> None:
        model = ORTModule(branching)
        for _ in range(2):
            assert verify(model, torch.randn(6, 6)).ok
        assert model.stats()["graphs"] == 2

    @pytest.mark.parametrize("wrong", [wrong_value, wrong_gradient])
    def test_a_fault_is_found_and_placed(
        self, branching: nn.Module, fault: Callable[[Fault], None], wrong: Fault
    ) -> None:
        fault(wrong)
        found = verify(branching, torch.randn(6, 6))
        assert not found.ok and found.place is not None
        if wrong is wrong_value:
            assert found.place.what.startswith("the value of tanh") and found.place.submodule.endswith(".1")
        assert __file__ in found.place.line

    def test_a_fault_in_a_graph_with_open_sizes_and_numbers(
        self, branching: nn.Module, fault: Callable[[Fault], None]
    ) -> None:
        fault(wrong_value)
        model = ORTModule(branching)
        for n in (4, 5):
            branching.factor = n
            model(torch.randn(n, 6))
        branching.factor = 7
        found = verify(model, torch.randn(7, 6))
        assert not found.ok and found.place is not None and found.place.what.startswith("the value of tanh")

    def test_a_checkpoint_that_drops_cannot_be_compared(self) -> None:
        class Checkpointed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(lambda v: nn.functional.dropout(v, 0.5) * v, x, use_reentrant=False)

        torch._dynamo.reset()
        found = verify(Checkpointed(), torch.randn(5, 6, requires_grad=True))
        assert found.ok is None and "a checkpoint drops again" in str(found)

    def test_the_first_steps_are_compared(self, branching: nn.Module, fault: Callable[[Fault], None]) -> None:
        fault(wrong_value)
        with pytest.warns(UserWarning, match="differs from PyTorch's(.|\n)*they part at the value of tanh"):
            ORTModule(branching, DebugOptions(verify=1))(torch.randn(6, 6))
