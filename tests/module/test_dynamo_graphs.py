"""What arrives in graphs of TorchDynamo: results, gradients and changes in place are those of eager."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn import functional as F

from by_dynamo import assert_same, compiled, x
from wrapped import BFLOAT16, close

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
    def chosen(t: Tensor) -> Tensor:
        return t.kthvalue(t.shape[0] - 2, 0).values

    ours = compiled(chosen, dynamic=True)
    with pytest.warns(UserWarning, match="aten"):
        for n in (3, 4, 5):
            given = x(n, 4)
            close(ours(given), chosen(given))


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


def sizes_as_a_tensor(t: Tensor) -> Tensor:
    return t * torch.tensor([t.shape[0], 2, 1.5, 3]).to(t.dtype)


def a_number_by_numpy(t: Tensor) -> Tensor:
    return t * int(np.ceil(t.shape[0] / 2)) + float(np.sqrt(4.0))


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
        sizes_as_a_tensor,
        a_number_by_numpy,
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


def clamped_without_gradients(t: Tensor) -> Tensor:
    h = t * 2
    with torch.no_grad():
        h.clamp_(0, 1)
    return h * 3


def clamped_through_data(t: Tensor) -> Tensor:
    h = t * 2
    h.data.clamp_(0, 1)
    return h * h


def data_put_in_place(t: Tensor) -> Tensor:
    h = t * 2
    h.data = h.detach().clamp(0, 1)
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


def jacobian(t: Tensor) -> Tensor:
    """Calls torch.vmap for gradients of what was computed before."""
    return torch.func.jacrev(lambda v: v * v * v)(t[0]) @ t.t()


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
        clamped_without_gradients,
        clamped_through_data,
        data_put_in_place,
        clamped_through_detach,
        in_inference_mode,
        requires_grad_set,
        transposed_in_place,
        vmapped,
        differentiated,
        jacobian,
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


def mapped_numbers(t: Tensor) -> Tensor:
    """A number takes part in the dtype of a product with what is one in each sample."""
    return torch.vmap(lambda row: row.sum() * 2 + 0.1)(t)


def scanned(t: Tensor) -> Tensor:
    def combined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return a[0] * b[0], b[0] * a[1] + b[1]

    _, states = associative_scan(combined, (t.sigmoid(), t), dim=1, combine_mode="generic")
    return states * 2


@pytest.mark.parametrize(
    "function",
    [vmapped, mapped_over_columns, mapped_in_a_map, mapped_products, mapped_one_of_two, mapped_numbers, scanned],
)
def test_vmap_is_the_ops_that_it_computes(function: Callable[..., Any]) -> None:
    assert assert_same(function, x(5, 7)) == []
    assert assert_same(function, x(5, 4), dynamic=True) == []


def lengths(t: Tensor) -> Tensor:
    """Of 16 bits in a region, and numbers as the sum is."""
    return torch.vmap(lambda row: torch.einsum("i,i->", row, row) + t.sum())(t)


def lengths_in_a_region(t: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return lengths(t)


@pytest.mark.filterwarnings("ignore:.*transforms functions")
def test_vmap_has_eagers_dtypes_under_autocast() -> None:
    assert_same(lengths_in_a_region, x(5, 7), rtol=BFLOAT16)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(lengths, x(5, 7), rtol=BFLOAT16)
    assert assert_same(lengths, x(5, 7)) == []


def scaled(t: Tensor) -> Tensor:
    """Rows of 16 bits and a number of 32 for each."""
    return torch.vmap(lambda row, by: row * by + by.exp())(t.bfloat16(), t[:, 0])


def test_vmap_that_autocast_has_no_part_in_is_the_ops_that_it_computes() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert assert_same(scaled, x(5, 7), rtol=BFLOAT16) == []
        assert assert_same(mapped_numbers, x(5, 7)) == []


def test_vmap_that_draws_runs_in_pytorch() -> None:
    def drawing(t: Tensor) -> Tensor:
        return torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(t)

    ours = compiled(drawing)
    with pytest.warns(UserWarning, match="vmap at .* runs in PyTorch: it transforms functions"):
        torch.manual_seed(3)
        got = ours(x())
    torch.manual_seed(3)
    assert got.count_nonzero() == drawing(x()).count_nonzero()


def test_what_is_written_through_data_is_written_in_c() -> None:
    def averaged(t: Tensor, mean: Tensor) -> Tensor:
        mean.data.mul_(0.9).add_(t.data.mean(0), alpha=0.1)
        return t * mean

    assert assert_same(averaged, x(), torch.ones(4)) == []


def test_a_question_whether_a_transform_is_active_has_an_answer() -> None:
    assert assert_same(lambda t: t * 2 if torch._C._are_functorch_transforms_active() else t * 3, x()) == []


@pytest.mark.filterwarnings("ignore:.*what its gradients need")
def test_what_gradients_need_is_written_through_data_as_in_eager() -> None:
    def halved(t: Tensor) -> Tensor:
        h = t * 2
        y = h * h
        h.data.mul_(0.5)
        return y

    assert_same(halved, x())


def test_what_is_refused_is_told_with_file_and_line() -> None:
    (told,) = assert_same(clamped_through_data, x())
    line = clamped_through_data.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} on runs in PyTorch: aten.clamp_.default changes in place" in told


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
