"""Mixtures of experts: rows in groups, each multiplied by matrices of its own, and how rows get into groups."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 (its ops)
from torch import Tensor, nn

from wrapped import BFLOAT16, Function, assert_same_step, assert_same_steps, close, pair

pytestmark = [pytest.mark.usefixtures("export_only"), pytest.mark.filterwarnings("error:ortmodule_c")]


def of_transformers(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


def of_pytorch(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, w, offs=ends)


def experts(grouped: Any, s: Function, x: Tensor, ids: Tensor) -> Tensor:
    """As transformers computes them, once it is decided which tokens go where."""
    order, perm = torch.sort(ids.flatten())
    counts = torch.histc(order.float(), bins=s.up.shape[0], min=0, max=s.up.shape[0] - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    rows = x[perm // ids.shape[1]].to(s.up.dtype)
    y = grouped(F.silu(grouped(rows, s.up.mT, ends)), s.down, ends)
    back = torch.empty_like(perm)
    back[perm] = torch.arange(perm.shape[0])
    return y[back].view(*ids.shape, -1).sum(1)


def mixture(grouped: Any, dtype: torch.dtype, width: int, wide: int) -> nn.Module:
    weights = {name: torch.randn(4, wide, width) / 3 for name in ("up", "down")}
    parameters = {name: nn.Parameter(w.to(dtype)) for name, w in weights.items()}
    return Function(lambda s, x, ids: experts(grouped, s, x, ids), **parameters)


@pytest.mark.parametrize("tokens", [5, 4, 1, 40])
def test_experts_of_transformers(tokens: int) -> None:
    module = mixture(of_transformers, torch.float32, 6, 9)
    calls = [(torch.randn(n, 6), torch.randint(0, 4, (n, 2))) for n in (tokens, tokens + 3)]
    ours = assert_same_steps(module, *calls, (torch.randn(6, 6), torch.full((6, 2), 2)))  # experts without a token
    assert not ours.fallback_report()


def test_experts_by_pytorchs_own_op() -> None:
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this PyTorch has no grouped_mm")
    eager, ours = pair(mixture(of_pytorch, torch.bfloat16, 8, 16))
    for n in (7, 12):
        assert_same_step(eager, ours, torch.randn(n, 8), torch.randint(0, 4, (n, 2)), rtol=8 * BFLOAT16)
    assert not ours.fallback_report()


@pytest.mark.parametrize("ends", [[2, 6], [3, 2]], ids=str)
def test_groups_that_end_where_there_is_nothing_are_left_to_pytorch(ends: list[int]) -> None:
    module = Function(lambda s, x, ends: of_transformers(x, s.w, ends), w=nn.Parameter(torch.randn(2, 3, 4)))
    eager, ours = pair(module)
    x, good = torch.randn(5, 3), torch.tensor([2, 4], dtype=torch.int32)
    assert_same_step(eager, ours, x, good)
    bad = torch.tensor(ends, dtype=torch.int32)
    with pytest.warns(UserWarning, match="of the groups is"):
        close(ours(x, bad), eager(x, bad))
    assert_same_step(eager, ours, x, good)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_histogram_counts_as_pytorch_does(dtype: torch.dtype) -> None:
    for bins, low, high in ((4, 0, 3), (7, -1.3, 2.9), (1, 0.1, 0.2), (100, 0, 1)):
        edges = torch.linspace(low, high, bins + 1, dtype=dtype)
        beside = [torch.nextafter(edges, edges + step) for step in (-1, 1)]
        odd = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
        x = torch.cat([torch.randn(200, dtype=dtype), edges, *beside, odd])
        module = Function(lambda s, x, b=bins, lo=low, hi=high: torch.histc(x, b, lo, hi))
        eager, ours = pair(module)
        assert torch.equal(ours(x), eager(x))
        assert not ours.fallback_report()


@pytest.mark.parametrize("trained", ["both", "source", "base"])
@pytest.mark.parametrize("dim", [0, -1])
def test_scatter_puts_the_last_and_every_element_has_a_gradient(trained: str, dim: int) -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        index = x.argsort(dim) // 2
        base = s.scale * x if trained != "source" else x
        source = (s.scale if trained != "base" else 3) * x.exp()
        return torch.scatter(base, dim, index, source) * s.scale

    module = Function(forward, scale=nn.Parameter(torch.tensor(2.0)))
    ours = assert_same_steps(module, *[(torch.randn(n, n),) for n in (3, 5)])
    assert not ours.fallback_report()


def test_rows_put_at_places_of_any_number() -> None:
    def forward(s: Function, x: Tensor, places: Tensor, values: Tensor) -> Tensor:
        y = s.scale * x
        y[places] = s.scale * values
        return y

    module = Function(forward, scale=nn.Parameter(torch.tensor(2.0)))
    ours = assert_same_steps(
        module,
        *[(torch.randn(n, 3), torch.randint(-n, n, (m,)), torch.randn(m, 3)) for n, m in ((4, 6), (9, 2), (3, 3))],
    )
    assert not ours.fallback_report()
    close(ours(torch.zeros(2, 3), torch.tensor([1, 1]), torch.ones(2, 3)), torch.tensor([[0.0] * 3, [2.0] * 3]))
