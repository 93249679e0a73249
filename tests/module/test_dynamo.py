"""``torch.compile(model, backend="ortmodule_c")``: what eager PyTorch computes, whatever arrives in Dynamo's graphs."""

import copy
import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ortmodule_c import ORTModuleError
from ortmodule_c.dynamo.backend import backend
from ortmodule_c.flatten import flatten
from wrapped import BFLOAT16, assert_same_state, close, float_sum, mlp

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend=backend, **kwargs)


def assert_trains_alike(model: nn.Module, sizes: list[tuple[int, ...]], **kwargs: Any) -> None:
    eager = copy.deepcopy(model)
    ours = compiled(model, **kwargs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model)]
    for size in sizes:
        x = torch.randn(*size)
        losses = [m(x).square().mean() for m in (eager, ours)]
        close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert_same_state(model, eager)
        for optimizer in optimizers:
            optimizer.step()


def assert_same(
    function: Callable[..., Any], *args: Any, runs: int = 2, rtol: float = 1e-4, **kwargs: Any
) -> list[str]:
    """Results, gradients and what is done to arguments are those of eager; gives the warnings."""
    ours = compiled(function, **kwargs)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(runs):
            given = [[_leaf(a) for a in args] for _ in range(2)]
            results = [function(*[_start(a) for a in given[0]]), ours(*[_start(a) for a in given[1]])]
            (expected, spec), (got, our_spec) = map(flatten, results)
            assert our_spec == spec
            for a, b in zip(expected, got, strict=True):
                close(b, a, rtol=rtol)
                assert (b.requires_grad, b.dtype, b._is_view()) == (a.requires_grad, a.dtype, a._is_view())
            if any(t.requires_grad for t in expected):
                float_sum(expected).backward()
                float_sum(got).backward()
            for a, b in zip(*given, strict=True):
                if isinstance(a, Tensor):
                    close(b.detach(), a.detach(), rtol=rtol)
                    assert (a.grad is None) == (b.grad is None)
                    if a.grad is not None:
                        close(b.grad, a.grad, rtol=rtol)
    return [str(w.message) for w in told if "ortmodule_c" in str(w.message)]


def _leaf(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _start(value: Any) -> Any:
    """An argument that may be changed in place."""
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4))).requires_grad_()


# The entrance


def test_backend_is_found_by_its_name() -> None:
    names = importlib.metadata.entry_points(group="torch_dynamo_backends").names
    assert "ortmodule_c" in names, "the installed package is older: pip install ."
    assert "ortmodule_c" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("ortmodule_c") is backend


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_training_equals_eager_for_all_sizes(dynamic: bool | None) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    assert_trains_alike(model, [(4, 6), (6, 6), (3, 6), (8, 6), (4, 6)], dynamic=dynamic, fullgraph=True)


def counted(function: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    """The function compiled, and a list of the graphs that are made of it."""
    made: list[Any] = []

    def counting(graph: Any, examples: Any) -> Any:
        made.append(graph)
        return backend(graph, examples)

    return torch.compile(function, backend=counting, **kwargs), made


def n_graphs_for(sizes: list[int], **kwargs: Any) -> int:
    model = mlp()
    ours, made = counted(model, **kwargs)
    for n in sizes:
        given = torch.randn(n, 6)
        close(ours(given), model(given))
        ours(given).sum().backward()
    return len(made)


def test_an_open_graph_serves_all_sizes() -> None:
    assert n_graphs_for([2, 3, 4, 5, 9]) == 2


def test_dynamic_true_needs_one_graph() -> None:
    assert n_graphs_for([2, 3, 4, 5, 9], dynamic=True) == 1


def test_dynamic_false_makes_a_graph_for_each_size() -> None:
    assert n_graphs_for([2, 3, 4, 2, 3], dynamic=False) == 3


def test_mark_dynamic() -> None:
    model = mlp()
    ours, made = counted(model)
    for n in (3, 5, 7):
        given = torch.randn(n, 6)
        torch._dynamo.mark_dynamic(given, 0)
        close(ours(given), model(given))
    assert len(made) == 1


def broken_twice(t: Tensor) -> Tensor:
    h = t * 2
    torch._dynamo.graph_break()
    h = h.sin()
    torch._dynamo.graph_break()
    return h.exp()


def test_several_graphs_are_all_in_c() -> None:
    assert assert_same(broken_twice, x()) == []
    torch._dynamo.reset()
    ours, made = counted(broken_twice)
    ours(x()).sum().backward()
    assert len(made) == 3


def test_explain_counts_graphs() -> None:
    found = torch._dynamo.explain(mlp())(torch.randn(2, 6))
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    torch._dynamo.reset()
    found = torch._dynamo.explain(broken_twice)(x())
    assert (found.graph_count, found.graph_break_count) == (3, 2)


def test_options_are_those_of_debug_options() -> None:
    ours = compiled(torch.special.i0, options={"fallback": "error"})
    with pytest.raises(ORTModuleError, match="falling back to PyTorch is off"):
        ours(x())


@pytest.mark.parametrize(
    ("name", "why"), [("fallbacks", "unknown, there are .*fallback, max_graphs"), ("verify", "for ORTModule")]
)
def test_options_that_there_are_not_are_named(name: str, why: str) -> None:
    ours = compiled(mlp(), options={name: 1})
    with pytest.raises(Exception, match=f"option {name} is {why}"):
        ours(torch.randn(2, 6))


def test_gradients_are_those_that_the_call_asks_for() -> None:
    model = mlp()
    ours = compiled(model)
    given = torch.randn(2, 6)
    with torch.no_grad():
        assert not ours(given).requires_grad
    with torch.inference_mode():
        assert ours(given).is_inference()
    assert ours(given).requires_grad
    model[0].weight.requires_grad_(False)
    ours(given).sum().backward()
    assert model[0].weight.grad is None and model[0].bias.grad is not None


# What arrives in the graphs


def test_a_branch_on_values_breaks_the_graph() -> None:
    def branching(t: Tensor) -> Tensor:
        h = t * 2
        return h.sin() if h.sum() > 0 else h.cos()

    assert assert_same(branching, x()) == []
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(branching, fullgraph=True)(x())


def test_numbers_may_change() -> None:
    def scaled(t: Tensor, by: float, n: int) -> Tensor:
        return t * by + n

    ours = compiled(scaled)
    given = x()
    for by, n in ((0.5, 1), (0.25, 2), (0.125, 3), (3.5, 4)):
        close(ours(given, by, n), scaled(given, by, n))


AS_SIZES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "zeros": lambda y, n: torch.zeros(n, 3) + y[:1],
    "ones": lambda y, n: y.sum() * torch.ones(n).sum(),
    "full": lambda y, n: y.new_full((n, 3), 2.0) * y[:1],
    "pad": lambda y, n: F.pad(y, (0, n)),
    "expand": lambda y, n: y[:1].expand(n, 3),
    "arange": lambda y, n: y.sum() * torch.arange(n),
    "slice": lambda y, n: y[:n],
}


@pytest.mark.parametrize("compute", AS_SIZES.values(), ids=AS_SIZES)
def test_a_number_that_is_a_size_gets_a_graph_for_each(
    compute: Callable[[Tensor, int], Tensor], recwarn: pytest.WarningsRecorder
) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(5, 3)
    compiled = torch.compile(lambda x, n: compute(layer(x), n), backend="ortmodule_c")
    for n in (2, 3, 4, 3):
        x = torch.randn(4, 5)
        close(compiled(x, n), compute(layer(x), n))
    assert not [w for w in recwarn if "runs in PyTorch" in str(w.message)]


def test_sizes_that_a_graph_must_know_get_one_each() -> None:
    def tiled(t: Tensor) -> Tensor:
        return F.pad(t[None], (t.shape[0] - 2, 0, 0, 0), mode="circular")

    ours = compiled(tiled, dynamic=True)
    with pytest.warns(UserWarning, match="aten"):
        for n in (3, 4, 5):
            given = x(n, 4)
            close(ours(given), tiled(given))


def changes_argument(t: Tensor) -> Tensor:
    t.mul_(2)
    t[0] = 5.0
    return t.sum()


def changes_through_a_view(t: Tensor) -> Tensor:
    h = t * 2
    h.view(-1)[1:3] = 7.0
    return h


def masks(t: Tensor) -> Tensor:
    h = t * 2
    h[h < 0] = 0
    return h


def aliases(t: Tensor) -> Any:
    h = t * 2
    return h, h.view(-1), h[0], t.view(-1), t


def sizes_and_none(t: Tensor) -> Any:
    return {"a": t.reshape(-1) * t.shape[0], "n": t.shape[0], "none": None, "plain": 3}


def no_grad_inside(t: Tensor) -> Tensor:
    with torch.no_grad():
        h = t * 2
    return h * t


def gradients_disabled_by_a_call(t: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    h = t * 2
    torch.set_grad_enabled(True)
    return h * t


def detached(t: Tensor) -> Tensor:
    return (t * 2).detach() + t


@pytest.mark.parametrize(
    "function",
    [
        changes_through_a_view,
        masks,
        aliases,
        sizes_and_none,
        no_grad_inside,
        gradients_disabled_by_a_call,
        detached,
    ],
)
def test_runs_in_c(function: Callable[..., Any]) -> None:
    assert assert_same(function, x()) == []
    assert assert_same(function, x(5, 4), dynamic=True) == []


def test_arguments_are_changed_in_place() -> None:
    assert assert_same(changes_argument, torch.randn(3, 4)) == []


def test_an_argument_with_gradients_is_changed_in_place() -> None:
    assert_same(changes_argument, x())


def test_arguments_that_share_memory_are_changed_as_one() -> None:
    def change(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return a + b

    ours = compiled(change)
    for shared in (False, True, False):
        base = [torch.arange(6.0) for _ in range(2)]
        other = [b if shared else b.clone() for b in base]
        close(ours(base[0][:4], other[0][2:]), change(base[1][:4], other[1][2:]))
        close(base[0], base[1])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return t**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (t,) = ctx.saved_tensors
        return grad * 7 * t  # not the derivative


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.mark_dirty(t)
        return t.mul_(2)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def custom_function(t: Tensor) -> Tensor:
    return Cube.apply(t * 2).sin()


def custom_function_that_writes(t: Tensor) -> Tensor:
    return Doubled.apply(t * 1) + 1


def hooked(t: Tensor) -> Tensor:
    h = t * 2
    h.register_hook(lambda grad: grad * 10)
    return h.sin()


def checkpointed(t: Tensor) -> Tensor:
    return checkpoint(lambda v: torch.tanh(v) * 2, t, use_reentrant=False) + t


def checkpointed_reentrant(t: Tensor) -> Tensor:
    return checkpoint(lambda v: torch.tanh(v) * 2, t, use_reentrant=True) + t


def clamped_without_gradients(t: Tensor) -> Tensor:
    h = t * 2
    with torch.no_grad():
        h.clamp_(0, 1)
    return h * 3


def clamped_through_data(t: Tensor) -> Tensor:
    h = t * 2
    h.data.clamp_(0, 1)
    return h * h


def clamped_through_detach(t: Tensor) -> Tensor:
    h = t * 2
    h.detach().clamp_(0, 1)
    return h * h


def in_inference_mode(t: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = t.detach().sum().item()
    return t * scale


def requires_grad_set(t: Tensor) -> Tensor:
    h = (t.detach() * 2).requires_grad_()
    return (h * t).sum()


def transposed_in_place(t: Tensor) -> Tensor:
    h = t * 2
    h.t_()
    return h


def vmapped(t: Tensor) -> Tensor:
    return torch.vmap(lambda row: (row * row).sum())(t) + t.sum()


def differentiated(t: Tensor) -> Tensor:
    return torch.func.grad(lambda v: (v * v * v).sum())(t) * 2


def conditional(t: Tensor) -> Tensor:
    return torch.cond(t.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (t,))


def seeds(t: Tensor) -> Tensor:
    torch.manual_seed(5)
    return t + torch.rand(3, 4)


def of_data_dependent_size(t: Tensor) -> Tensor:
    return t[t > 0] * 2


@pytest.mark.parametrize(
    "function",
    [
        custom_function,
        custom_function_that_writes,
        hooked,
        checkpointed,
        checkpointed_reentrant,
        clamped_without_gradients,
        clamped_through_data,
        clamped_through_detach,
        in_inference_mode,
        requires_grad_set,
        transposed_in_place,
        vmapped,
        differentiated,
        conditional,
        seeds,
        of_data_dependent_size,
    ],
)
def test_is_kept_or_broken_out(function: Callable[..., Any]) -> None:
    assert_same(function, x())


def mapped_over_columns(t: Tensor) -> Tensor:
    return torch.vmap(lambda a, b: a * b.exp(), in_dims=(1, 0), out_dims=1)(t, t.t()) * 2


def mapped_in_a_map(t: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.vmap(lambda v: v * row.sum())(row))(t)


def mapped_products(t: Tensor) -> Tensor:
    return torch.vmap(lambda row: (t @ row).softmax(0))(t)


def mapped_one_of_two(t: Tensor) -> Tensor:
    return torch.vmap(lambda row, whole: row + whole.mean(0), in_dims=(0, None))(t, t) * 2


def scanned(t: Tensor) -> Tensor:
    def combined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return a[0] * b[0], b[0] * a[1] + b[1]

    _, states = associative_scan(combined, (t.sigmoid(), t), dim=1, combine_mode="generic")
    return states * 2


@pytest.mark.parametrize(
    "function", [vmapped, mapped_over_columns, mapped_in_a_map, mapped_products, mapped_one_of_two, scanned]
)
def test_vmap_is_the_ops_that_it_computes(function: Callable[..., Any]) -> None:
    assert assert_same(function, x(5, 7)) == []
    assert assert_same(function, x(5, 4), dynamic=True) == []


def test_vmap_that_draws_runs_in_pytorch() -> None:
    def drawing(t: Tensor) -> Tensor:
        return torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(t)

    ours = compiled(drawing)
    with pytest.warns(UserWarning, match="vmap at .* runs in PyTorch: it transforms functions"):
        torch.manual_seed(3)
        got = ours(x())
    torch.manual_seed(3)
    assert got.count_nonzero() == drawing(x()).count_nonzero()


def test_what_is_refused_is_told_with_file_and_line() -> None:
    (told,) = assert_same(clamped_through_data, x())
    line = clamped_through_data.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} on runs in PyTorch: the graph calls _get_data_attr" in told


def test_only_the_graph_that_is_refused_runs_in_pytorch() -> None:
    def two_graphs(t: Tensor) -> Tensor:
        h = clamped_through_data(t)
        torch._dynamo.graph_break()
        return h.exp()

    told = assert_same(two_graphs, x())
    assert len(told) == 1


def test_autocast_around_and_inside() -> None:
    layer = nn.Linear(4, 4)

    def inside(t: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = layer(t)
        return h.float() * 2

    assert_same(inside, x(), rtol=BFLOAT16)
    ours = compiled(layer)
    given = x()
    assert ours(given).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ours(given).dtype == torch.bfloat16
        close(ours(given).float(), layer(given).float())


def test_dropout_draws_by_pytorchs_seed() -> None:
    ours = compiled(lambda t: F.dropout(t, 0.5))
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(ours(torch.ones(64)))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


# Errors


def test_errors_are_the_users() -> None:
    def raises(t: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compiled(raises)(x())


def test_an_index_out_of_range_is_pytorchs_error(capfd: pytest.CaptureFixture[str]) -> None:
    table = nn.Embedding(3, 4)
    ours = compiled(table)
    for _ in range(2):
        with pytest.raises(IndexError, match="index out of range"):
            ours(torch.tensor([3]))
    assert capfd.readouterr().err == ""
    close(ours(torch.tensor([2])), table(torch.tensor([2])))


def test_double_backward_is_refused() -> None:
    given = x()
    (grad,) = torch.autograd.grad(compiled(lambda t: (t**3).sum())(given), given, create_graph=True)
    with pytest.raises(ORTModuleError, match="differentiate its gradients"):
        grad.sum().backward()


# Calls that hold functions of their own


def dropped_in_checkpoint(t: Tensor) -> Tensor:
    return checkpoint(lambda v: F.dropout(v, 0.5) * v, t, use_reentrant=False) * 1


def test_a_checkpoint_draws_the_same_numbers_again() -> None:
    given = torch.ones(64, requires_grad=True)
    out = compiled(dropped_in_checkpoint)(given)
    out.sum().backward()
    close(given.grad, out * 2)  # of v * v / 0.5 where it is kept


def test_a_checkpoint_holds_what_eagers_does() -> None:
    def layers(t: Tensor) -> Tensor:
        for _ in range(3):
            t = checkpoint(lambda v: torch.tanh(v) * v.sin() * v.exp(), t, use_reentrant=False)
        return t

    assert assert_same(layers, x()) == []
    held: list[list[int]] = [[], []]
    for function, sizes in zip((layers, compiled(layers)), held, strict=True):

        def pack(t: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            function(x())
    assert sum(held[1]) == sum(held[0]) == 3 * 12


def test_what_is_around_such_calls_runs_in_c() -> None:
    for function in (hooked, checkpointed):
        assert not any("the graph" in told for told in assert_same(function, x()))
    (told,) = assert_same(custom_function, x())
    line = custom_function.__code__.co_firstlineno + 1
    assert f"autograd_function_apply at {__file__}:{line} runs in PyTorch" in told


def test_numbers_reach_what_is_around_such_calls() -> None:
    def scaled(t: Tensor, by: float) -> Tensor:
        return checkpoint(lambda v: v.sin() * by, t * by, use_reentrant=False) + by

    ours = compiled(scaled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for by in (0.5, 0.25, 3.0):
            given = x()
            close(ours(given, by), scaled(given, by))


def test_constants_are_in_the_parts_too() -> None:
    def masked(t: Tensor) -> Tensor:
        h = t * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.ones(4).cumsum(0)
        h = checkpoint(lambda v: v[:, torch.tensor([0, 2])].sin(), h, use_reentrant=False)
        return h.masked_fill(torch.tensor([True, False]), 7.0)

    assert assert_same(masked, x()) == []


def test_each_run_of_a_custom_function_has_its_own_backward() -> None:
    ours = compiled(custom_function)
    given = [x(), x()]
    losses = [ours(t).sum() for t in given]
    for t, loss in zip(given, losses, strict=True):
        loss.backward()
        again = t.detach().requires_grad_()
        custom_function(again).sum().backward()
        close(t.grad, again.grad)


def test_a_call_inside_a_region_takes_its_graph_to_pytorch() -> None:
    def inside(t: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = Cube.apply(t * 2)
        return h * t

    (told,) = assert_same(inside, x())
    assert "autograd_function_apply" in told
