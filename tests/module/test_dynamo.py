"""``torch.compile(model, backend="ortmodule_c")``: the name, sizes and options that it takes, and errors."""

import copy
import importlib.metadata
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from by_dynamo import assert_same, compiled, counted, x
from ortmodule_c import ORTModuleError
from ortmodule_c.dynamo.backend import backend
from wrapped import assert_same_state, close, mlp

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


def test_backend_is_found_by_its_name() -> None:
    names = importlib.metadata.entry_points(group="torch_dynamo_backends").names
    assert "ortmodule_c" in names, "the installed package is older: pip install ."
    assert "ortmodule_c" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("ortmodule_c") is backend


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_training_equals_eager_for_all_sizes(dynamic: bool | None) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    assert_trains_alike(model, [(4, 6), (6, 6), (3, 6), (8, 6), (4, 6)], dynamic=dynamic, fullgraph=True)


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
