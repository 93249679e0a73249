"""What cannot become a graph runs in PyTorch, loudly, and as little of the module as possible."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError
from ortmodule_c.errors import NotExportable
from ortmodule_c.lowering import fallback
from ortmodule_c.lowering.fallback import Callbacks, TorchOp
from ortmodule_c.lowering.traced_types import traced_types
from wrapped import Function, assert_same_step, close, graphs, n_graphs, pair

pytestmark = pytest.mark.usefixtures("export_only")


def test_module_that_cannot_be_traced_runs_in_pytorch(capfd: pytest.CaptureFixture[str]) -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x) if x.sum() > 0 else -s.l(x), l=nn.Linear(2, 2)))
    with pytest.warns(UserWarning, match=rf"Function runs in PyTorch: .* values of a tensor at {__file__}:\d+"):
        ours(torch.ones(1, 2))
    assert capfd.readouterr().err == ""
    for value in (1.0, -1.0):
        assert_same_step(eager, ours, torch.full((1, 2), value))
    assert ours.fallback_report()[0].name == "Function"


def test_what_the_core_refuses_to_plan_runs_in_pytorch() -> None:
    eager, ours = pair(nn.LSTM(2, 2, num_layers=9, bidirectional=True, proj_size=1))
    with pytest.warns(UserWarning, match="LSTM runs in PyTorch: .* gradient of 93 inputs"):
        assert_same_step(eager, ours, torch.randn(2, 3, 2))
    assert_same_step(eager, ours, torch.randn(2, 3, 2))
    assert [g.runner for g in graphs(ours)] == [None]


def test_an_op_whose_results_are_not_as_traced_runs_in_pytorch() -> None:
    """PyTorch's tracer promises statistics in float32 where the op gives them in 16 bit."""

    def normalized(s: Function, x: torch.Tensor) -> Any:
        return torch._native_batch_norm_legit(x, s.weight, None, s.mean, s.var, True, 0.1, 1e-5)

    eager, ours = pair(Function(normalized, weight=nn.Parameter(torch.ones(3).bfloat16())))
    for m in (eager, ours.module):
        for name in ("mean", "var"):
            m.register_buffer(name, torch.ones(3).bfloat16())
    with pytest.warns(UserWarning, match="Function runs in PyTorch: .* traced as"):
        assert_same_step(eager, ours, torch.randn(2, 3, 4).bfloat16())
    assert_same_step(eager, ours, torch.randn(2, 3, 4).bfloat16())


def appends(s: Function, x: torch.Tensor, seen: list[Any]) -> torch.Tensor:
    seen.append(s.l(x))
    return s.l(x)


def fills(s: Function, x: torch.Tensor, seen: dict[str, Any]) -> torch.Tensor:
    seen["count"] = seen.get("count", 0) + 1
    return s.l(x)


@pytest.mark.parametrize(("forward", "kind"), [(appends, list), (fills, dict)])
def test_arguments_that_the_module_fills(forward: Any, kind: type) -> None:
    eager, ours = pair(Function(forward, l=nn.Linear(2, 2)))
    a, b, x = kind(), kind(), torch.ones(1, 2)
    with pytest.warns(UserWarning, match="among its arguments"):
        ours(x, b)
    ours(x, b)
    for _ in range(2):
        eager(x, a)
    close(b, a)


def test_tensors_from_outside_that_require_grad() -> None:
    outside = nn.Parameter(torch.ones(2))
    ours = ORTModule(Function(lambda s, x: s.l(x) * outside * s.hidden[0], l=nn.Linear(2, 2), hidden=[outside]))
    with pytest.warns(UserWarning, match="neither an argument nor a registered parameter"):
        ours(torch.ones(1, 2)).sum().backward()
    assert outside.grad is not None


def seeded(s: Function, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(42)
    return s.l(x) * torch.bernoulli(torch.full((4,), 0.5))


def seeded_apart(s: Function, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(42)
        y = s.l(x) * torch.bernoulli(torch.full((4,), 0.5))
    return y * torch.rand(4)


def forked(s: Function, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return s.l(x) * torch.rand(4)


def state_put_back(s: Function, x: torch.Tensor) -> torch.Tensor:
    torch.set_rng_state(s.state)
    return s.l(x) * torch.rand(4)


@pytest.mark.parametrize("forward", [seeded, seeded_apart, forked, state_put_back])
def test_a_forward_that_sets_the_random_state(forward: Any) -> None:
    torch.manual_seed(7)
    eager, ours = pair(Function(forward, l=nn.Linear(4, 4), state=torch.get_rng_state()))
    results = []
    for m in (eager, ours):
        torch.manual_seed(0)
        with pytest.warns(UserWarning) if m is ours else contextlib.nullcontext():
            results.append([m(torch.ones(1, 4)) for _ in range(3)] + [torch.rand(2)])
    close(results[1], results[0])


def test_op_without_kernel_runs_in_pytorch() -> None:
    eager, ours = pair(Function(lambda s, x: torch.cdist(s.l(x), x) * s.l(x).sum(), l=nn.Linear(4, 4)))
    with pytest.warns(UserWarning, match=r"aten\.cdist\.default runs in PyTorch") as caught:
        for _ in range(2):
            assert_same_step(eager, ours, torch.randn(3, 4))
    [told] = [w for w in caught if "cdist" in str(w.message)]
    assert told.filename == assert_same_step.__code__.co_filename  # the line that called the module
    assert [(r.name, r.count) for r in ours.fallback_report()] == [("aten.cdist.default", 1)]


def test_an_op_whose_results_nest_runs_in_pytorch() -> None:
    eager, ours = pair(Function(lambda s, x: torch.histogramdd(s.l(x).detach(), [2, 3]), l=nn.Linear(2, 2)))
    with pytest.warns(UserWarning, match=r"aten\.histogramdd\.default runs in PyTorch: no translation"):
        assert_same_step(eager, ours, torch.randn(5, 2))


def test_what_pytorch_does_not_make_functional_runs_in_pytorch() -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x).exp().add(1).polygamma_(0), l=nn.Linear(2, 2)))
    with pytest.warns(UserWarning, match="Function runs in PyTorch: it cannot be made functional: .*polygamma_"):
        assert_same_step(eager, ours, torch.randn(5, 2))


def test_clamp_between_tensors() -> None:
    """Who gets the gradient where bounds meet depends on the version of PyTorch."""
    corners = torch.tensor([-1.0, 0.0, 1.0])
    x, low, high = (nn.Parameter(t.reshape(-1)) for t in torch.meshgrid(corners, corners, corners, indexing="ij"))
    eager, ours = pair(Function(lambda s: s.x.clamp(s.low, s.high), x=x, low=low, high=high))
    with pytest.warns(UserWarning, match="clamp.Tensor runs in PyTorch"):
        assert_same_step(eager, ours)


def test_results_without_a_gradient_in_pytorch() -> None:
    eager, ours = pair(Function(lambda s, x: (torch.histc(s.l(x), 5), torch.cdist(s.l(x), x)), l=nn.Linear(4, 4)))
    histogram, _ = assert_same_step(eager, ours, torch.randn(3, 4))
    assert not histogram.requires_grad


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda s, x: s.l(x)[torch.where(x > 0)], "result of aten.where.default depends on the data"),
        (lambda s, x: s.l(x)[x > 0], "aten.index.Tensor depends on the data"),
        (lambda s, x: s.l(x).to(torch.float8_e5m2).float(), "a gradient would go through torch.float8_e5m2"),
    ],
)
@pytest.mark.parametrize("fallback", ["warn", "error"])
def test_where_in_the_forward_what_no_graph_holds_is(forward: Any, why: str, fallback: Any) -> None:
    ours = ORTModule(Function(forward, l=nn.Linear(2, 2)), DebugOptions(fallback=fallback))
    expected: Any = pytest.warns(UserWarning) if fallback == "warn" else pytest.raises(ORTModuleError)
    with expected as told:
        ours(torch.ones(2, 2))
    text = str(told.value) if fallback == "error" else " ".join(str(w.message) for w in told)
    assert re.search(rf"{re.escape(why)}, at \S+/wrapped\.py:\d+", text)


def test_where_in_a_layer_of_pytorchs_the_branch_is() -> None:
    ours = ORTModule(nn.Sequential(nn.BatchNorm1d(2, momentum=None)))
    with pytest.warns(UserWarning, match=r"values of a tensor at .*batchnorm\.py:\d+"):
        ours(torch.rand(3, 2))


def test_fallback_as_error() -> None:
    module = Function(lambda s, x: torch.cdist(s.l(x), x), l=nn.Linear(4, 4))
    ours = ORTModule(module, DebugOptions(fallback="error"))
    with pytest.raises(ORTModuleError, match="cdist"):
        ours(torch.randn(3, 4))
    untraceable = ORTModule(Function(lambda s, x: x if x.sum() > 0 else -x), DebugOptions(fallback="error"))
    with pytest.raises(ORTModuleError, match="values of a tensor"):
        untraceable(torch.randn(3))


REFUSED: dict[str, Callable[..., Any]] = {
    "reentrant checkpoint": lambda m, x: checkpoint(lambda r: (r * m.weight).sin(), x, use_reentrant=True),
    "hook": lambda m, x: _hooked(x * m.weight).sin(),
    "inference mode": lambda m, x: _inferred(x, m.weight).clone() + m.weight,
}


def _hooked(y: Tensor) -> Tensor:
    y.register_hook(lambda g: g * 5)
    return y


def _inferred(x: Tensor, weight: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * weight


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_would_lose_runs_in_pytorch(name: str) -> None:
    eager, ours = pair(Function(REFUSED[name], weight=nn.Parameter(torch.randn(4))))
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        assert_same_step(eager, ours, torch.randn(4, requires_grad=True))


def test_types_that_cannot_be_found_are_an_error_and_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    callbacks = Callbacks()
    callbacks.ops.append(
        TorchOp("a product", lambda tensors: [tensors[0] @ tensors[1]], (False, False), (), None, is_pytorchs=True)
    )
    with pytest.raises(NotExportable, match="the types of the results of a product cannot be found"):
        callbacks.infer(0, [("f32", (2, 3)), ("f32", (2, 3))])
    assert capfd.readouterr().err == ""


def resized(s: Function, x: Tensor) -> Tensor:
    """Halves, then the sizes of before again."""
    small = nn.functional.max_pool2d(s.conv(x), 2)
    return nn.functional.interpolate(small, size=x.shape[2:], mode="bilinear", antialias=True) * x


def highest_so_far(s: Function, x: Tensor) -> Tensor:
    return s.conv(x).cummax(-1).values


def chosen(s: Function, x: Tensor) -> Tensor:
    values, places = s.conv(x).flatten(1).kthvalue(x.shape[0] + 1)
    return values * places


@pytest.mark.parametrize("forward", [resized, highest_so_far, chosen])
def test_the_tracer_is_not_asked_again_for_each_size(forward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = pair(Function(forward, conv=nn.Conv2d(2, 2, 3, padding=1)))
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        for sizes in [(2, 2, 5, 6), (3, 2, 6, 7)]:
            assert_same_step(eager, ours, torch.randn(sizes))
    asked: list[TorchOp] = []
    monkeypatch.setattr("ortmodule_c.lowering.fallback._found", lambda op, *_: asked.append(op))
    known = n_graphs(ours)
    for sizes in [(4, 2, 4, 9), (2, 2, 8, 8), (7, 2, 7, 7), (3, 2, 4, 4)]:
        assert_same_step(eager, ours, torch.randn(sizes))
    assert not asked and n_graphs(ours) == known and all(g.runner for g in graphs(ours))


def test_types_of_results_are_kept_for_as_many_shapes_as_there_are_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what runs with others finds them again."""
    callbacks, asked, found = Callbacks(), Counter[Any](), fallback._found
    monkeypatch.setattr(fallback, "_found", lambda *of: asked.update([of[-1]]) or found(*of))
    callbacks.ops.append(TorchOp("a sum", lambda t: [t[0] + t[0]], (False,), (), None, is_pytorchs=True))
    for _ in range(2):
        for n in range(1, 17):
            callbacks.infer(0, [("f32", (n,))])
            callbacks.forward(0, [torch.ones(n)])
    assert set(asked.values()) == {1} and len(asked) == 16
    for n in range(17, 60):
        callbacks.infer(0, [("f32", (n,))])
    (sums,), _ = callbacks.forward(0, [torch.ones(3)])
    assert torch.equal(sums, torch.full((3,), 2.0)) and asked[("f32", (3,)),] == 2
    (results,) = callbacks._results.values()
    assert results.cache_info().currsize == 16


def test_what_types_follow_from_those_that_were_traced() -> None:
    env = ShapeEnv()
    n, m = (env.create_symintnode(env.create_symbol(k, ConstantSource(f"s{k}")), hint=k) for k in (5, 7))
    traced = traced_types([(torch.float32, (n, 2 * m, 4)), (torch.int64, (n,))], [(torch.bool, (n + 1, 2 * m, 3))])
    assert traced is not None
    assert traced.results_for([("f32", (3, 8, 4)), ("i64", (3,))]) == [("bool", (4, 8, 3))]
    for unlike in ([("f16", (3, 8, 4)), ("i64", (3,))], [("f32", (3, 8)), ("i64", (3,))]):
        assert traced.results_for(unlike) is None
    for unlike in ([("f32", (3, 8, 5)), ("i64", (3,))], [("f32", (3, 8, 4)), ("i64", (2,))]):
        assert traced.results_for(unlike) is None
    alone = traced_types([(torch.float32, (n * m,))], [(torch.float32, (n, m))])
    assert alone is not None and alone.results_for([("f32", (35,))]) is None
    assert traced_types([(torch.float32, None)], [(torch.float32, (n,))]) is None
    assert traced_types([(torch.float32, ())], [(torch.float32, ())]) is not None


def test_an_op_that_is_refused_for_its_dtype_is_told_of_once_for_all_sizes() -> None:
    ours = ORTModule(Function(lambda s, x, y: s.l(x) * ((y @ y.T) @ y).sum(), l=nn.Linear(3, 2)))
    with pytest.warns(UserWarning, match="matmul.default runs in PyTorch: .*i64, not floating point") as told:
        for n in (2, 4, 5):
            ours(torch.ones(n, 3), torch.ones(n, n + 1, dtype=torch.int64))
    assert len(told) == len(ours.fallback_report()) == 1


def test_anomaly_detection_finds_the_op() -> None:
    """It tells of functions of autograd, which PyTorch has one of for each op."""

    class Rooted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.sum() * 0).sqrt() * 0

    model = ORTModule(Rooted())
    x = torch.randn(3, requires_grad=True)
    for _ in range(2):
        model(x).backward()
        with (
            pytest.warns(UserWarning),
            torch.autograd.detect_anomaly(),
            pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan"),
        ):
            model(x).backward()
    assert model.stats()["graphs"] == 1
    assert [r.cause for r in model.fallback_report()] == ["as long as anomaly detection is on, which tells of each op"]


SAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "its operand": torch.lgamma,
    "its result": lambda x: torch.logcumsumexp(x, 0),
    "a view": lambda x: torch.cdist(x.t(), x[:, :3]).exp(),
    "one twice": lambda x: torch.linalg.solve(x @ x.t() + 9 * torch.eye(3), x),
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("way", ["plain", "saved on the CPU", "hooks forbidden", "twice"])
@pytest.mark.parametrize("name", SAVING)
def test_what_an_op_in_pytorch_saves(name: str, way: str) -> None:
    """Memory that it was lent is used again before the backward."""
    within: dict[str, Callable[[], Any]] = {
        "saved on the CPU": torch.autograd.graph.save_on_cpu,
        "hooks forbidden": lambda: torch.autograd.graph.disable_saved_tensors_hooks("forbidden"),
    }
    eager, ours = pair(Function(lambda s, x: s.l(SAVING[name](s.l(x).exp()).exp()), l=nn.Linear(3, 3)))
    x = torch.rand(3, 3)
    for m in (eager, ours):
        with within.get(way, contextlib.nullcontext)():
            y = m(x)
            m(x + 1)  # takes the memory
        for retains in [True, False] if way == "twice" else [False]:
            y.square().sum().backward(retain_graph=retains)
    close(ours.l.weight.grad, eager.l.weight.grad)
    assert [g.runner for g in graphs(ours)] != [None]
