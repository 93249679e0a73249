"""index_add, scatter_add and index_put that accumulates, as graph networks have them, run in C."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from wrapped import Function, close, pair

IDS = torch.tensor([4, 0, 4, 2, 2, 2, 1, 0, 4])


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


Row = tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[int, ...], Tensor, tuple[int, ...]]
ROWS: dict[str, Row] = {
    "index_add": (lambda x, i, s: x.index_add(0, i, s), (5, 7), IDS, (9, 7)),
    "index_add, alpha": (lambda x, i, s: x.index_add(1, i, s, alpha=2.5), (3, 5, 7), IDS, (3, 9, 7)),
    "index_add, last dim": (lambda x, i, s: x.index_add(-1, i, s), (3, 5), IDS, (3, 9)),
    "index_add of numbers": (lambda x, i, s: x.index_add(0, i, s), (5,), IDS, (9,)),
    "index_add, int32": (lambda x, i, s: x.index_add(0, i.int(), s), (5, 2), IDS, (9, 2)),
    "index_add, one row": (lambda x, i, s: x.index_add(0, i[3], s), (5, 2), IDS, (1, 2)),
    "index_add, no row": (lambda x, i, s: x.index_add(0, i, s), (5, 2), IDS[:0], (0, 2)),
    "index_add in place": (lambda x, i, s: torch.zeros_like(x).index_add_(0, i, s), (5, 7), IDS, (9, 7)),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), (5, 7), ids(5, 9, 7), (9, 7)),
    "scatter_add, fewer lines": (lambda x, i, s: x.scatter_add(1, i, s), (5, 7), ids(7, 3, 11), (3, 11)),
    "scatter_add, equal sizes": (lambda x, i, s: x.scatter_add(0, i, s), (4, 4), ids(4, 4, 4), (4, 4)),
    "scatter_add, rows": (lambda x, i, s: x.scatter_add(0, i[:, None].expand(-1, 7), s), (5, 7), IDS, (9, 7)),
    "scatter_add, expand_as": (
        lambda x, i, s: x.scatter_add(1, i[None, :, None].expand_as(s), s),
        (3, 5, 7),
        IDS,
        (3, 9, 7),
    ),
    "scatter_add, parts of rows": (lambda x, i, s: x.scatter_add(0, i[:, None].expand(-1, 4), s), (5, 7), IDS, (9, 4)),
    **{
        f"{name}, {reduce}, {with_x}": (
            lambda x, i, s, f=f, reduce=reduce, with_x=with_x: f(x, i, s, reduce, with_x),
            (5, 7),
            IDS,
            (9, 7),
        )
        for name, f in (
            (
                "scatter_reduce",
                lambda x, i, s, r, w: x.scatter_reduce(0, i[:, None].expand(-1, 7), s, r, include_self=w),
            ),
            ("index_reduce", lambda x, i, s, r, w: x.index_reduce(0, i, s, r, include_self=w)),
        )
        for reduce in ("prod", "mean", "amax", "amin", *(["sum"] if name == "scatter_reduce" else []))
        for with_x in (True, False)
    },
    "gather, rows": (lambda x, i, s: s + x.gather(0, i[:, None].expand(-1, 7)), (5, 7), IDS, (9, 7)),
    "index_put": (lambda x, i, s: x.index_put((i,), s, accumulate=True), (5, 7), IDS, (9, 7)),
    "index_put, one for all": (lambda x, i, s: x.index_put((i,), s, accumulate=True), (5, 7), IDS, (7,)),
    "index_put, from the end": (
        lambda x, i, s: x.index_put((i.view(3, 3) - 5,), s, accumulate=True),
        (5, 7),
        IDS,
        (3, 3, 7),
    ),
    **{
        f"index_put of {name}, {accumulate}": (
            lambda x, i, s, at=at, accumulate=accumulate: torch.ops.aten.index_put(x, at(i), s, accumulate),
            (5, 4, 7),
            IDS,
            size,
        )
        for name, at, size in (
            ("two axes", lambda i: (i, (i * 3) % 4), (9, 7)),
            ("two axes, one for all", lambda i: (i, (i * 3) % 4), (7,)),
            ("two axes from the end", lambda i: (i - 5, (i % 4) - 4), (9, 7)),
            ("two axes of a table", lambda i: (i[:3, None], torch.arange(3)), (3, 3, 7)),
            ("the last axes", lambda i: (None, i % 4, i), (5, 9)),
            ("all axes", lambda i: (i[:3], i[:3] % 4, i[:3] + 1), (3,)),
            ("two axes, int32", lambda i: (i.int(), (i % 4).int()), (9, 7)),
        )
        for accumulate in (False, True)
    },
}


# Eager rounds after each number that is added.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    function, *shapes = ROWS[name]
    eager, ours = pair(Function(lambda m, x, i, s: function(m.w * x, i, m.w * s), w=nn.Parameter(torch.ones(()))))
    eager.to(dtype)
    ours.to(dtype)
    found = []
    for model in (eager, ours):
        x, s = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype) for shape in shapes[::2])
        x.requires_grad_()
        s.requires_grad_()
        y = model(x, shapes[1], s)
        y.square().sum().backward()
        found.append([y, x.grad, s.grad, model.w.grad])
    close(found[1], found[0], rtol=TOLERANCES[dtype])
    assert not ours.fallback_report()


@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("with_x", [True, False])
def test_equal_extremes_share_a_gradient_with_what_was_there(reduce: str, with_x: bool) -> None:
    eager, ours = pair(
        Function(
            lambda m, x, i, s: (m.w * x).scatter_reduce(0, i, m.w * s, reduce, include_self=with_x),
            w=nn.Parameter(torch.ones(())),
        )
    )
    found = []
    for model in (eager, ours):
        x = torch.tensor([0.0, 1.0, 5.0, -0.0, math.inf, math.nan, 2.0], requires_grad=True)
        s = torch.tensor([0.0, 0.0, 1.0, 7.0, 5.0, 0.0, math.inf, 3.0, 2.0], requires_grad=True)
        y = model(x, torch.tensor([0, 0, 1, 1, 2, 3, 4, 5, 5]), s)
        (y * torch.arange(1.0, 8.0)).nan_to_num(posinf=4.0).sum().backward()
        found.append([y, x.grad, s.grad])
    torch.testing.assert_close(found[1], found[0], equal_nan=True)
    assert not ours.fallback_report()


def test_any_number_of_nodes_and_edges_has_one_graph() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            sent = self.linear(x)[edges[0]]
            received = torch.zeros_like(x).index_add_(0, edges[1], sent)
            count = torch.zeros(x.shape[0]).scatter_add(0, edges[1], torch.ones(edges.shape[1]))
            return received / count.clamp(min=1)[:, None]

    eager, ours = pair(Layer())
    for n_nodes, n_edges in ((5, 9), (7, 7), (6, 30), (11, 3)):
        x, edges = torch.randn(n_nodes, 6), ids(n_nodes, 2, n_edges)
        for model in (eager, ours):
            model.zero_grad()
            model(x, edges).square().sum().backward()
        close(ours.linear.weight.grad, eager.linear.weight.grad)
    assert ours.stats()["graphs"] == 1 and not ours.fallback_report()


@pytest.mark.parametrize("bad", [5, -1])
@pytest.mark.parametrize("name", ["index_add", "scatter_add, rows", "gather, rows"])
def test_an_index_out_of_range_is_pytorchs_error(name: str, bad: int) -> None:
    function, x, i, s = ROWS[name]
    model = ORTModule(Function(lambda m, x, i, s: function(m.w * x, i, s), w=nn.Parameter(torch.ones(()))))
    said = []
    for module in (model.module, model, model):
        with pytest.raises(RuntimeError) as raised:
            module(torch.randn(x), torch.where(i == 1, bad, i), torch.randn(s))
        said.append(str(raised.value))
    assert said[0] == said[1] == said[2]
    model(torch.randn(x), i, torch.randn(s)).sum().backward()
    assert not model.fallback_report()


@pytest.mark.parametrize("bad", [5, -6])
@pytest.mark.parametrize("accumulate", [False, True])
def test_each_of_several_indices_is_within_its_axis(bad: int, accumulate: bool) -> None:
    eager, ours = pair(
        Function(
            lambda m, x, i, s: (m.w * x).index_put((i, i), s, accumulate=accumulate), w=nn.Parameter(torch.ones(()))
        )
    )
    for size in (5, 5, 6, 9):
        x, i, s = torch.randn(size, 9, 2), torch.arange(-3, size), torch.randn(size + 3, 2)
        for model in (eager, ours):
            model.zero_grad()
            model(x, i, s).square().sum().backward()
        close(ours.w.grad, eager.w.grad)
    for model in (eager, ours):
        with pytest.raises(IndexError, match=f"index {bad} is out of bounds"):
            model(torch.randn(5, 9, 2), torch.tensor([1, bad]), torch.randn(2, 2))
    assert ours.stats()["graphs"] == 1 and not ours.fallback_report()
