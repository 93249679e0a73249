"""A module that torch.export refuses goes through TorchDynamo: one statement is broken out, not the module."""

import copy
import gc
import inspect
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError
from ortmodule_c.dynamo.backend import Compiled
from wrapped import Branching, Function, assert_same_state, assert_same_step, close, mlp, pair

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BRANCH = f"{inspect.getfile(Branching)}:{Branching.forward.__code__.co_firstlineno + 2}"


def test_a_branch_on_values_breaks_out_one_statement() -> None:
    eager, ours = pair(Branching())
    with pytest.warns(UserWarning, match=rf"{BRANCH} runs in PyTorch: graph break: Data-dependent"):
        assert_same_step(eager, ours, torch.ones(2, 4))
    for n in (2, 3, 5, 7):
        for sign in (1, -1):
            assert_same_step(eager, ours, sign * torch.rand(n, 4))
    assert [r.name for r in ours.fallback_report()] == [BRANCH]
    assert ours.stats()["graphs"] > 0 and ours.stats()["graph_breaks"] == 1


def test_training_equals_eager() -> None:
    eager, ours = pair(Branching())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, ours)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(6):
            x = torch.randn(5, 4)
            for m, optimizer in zip((eager, ours), optimizers, strict=True):
                optimizer.zero_grad()
                m(x).square().mean().backward()
                optimizer.step()
            assert_same_state(ours, eager)


@pytest.mark.parametrize("capture", ["export", "dynamo", "auto"])
def test_the_way_can_be_chosen(capture: Any) -> None:
    eager = mlp()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    assert_same_step(eager, ours, torch.randn(2, 6))
    assert ours.fallback_report() == []
    assert ours.stats()["graphs"] == 1
    assert ours.stats()["dynamo_graphs"] == (capture == "dynamo")


def test_what_export_refuses_runs_in_pytorch_if_dynamo_is_not_asked() -> None:
    eager = Branching()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="export"))
    with pytest.warns(UserWarning, match="Branching runs in PyTorch"):
        assert_same_step(eager, ours, torch.ones(2, 4))


def test_a_break_is_an_error_where_fallback_is() -> None:
    ours = ORTModule(Branching(), DebugOptions(fallback="error"))
    with pytest.raises(ORTModuleError, match=rf"Branching cannot run in ortmodule_c .*Data-dependent.* {BRANCH}"):
        ours(torch.ones(2, 4))


def test_what_runs_in_one_graph_is_no_error() -> None:
    def held(s: Function, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return s.l(x)

    eager = Function(held, l=nn.Linear(2, 2))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(fallback="error"))
    seen: list[Tensor] = []
    given = torch.ones(1, 2)
    close(ours(given, seen), eager(given, []))
    assert seen == [given]


def test_limits_are_those_of_the_options_and_told() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mode = "0"

        def forward(self, x: Tensor) -> Tensor:
            return x * int(self.mode)

    model = Scaled()
    ours = ORTModule(model, DebugOptions(capture="dynamo", max_graphs=3))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(6):
            model.mode = str(i)
            close(ours(torch.ones(2)), torch.full((2,), float(i)))
    messages = [str(w.message) for w in told if "ortmodule_c" in str(w.message)]
    assert len(messages) == 1 and "attribute mode of Scaled takes a new value" in messages[0]
    assert ours.stats()["graphs"] == 3
    assert len(ours.fallback_report()) == 1


def test_errors_are_the_users_and_say_nothing_against_the_module() -> None:
    class Refusing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise KeyError("mine")
            return super().forward(x)

    eager, ours = pair(Refusing())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                ours(torch.ones(3, 4))
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
                ours(torch.ones(2, 5))
            assert_same_step(eager, ours, torch.ones(2, 4))
    assert len(ours.fallback_report()) == 1


def test_bad_input_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    ours = ORTModule(Branching())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        ours(torch.ones(2, 5))
    assert capfd.readouterr().err == ""


def test_side_effects_happen_once_a_call() -> None:
    seen: list[int] = []

    class Counting(Branching):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(seen))
            return super().forward(x)

    eager = Counting()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(1, 5):
            assert_same_step(eager, ours, torch.randn(n, 4))
            assert len(seen) == 2 * n


def test_hooks_of_the_module_run_once() -> None:
    eager, ours = pair(Branching())
    calls: list[str] = []
    for m in (eager, ours.module):
        m.register_forward_hook(lambda *_: calls.append("outer"))
        m.first.register_forward_hook(lambda *_: calls.append("inner"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (2, 2, 3):
            calls.clear()
            eager(torch.ones(n, 4))
            expected = list(calls)
            calls.clear()
            ours(torch.ones(n, 4))
            assert calls == expected


def test_hooks_that_are_added_later_run() -> None:
    eager, ours = pair(Branching())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_step(eager, ours, torch.ones(2, 4))
        for m in (eager, ours.module):
            m.first.register_forward_hook(lambda _m, _i, out: out * 3)
        assert_same_step(eager, ours, torch.ones(2, 4))


def test_hooks_on_all_modules_run() -> None:
    eager, ours = pair(mlp())
    calls: list[nn.Module] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_step(eager, ours, torch.ones(2, 6))
        with torch.nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(m)):
            eager(torch.ones(2, 6))
            expected = [type(m) for m in calls]
            calls.clear()
            ours(torch.ones(2, 6))
    assert [type(m) for m in calls if not isinstance(m, ORTModule)] == expected


def test_what_the_forward_itself_changes_costs_no_graph() -> None:
    class Counting(Branching):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, [0]

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            return super().forward(x) * self.calls

    eager, ours = pair(Counting())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(8):
            assert_same_step(eager, ours, torch.ones(2, 4))
    assert ours.stats()["graphs"] > 0
    assert not [r for r in ours.fallback_report() if r.name == "Counting"]


def test_another_size_compiles_nothing() -> None:
    eager, ours = mlp(), ORTModule(mlp(), DebugOptions(capture="dynamo", fallback="error"))
    eager.load_state_dict(ours.module.state_dict())
    sizes, graphs = ((5, 7, 6), (3, 7, 6), (5, 4, 6), (2, 9, 6)), []
    for size in sizes:
        assert_same_step(eager, ours, torch.randn(size))
        graphs.append(ours.stats()["graphs"])
    assert graphs == [1, 1, 1, 1]


def test_train_eval_and_no_grad() -> None:
    eager, ours = pair(nn.Sequential(Branching(), nn.Dropout(0.5)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours(torch.ones(2, 4))
        for m in (eager, ours):
            m.eval()
        assert_same_step(eager, ours, torch.ones(2, 4))
        with torch.no_grad():
            assert not ours(torch.ones(2, 4)).requires_grad
        with torch.inference_mode():
            close(ours(torch.ones(2, 4)), eager(torch.ones(2, 4)))


def test_nothing_keeps_a_module_that_is_gone() -> None:
    ours = ORTModule(Branching())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours(torch.ones(2, 4)).sum().backward()
    gone = weakref.ref(ours.module), weakref.ref(ours)
    del ours
    gc.collect()
    assert [r() for r in gone] == [None, None]


def test_the_graphs_of_a_module_that_is_gone_go_too() -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(o, (fx.GraphModule, FakeTensorMode, Compiled)) for o in gc.get_objects())

    counts = []
    for _ in range(3):
        ours = ORTModule(mlp(), DebugOptions(capture="dynamo"))
        ours(torch.ones(2, 6)).sum().backward()
        del ours
        counts.append(alive())
    assert counts[0] == counts[2]


def test_what_a_signals_handler_raises_is_no_failure_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Exception):
        pass

    def handle(_number: int, _frame: object) -> None:
        raise Late

    def compiled_late(*args: Any) -> Compiled:
        signal.raise_signal(signal.SIGALRM)
        return Compiled(*args)

    eager = mlp()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    before = signal.signal(signal.SIGALRM, handle)
    try:
        with monkeypatch.context() as patch, pytest.raises(Late):
            patch.setattr("ortmodule_c.dynamo.second_way.Compiled", compiled_late)
            ours(torch.ones(2, 6))
        assert signal.getsignal(signal.SIGALRM) is handle
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_same_step(eager, ours, torch.ones(2, 6))
    assert not ours.fallback_report()


def test_a_checkpoint_inside_runs_again_in_backward() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(lambda v: torch.tanh(s.l(v)) * v.sin(), x, use_reentrant=False)
        return x

    eager = Function(forward, l=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(fallback="error"))
    held: list[int] = []

    def pack(t: Tensor) -> Tensor:
        held.append(t.numel())
        return t

    assert_same_step(eager, ours, torch.randn(2, 4, requires_grad=True))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ours(torch.randn(2, 4, requires_grad=True))
    assert sum(held) <= 3 * (8 + 20)  # inputs and parameters


class Gradient(nn.Module):
    """Gives a gradient that is differentiated again, as of a force field."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.l(x).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def gradient_of(y: Tensor, x: Tensor, **how: bool) -> Tensor:
    return torch.autograd.grad(y, x, **how)[0]


class Force(Gradient):
    """The same for an argument that does not ask for one, by a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.l(x).tanh().sum()
        if energy > 0:  # breaks the graph: what gradients are asked of has run before that is met
            energy = energy * 2
        return self.gradient(energy, x)

    def gradient(self, energy: Tensor, x: Tensor) -> Tensor:
        return gradient_of(energy, x, create_graph=self.training)


@pytest.mark.parametrize("kind", [Gradient, Force])
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_forward_that_makes_a_graph_of_gradients_runs_in_pytorch(kind: type[nn.Module], capture: Any) -> None:
    """No part of it may be a graph of ours, which cannot be differentiated twice; one warning says so."""
    eager = kind()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in (3, 2):
            assert_same_step(eager, ours, torch.randn(n, 4, requires_grad=True))
    (message,) = [str(w.message) for w in told]
    assert message.startswith(f"ortmodule_c: {kind.__name__} runs in PyTorch") and "create_graph" in message


def test_dynamo_does_not_trace_the_backward_that_a_forward_asks_for() -> None:
    def slope(s: Function, x: Tensor) -> Tensor:
        return s.l(gradient_of(s.l(x).tanh().sum(), x))

    eager, ours = pair(Function(slope, l=nn.Linear(4, 4)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in (3, 2):
            assert_same_step(eager, ours, torch.randn(n, 4, requires_grad=True))
    assert all(str(w.message).startswith("ortmodule_c: ") for w in told)
    assert {r.name.split(":")[0] for r in ours.fallback_report()} == {__file__}
    assert ours.stats()["dynamo_graphs"] > 0


def test_a_reentrant_checkpoint_on_tensors_without_gradients_trains_nothing() -> None:
    eager, ours = pair(Function(lambda s, x: s.after(checkpoint(s.l, x, use_reentrant=True)), l=mlp(), after=nn.ReLU()))
    with pytest.warns(UserWarning, match="None of the inputs|require no gradient"):
        outs = [m(torch.randn(3, 6)) for m in (eager, ours)]
    assert not any(out.requires_grad for out in outs)


def test_modules_made_in_the_forward_are_in_the_graph() -> None:
    """PyTorch counts each that is made, which computes nothing."""

    def forward(s: Function, x: Tensor) -> Tensor:
        return nn.MSELoss()(s.l(x), x) * (2 if x.sum() > 0 else 3)

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    with pytest.warns(UserWarning, match="Data-dependent"):
        assert_same_step(eager, ours, torch.rand(3, 4))
    (record,) = ours.fallback_report()
    assert record.cause.startswith("graph break: Data-dependent branching")


def test_a_second_derivative_through_parameters_is_refused() -> None:
    """As a second step of MAML would take it."""
    ours = ORTModule(Branching())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = ours(torch.ones(2, 4)).square().mean()
    grads = torch.autograd.grad(loss, list(ours.parameters()), create_graph=True)
    with pytest.raises(ORTModuleError, match=r"use \.module for double backward"):
        sum(g.square().sum() for g in grads).backward()


def test_stats_have_the_same_names_always() -> None:
    ours = ORTModule(Branching())
    before = ours.stats()
    assert not any(before.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours(torch.ones(2, 4))
    by_dynamo, by_export = ours.stats(), ORTModule(mlp())
    by_export(torch.ones(2, 6))
    assert list(before) == list(by_dynamo) == list(by_export.stats())
    assert by_dynamo["dynamo_graphs"] == by_dynamo["graphs"] == 2 and by_dynamo["graph_breaks"] == 1
    assert 0.01 < by_dynamo["export_seconds"] < 60 and by_dynamo["plans_built"] == 2


def test_numpy_draws_its_own_random_numbers() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        return s.l(x) * float(np.random.rand(1).item()) + torch.tensor(np.random.uniform(0, 1, 4), dtype=x.dtype)

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (1, 2):
            outs = []
            for m in (eager, ours):
                np.random.seed(seed)
                torch.manual_seed(seed)
                outs.append((m(torch.ones(2, 4)), torch.rand(1), np.random.rand()))
            close(outs[1][0], outs[0][0])
            assert outs[1][1:] == outs[0][1:]


def test_a_graph_of_sizes_alone_is_one() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        torch._dynamo.graph_break()
        return s.l(x) * batch / length

    eager = Function(forward, l=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    with pytest.warns(UserWarning, match="graph_break"):
        for shape in ((2, 3, 4), (2, 5, 4), (3, 6, 4)):
            assert_same_step(eager, ours, torch.randn(shape))
    assert len(ours.fallback_report()) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_options_that_are_for_the_wrapper_are_refused_by_the_backend() -> None:
    for name, value in (("verify", 3), ("capture", "dynamo")):
        compiled = torch.compile(mlp(), backend="ortmodule_c", options={name: value})
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"option {name} is for ORTModule"):
            compiled(torch.randn(2, 6))


def strided(s: Function, x: Tensor) -> Tensor:
    h = nn.functional.pad(s.l(x), (1, 1)).transpose(0, 1)
    return h.as_strided((h.shape[1], 3, 4), (6, 1, 1)) * 2


def strided_from_the_middle(s: Function, x: Tensor) -> Tensor:
    return s.l(x)[1:].as_strided((2, 3), (1, 2)) * 2


@pytest.mark.parametrize("forward", [strided, strided_from_the_middle])
def test_memory_is_looked_at_as_in_pytorch(forward: Any) -> None:
    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (3, 3, 5, 4):
            assert_same_step(eager, ours, torch.randn(n, 4))
    (record,) = ours.fallback_report()
    assert (record.name == "aten.as_strided.default") == (forward is strided)


def test_only_transforms_of_functions_run_in_pytorch() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        h = torch.func.grad(lambda v: (v * v * v).sum())(s.l(x).tanh())
        return s.l(h)

    eager = Function(forward, l=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    with pytest.warns(UserWarning, match="grad at .* runs in PyTorch: it transforms functions"):
        for n in (3, 3, 5):
            assert_same_step(eager, ours, torch.randn(n, 4, requires_grad=True))
    assert len(ours.fallback_report()) == 1 and ours.stats()["graphs"] == 2


def mapped(h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.sum())(h)


def scanned(h: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b, h, dim=0, combine_mode="generic")


@pytest.mark.parametrize(("transform", "sizes"), [(mapped, (3, 3, 5)), (scanned, (6, 6))])
def test_vmap_is_part_of_the_graph(transform: Callable[[Tensor], Tensor], sizes: tuple[int, ...]) -> None:
    eager = Function(lambda s, x: s.l(transform(s.l(x).tanh())), l=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    for n in sizes:
        assert_same_step(eager, ours, torch.randn(n, 4, requires_grad=True))
    assert ours.fallback_report() == [] and ours.stats()["graphs"] == 1


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_what_is_composed_of_an_op_of_torchscript_alone_is_as_in_eager() -> None:
    eager = Function(lambda _, x, a, b: torch.gradient(x, spacing=[a, b], dim=(0, 1), edge_order=2))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    assert_same_step(eager, ours, torch.randn(3, 3, 3), torch.tensor([1.0, 3, 2]), torch.tensor([8.0, 6, 1]))


def test_threads_trace_and_compile_one_after_the_other() -> None:
    models = [pair(Branching()) for _ in range(4)]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        eager, ours = models[i]
        try:
            for k in range(8):
                assert_same_step(eager, ours, torch.rand(1 + (k + i) % 3, 4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert errors == []
