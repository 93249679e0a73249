"""New sizes need no action: the second set of sizes makes a graph for all, where one can be made."""

import pytest
import torch
from torch import nn

from ortmodule_c import DebugOptions, ORTModule
from wrapped import Function, assert_same_step, graphs, n_graphs, pair


def net() -> nn.Module:
    return Function(
        lambda s, x: s.b(s.a(x).reshape(x.shape[0], -1, 2).transpose(1, 2).softmax(-1).mean(2)),
        a=nn.Linear(6, 8),
        b=nn.Linear(2, 3),
    )


def test_one_dynamic_graph_serves_all_later_sizes() -> None:
    eager, ours = pair(net())
    for n in (3, 5, 7, 2, 9):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 4, 6))
    assert n_graphs(ours) == 2
    for length in (8, 3):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(4, length, 6))
    assert n_graphs(ours) == 3


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)], ids=str)
def test_group_norms_of_any_batch(norm: nn.Module) -> None:
    eager, ours = pair(nn.Sequential(nn.Conv2d(2, 4, 3), norm))
    for n, side in ((3, 5), (2, 5), (4, 7), (5, 6)):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 2, side, side))
    assert n_graphs(ours) == 3


def test_an_empty_batch_leaves_running_statistics() -> None:
    eager, ours = pair(nn.BatchNorm2d(3))
    for n in (4, 0):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 3, 2, 2))


@pytest.mark.parametrize("sizes", [(3, 1, 5, 1), (1, 4, 2), (4, 0, 3)])
def test_sizes_zero_and_one(sizes: tuple[int, ...]) -> None:
    eager, ours = pair(nn.Sequential(nn.Linear(6, 4), nn.Tanh()))
    for n in sizes:
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 6))


def test_relations_between_sizes_are_checked() -> None:
    eager, ours = pair(Function(lambda s, x, y: s.l(x) + y, l=nn.Linear(4, 4)))
    for a, b in ((2, 2), (3, 3), (5, 5), (6, 1), (7, 7)):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(a, 4), torch.randn(b, 4))


def test_sizes_that_steer_the_module() -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x) * 2 if x.shape[0] > 4 else s.l(x) + x.shape[0], l=nn.Linear(4, 4)))
    for n in (2, 3, 6, 9, 4, 5):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 4))


def test_sizes_as_outputs_and_operands() -> None:
    eager, ours = pair(
        Function(lambda s, x: (s.l(x) / x.shape[0], x.shape[0] * 2, torch.arange(x.shape[0])), l=nn.Linear(4, 4))
    )
    for n in (2, 3, 6):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 4))


def test_cache_of_graphs_is_bounded() -> None:
    ours = ORTModule(nn.Linear(2, 2), DebugOptions(max_graphs=3))
    for rank in range(1, 8):
        ours(torch.randn(*[2] * rank))
    assert n_graphs(ours) == 3


def test_cache_of_plans_is_bounded() -> None:
    ours = ORTModule(nn.Linear(2, 2))
    for n in range(2, 60):
        ours(torch.randn(n, 2)).sum().backward()
    assert n_graphs(ours) == 2
    assert all(g.runner.session.stats()["plans_cached"] <= 16 for g in graphs(ours))


def test_backward_of_what_has_no_elements() -> None:
    def forward(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, x.argmax(1, keepdim=True)).split(1, -1)[0]

    assert_same_step(*pair(Function(forward)), torch.empty(0, 1, requires_grad=True))


def test_several_tensors_of_one_changing_size_have_one_open_graph() -> None:
    eager, ours = pair(Function(lambda m, x, y, z: (m.layer(x) * y).sum(1) * z, layer=nn.Linear(6, 6)))
    for n in (4, 3, 5, 6):
        assert_same_step(eager, ours, torch.randn(n, 6), torch.randn(n, 6), torch.randn(n))
    assert n_graphs(ours) == 2
