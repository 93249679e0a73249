"""What surrounds a forward is as in eager: PyTorch itself, the environment, the moment, who owns what it returns."""

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from held import ON_THE_FAST_WAY, both
from ortmodule_c import ORTModule
from wrapped import Function, close, n_graphs


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def twice_of_layers(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, *args, **kwargs: call(m, *args, **kwargs) * (2 if isinstance(m, nn.Linear) else 1)


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (nn.functional, "linear", twice(nn.functional.linear)),
        (nn.Linear, "forward", twice(nn.Linear.forward)),
        (nn.Module, "__call__", twice_of_layers(nn.Module.__call__)),
        (Tensor, "a_number", 2.0),
        (Tensor, "a_method", lambda t: t * 2),
    ],
)
def test_what_is_replaced_in_pytorch_is_seen(
    owner: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.l(x)
        return y.a_method() * y.a_number * Tensor.a_number  # type: ignore[attr-defined]

    monkeypatch.setattr(Tensor, "a_number", 1.0, raising=False)
    monkeypatch.setattr(Tensor, "a_method", lambda t: t * 1, raising=False)
    eager = Function(forward, l=nn.Linear(4, 4))
    ours = ORTModule(eager)
    x = torch.randn(3, 4)
    before = eager(x)
    close(ours(x), before)
    assert n_graphs(ours) == 1
    monkeypatch.setattr(owner, name, other)
    assert not torch.equal(eager(x), before)
    for _ in range(2):
        close(ours(x), eager(x))
    monkeypatch.undo()
    monkeypatch.setattr(Tensor, "a_number", 1.0, raising=False)
    monkeypatch.setattr(Tensor, "a_method", lambda t: t * 1, raising=False)
    close(ours(x), before)


def test_a_group_of_processes_is_seen_to_begin_and_end() -> None:
    eager, ours = both(lambda _, y: y * 2 if dist.is_initialized() else y * 3, lambda: None)
    x = torch.randn(3, 4)
    for _ in range(2):
        close(ours(x), eager(x))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            close(ours(x), eager(x))
        finally:
            dist.destroy_process_group()
    assert n_graphs(ours) == 2


def test_an_environment_variable_is_seen_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = both(lambda s, y: y * float(os.environ.get("A_SCALE", "2")), lambda: None)
    x = torch.randn(3, 4)
    close(ours(x), eager(x))
    monkeypatch.setenv("A_SCALE", "3")
    close(ours(x), eager(x))


def test_a_variable_of_the_environment_that_a_function_asks_for_is_seen_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_SCALE", "2")
    eager, ours = both(lambda s, y: y * float(os.getenv("A_SCALE") or 0), lambda: None)
    x = torch.randn(3, 4)
    close(ours(x), eager(x))
    monkeypatch.setenv("A_SCALE", "3")
    close(ours(x), eager(x))


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.addmm.default else result


class DoublingFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


@pytest.mark.parametrize("moment", [torch.inference_mode, Doubling, DoublingFunctions, lambda: torch.device("meta")])
def test_the_moment_of_a_call_counts(moment: Callable[[], Any]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        of_default = torch.ones(4)
        return s.l(x) * (2 if torch.is_inference_mode_enabled() else 3) * (2 if of_default.is_meta else 3)

    eager = Function(forward, l=nn.Linear(4, 4))
    ours = ORTModule(eager)
    x = torch.randn(3, 4)
    for manager in (torch.no_grad, moment, torch.no_grad):
        with manager():
            close(ours(x), eager(x))


def test_counters_of_functions_and_of_pytorchs_classes_count_as_in_eager() -> None:
    def function(y: Tensor) -> Tensor:
        function.n = getattr(function, "n", 0) + 1  # type: ignore[attr-defined]
        nn.Linear.n = getattr(nn.Linear, "n", 0) + 1  # type: ignore[attr-defined]
        return y

    ours = ORTModule(Function(lambda s, x: function(s.l(x)), l=nn.Linear(4, 4)))
    try:
        for _ in range(3):
            ours(torch.randn(3, 4))
        assert (function.n, nn.Linear.n) == (3, 3)  # type: ignore[attr-defined]
    finally:
        del nn.Linear.n  # type: ignore[attr-defined]


def test_an_object_that_is_given_away_is_the_modules() -> None:
    ours = ORTModule(Function(lambda s, x: (s.l(x), s.held), l=nn.Linear(4, 4), held=types.SimpleNamespace()))
    assert ours(torch.randn(3, 4))[1] is ours.module.held


def test_a_container_of_the_arguments_that_is_given_back_is_the_callers() -> None:
    ours = ORTModule(Function(lambda s, x, d: (s.l(x), d), l=nn.Linear(4, 4)))
    given = {"x": torch.ones(4)}
    assert ours(torch.randn(3, 4), given)[1] is given


def test_a_container_that_is_given_away_twice_is_one() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        result = [s.l(x)]
        return result, result

    ours = ORTModule(Function(forward, l=nn.Linear(4, 4)))
    first, second = ours(torch.randn(3, 4))
    assert first is second


def test_a_copy_of_a_parameter_a_buffer_or_an_input_is_a_tensor_of_its_own() -> None:
    m = Function(lambda s, x: (s.l(x), s.l.weight.clone(), s.buffer.clone(), x.clone()), l=nn.Linear(4, 4))
    m.register_buffer("buffer", torch.ones(4))
    ours = ORTModule(m, ON_THE_FAST_WAY)
    x = torch.randn(3, 4)
    _, *copies = ours(x)
    before = [t.detach().clone() for t in copies]
    with torch.no_grad():
        for t in (m.l.weight, m.buffer, x):
            t.add_(1)
    close([t.detach() for t in copies], before)


def test_a_trace_leaves_pytorchs_classes_as_they_were() -> None:
    eager = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    ours = ORTModule(eager, ON_THE_FAST_WAY)
    x = torch.randn(3, 4)
    for cls in (fx.GraphModule, nn.Module, Tensor):
        before = dict(vars(cls))
        close(ours(x), eager(x))
        assert dict(vars(cls)) == before
    output = next(n for n in eager.graph.nodes if n.op == "output")
    for _ in range(3):
        with eager.graph.inserting_before(output):
            output.args = (eager.graph.call_function(torch.mul, (output.args[0], 2.0)),)
        eager.recompile()
        close(ours(x), eager(x))


def test_a_profiler_goes_on_after_a_trace() -> None:
    seen = []

    def profile(frame: Any, event: str, _argument: Any) -> None:
        seen.append(event)

    sys.setprofile(profile)
    try:
        ORTModule(nn.Linear(2, 2), ON_THE_FAST_WAY)(torch.randn(1, 2))
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert seen
