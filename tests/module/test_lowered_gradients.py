"""Gradients flow through a graph as through PyTorch: to the same operands, by its formulas, and never raise."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c.lowering.translations.registry import is_composite
from wrapped import Function, assert_same_step, pair

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*runs in PyTorch")  # that is fine here


def of_linear(function: Callable[[Tensor], Any]) -> Function:
    return Function(lambda s, x: function(s.l(x)), l=nn.Linear(4, 4))


def of_parameter(value: Tensor, function: Callable[[Tensor, Tensor], Any]) -> Function:
    """A function of a linear layer's output and of a parameter that may be left without a gradient."""
    return Function(lambda s, x: function(s.l(x), s.p), l=nn.Linear(4, 4), p=nn.Parameter(value))


WRITTEN_OVER: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(2.0),
    "copy_": lambda y: y.copy_(torch.ones(4)),
    "all of a slice": lambda y: y.slice_scatter(torch.ones(3, 4)),
    "through a view": lambda y: (y[:2].zero_(), y)[1],
    "beside a use": lambda y: (y * 2, y.zero_()),
}


@pytest.mark.parametrize("function", WRITTEN_OVER.values(), ids=WRITTEN_OVER)
def test_what_is_written_over_gets_a_gradient_of_zeros(function: Callable[[Tensor], Any]) -> None:
    """And so does what it was made of: an optimizer with momentum or decay tells zeros from none."""
    assert_same_step(*pair(of_linear(function)), torch.randn(3, 4))


REACHED: dict[str, Function] = {
    "quantile, positions": of_parameter(torch.rand(4), torch.quantile),
    "empty operand of cat": of_parameter(torch.rand(0), lambda y, p: torch.cat([p, y[0]])),
    "grid of nearest samples": of_parameter(
        torch.rand(1, 2, 2, 2), lambda y, p: F.grid_sample(y[None, None], p, mode="nearest", align_corners=False)
    ),
    "norm of order 0": of_parameter(torch.rand(4), lambda y, p: (y, torch.linalg.vector_norm(p, 0))),
    "no reflectors": of_parameter(torch.rand(4, 4), lambda y, p: (y, torch.linalg.householder_product(p, y[0, :0]))),
    "choice by a constant": of_parameter(torch.rand(4), lambda y, p: torch.where(torch.tensor(True), y, p)),
    "cut off": of_parameter(torch.rand(2, 4), lambda y, p: torch.cat([y, p])[:3]),
    "rounded": of_parameter(torch.rand(4), lambda y, p: y + p.round() + p.sign()),
    "compared": of_parameter(torch.rand(4), lambda y, p: y * (p > 0.5)),
    "only its shape": of_parameter(torch.rand(4), lambda y, p: y + torch.zeros_like(p)),
    "statistics of layer norm": of_parameter(
        torch.rand(4), lambda y, p: (torch.native_layer_norm(y, (4,), p, None, 1e-5), torch.var_mean(y))
    ),
    "statistics of layer norm, used": of_parameter(
        torch.rand(4), lambda y, p: torch.native_layer_norm(y * p, (4,), None, None, 1e-5)[1] + y
    ),
    "hinge of targets": of_parameter(torch.ones(4), F.hinge_embedding_loss),
}


@pytest.mark.parametrize("module", REACHED.values(), ids=REACHED)
def test_gradients_reach_what_they_reach_in_pytorch(module: Function) -> None:
    eager, ours = pair(module)
    for n in (3, 3, 4, 5):
        assert_same_step(eager, ours, torch.randn(n, 4))


ONE = torch.tensor(1)


HALF: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "batch norm": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh()), (2, 3, 5, 5)),
    "batch norm in eval": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()), (2, 3, 5, 5)),
    "instance norm": (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (2, 3, 5, 5)),
    "weighted cross entropy": (of_linear(lambda y: F.cross_entropy(y, ONE.repeat(3), y.new_ones(4))), (3, 4)),
    "weighted nll": (of_linear(lambda y: F.nll_loss(y, ONE.repeat(3), y.new_ones(4))), (3, 4)),
    "weighted bce": (of_linear(lambda y: F.binary_cross_entropy(y.sigmoid(), y.new_ones(3, 4), y.new_ones(4))), (3, 4)),
}


def assert_close_in_half(eager: nn.Module, ours: nn.Module, x: Tensor) -> None:
    results = []
    for m in (eager, ours):
        out = m(x)
        out.float().sum().backward()
        results.append([out, *[p.grad for p in m.parameters()], *m.buffers()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", HALF.values(), ids=HALF)
def test_half_precision(row: tuple[nn.Module, tuple[int, ...]], dtype: torch.dtype) -> None:
    module, shape = row
    eager, ours = pair(copy.deepcopy(module).to(dtype))
    for _ in range(2):
        assert_close_in_half(eager, ours, torch.randn(shape).to(dtype))


@pytest.mark.parametrize("row", [HALF["batch norm"], HALF["batch norm in eval"]], ids=["train", "eval"])
def test_batch_norm_under_autocast(row: tuple[nn.Module, tuple[int, ...]]) -> None:
    eager, ours = pair(row[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert_close_in_half(eager, ours, torch.randn(row[1]))


SAMPLES = torch.rand(2, 3, 2)


UNASKED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "fractional pooling": (
        Function(
            lambda s, x: F.fractional_max_pool2d(s.l(x), 2, output_size=2, _random_samples=SAMPLES),
            l=nn.Conv2d(3, 3, 1),
        ),
        (2, 3, 5, 5),
    ),
    "nll of one sample": (of_linear(lambda y: F.nll_loss(y[0], ONE, torch.ones(4))), (3, 4)),
    "pinv with a tolerance": (
        of_linear(lambda y: torch.linalg.pinv(y + 4 * torch.eye(3, 4), rtol=torch.tensor(0.1))),
        (3, 4),
    ),
    "statistics given away": (
        Function(
            lambda s, x: torch.native_batch_norm(s.l(x), None, None, s.m, s.v, True, 0.2, 1e-5)[0],
            l=nn.Conv2d(3, 3, 1),
            m=nn.Buffer(torch.zeros(3)),
            v=nn.Buffer(torch.ones(3)),
        ),
        (2, 3, 4, 4),
    ),
    "margin loss of one sample": (
        of_linear(lambda y: F.multilabel_margin_loss(y[0], torch.tensor([1, -1, 0, 0]))),
        (3, 4),
    ),
    "margin loss of one sample, not reduced": (
        of_linear(lambda y: F.multilabel_margin_loss(y[0], torch.tensor([1, -1, 0, 0]), reduction="none")),
        (3, 4),
    ),
}


@pytest.mark.parametrize("row", UNASKED.values(), ids=UNASKED)
def test_operands_that_can_have_no_gradient_are_not_asked_for_one(row: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, shape = row
    eager, ours = pair(module)
    for _ in range(2):
        assert_same_step(eager, ours, torch.randn(shape))


def test_lstm_at_several_lengths() -> None:
    eager, ours = pair(nn.LSTM(4, 3))
    for length in (5, 6, 7, 6):
        assert_same_step(eager, ours, torch.randn(length, 2, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.t().as_strided((2, 2), (1, 2)),
        lambda y: y.t().contiguous().as_strided((2, 2), (1, 2), 1),
        lambda y: torch.as_strided_scatter(y, y[0, :2].detach(), (2,), (1,)),
    ],
    ids=["view", "offset", "scatter"],
)
def test_ops_that_read_memory_keep_the_module_in_pytorch(function: Callable[[Tensor], Tensor]) -> None:
    assert_same_step(*pair(of_linear(function)), torch.randn(3, 4))


UNHELD: dict[str, Callable[[Tensor], Any]] = {
    "sparse tensors": lambda y: y.to_sparse().to_dense() * 2,
    "sizes that depend on values": lambda y: (y, y.detach()[:0].nonzero()),
    "local response norm over maps": lambda y: nn.CrossMapLRN2d(2)(y.view(1, 3, 2, 2)),
}


@pytest.mark.parametrize("function", UNHELD.values(), ids=UNHELD)
def test_what_no_graph_can_hold_keeps_the_module_in_pytorch(function: Callable[[Tensor], Any]) -> None:
    assert_same_step(*pair(of_linear(function)), torch.randn(3, 4))


NEEDING_ELEMENTS: dict[str, Callable[[Tensor], Any]] = {
    "largest of all": lambda y: y.max(),
    "median": lambda y: y.median(1).values,
    "quantile": lambda y: y.quantile(0.3, 1),
    "pooling": lambda y: F.max_pool2d(y.view(1, 3, 2, 2), 2),
    "resized": lambda y: F.interpolate(y[None, None], size=(5, 6), mode="bicubic"),
    "solved": lambda y: torch.linalg.solve(y[:, :3] + 4 * torch.eye(3), y),
    "determinant": lambda y: torch.linalg.slogdet(y[:, :3] + 4 * torch.eye(3)),
}


@pytest.mark.parametrize("function", NEEDING_ELEMENTS.values(), ids=NEEDING_ELEMENTS)
def test_ops_that_refuse_empty_operands_have_their_gradients(function: Callable[[Tensor], Any]) -> None:
    assert_same_step(*pair(of_linear(function)), torch.randn(3, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_are_not_summed_in_half_precision(dtype: torch.dtype) -> None:
    """Adding 1 to 2048 gives 2048 there."""
    eager, ours = pair(Function(lambda s, x: x + s.bias, bias=nn.Parameter(torch.zeros(3, dtype=dtype))))
    for m in (eager, ours):
        m(torch.zeros(5000, 3, dtype=dtype)).sum(0).sum().backward()
    assert torch.equal(ours.bias.grad, eager.bias.grad) and ours.bias.grad[0] > 4900


def test_a_grid_of_half_precision_takes_the_samples_of_pytorch() -> None:
    x = torch.arange(64.0).view(1, 1, 8, 8).bfloat16()
    grid = (torch.rand(1, 30, 30, 2) * 2.2 - 1.1).bfloat16()
    eager, ours = pair(Function(lambda _, x, g: F.grid_sample(x, g, mode="nearest", align_corners=False)))
    assert torch.equal(ours(x, grid), eager(x, grid))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_embedding_bag(mode: str, last: bool) -> None:
    arguments = [torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 4]), torch.rand(4)]
    for n in (2, 3) if mode == "sum" else (2,):
        assert_same_step(*pair(nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=last)), *arguments[:n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean"},
        {"mode": "sum", "padding_idx": 2},
        {"mode": "mean", "padding_idx": -1},
        {"mode": "mean", "include_last_offset": True},
    ],
    ids=str,
)
def test_embedding_bag_in_c(options: dict, dtype: torch.dtype) -> None:
    """Empty bags, repeated ids, and bags of equal length given as a matrix."""
    ids, offsets = torch.tensor([1, 2, 5, 2, 2, 0, 1]), torch.tensor([0, 2, 2, 7])
    eager, ours = pair(nn.EmbeddingBag(6, 3, dtype=dtype, **options))
    for arguments in ((ids, offsets), (ids.int(), offsets.int()), (ids[:6].view(2, 3),)):
        if not (len(arguments) == 1 and options.get("include_last_offset")):
            assert_same_step(eager, ours, *arguments)
    assert ours.fallback_report() == []


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag_of_halves_is_summed_in_float(mode: str) -> None:
    """And rounded once."""
    bag, ours = pair(nn.EmbeddingBag(6, 3, mode=mode, dtype=torch.bfloat16))
    ids = torch.arange(300).view(1, 300) % 6
    torch.testing.assert_close(ours(ids), bag.float()(ids).bfloat16())


def test_embedding_bag_weighted() -> None:
    ids, offsets = torch.tensor([1, 2, 5, 2, 2, 0, 1]), torch.tensor([0, 2, 2, 7])
    eager, ours = pair(nn.EmbeddingBag(6, 3, mode="sum"))
    weights = [torch.linspace(-1, 2, 7, requires_grad=True) for _ in range(2)]
    for net, w in zip((eager, ours), weights, strict=True):
        net(ids, offsets, w).square().sum().backward()
    torch.testing.assert_close(weights[1].grad, weights[0].grad)
    torch.testing.assert_close(ours.weight.grad, eager.weight.grad)
    assert ours.fallback_report() == []


@pytest.mark.parametrize("offsets", [[1, 2], [0, 9]])
def test_embedding_bag_of_bad_offsets(offsets: list[int]) -> None:
    eager, ours = pair(nn.EmbeddingBag(6, 3, mode="sum"))
    ids = torch.tensor([1, 2, 5])
    for net in (eager, ours):
        with pytest.raises((RuntimeError, ValueError, IndexError), match="offsets"):
            net(ids, torch.tensor(offsets))
    assert_same_step(eager, ours, ids, torch.tensor([0, 1]))


def test_loss_of_log_probabilities_that_changed_since() -> None:
    """What log_softmax was taken of may be another tensor by the time of the loss."""

    def forward(y: Tensor) -> Tensor:
        y = y * 1
        p = y.log_softmax(1)
        y.mul_(3)
        return F.nll_loss(p, torch.tensor([0, 1, 3]))

    assert_same_step(*pair(of_linear(forward)), torch.randn(3, 4))


NAME = 'a"b\\c\n\x00\u2028\x1b#é'


def test_names_of_submodules_may_be_any_text() -> None:
    layers = nn.ModuleDict({NAME: nn.Linear(4, 4)})
    assert_same_step(*pair(Function(lambda s, x: s.layers[NAME](x).relu(), layers=layers)), torch.randn(3, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y[None, :1].squeeze(()),
        lambda y: (y.sum([]), y.mean([]), y.amax(()), y.amin([])),
        lambda y: (y, (y > 0).any([]), (y > 0).all([]), (y > 0).all((0, 1))),
        lambda y: (torch.linalg.vector_norm(y, dim=[]), y.flip([]), y.permute((1, 0)), torch.sum(y, [], keepdim=True)),
    ],
    ids=["squeeze", "reductions", "truth", "others"],
)
def test_an_empty_list_of_dims(function: Callable[[Tensor], Any]) -> None:
    assert_same_step(*pair(of_linear(function)), torch.randn(2, 4))


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "rms norm": lambda y: F.rms_norm(y, (4,), torch.ones(4, dtype=torch.float64)),
    "bce with logits": lambda y: F.binary_cross_entropy_with_logits(y, torch.ones(3, 4, dtype=torch.float64)),
    "lerp": lambda y: torch.lerp(y, y.detach(), 0.5).double() + y,
    "logsumexp of integers": lambda y: y + torch.logsumexp((y.detach() * 3).long(), 1, keepdim=True),
    "clamp by another dtype": lambda y: y.clamp(min=torch.zeros(4, dtype=torch.float64)),
    "attention of no features": lambda y: F.scaled_dot_product_attention(
        y[None, :, :0], y[None, :, :0], y[None, :, :0]
    ),
}


@pytest.mark.parametrize("function", MIXED.values(), ids=MIXED)
def test_mixed_dtypes(function: Callable[[Tensor], Any]) -> None:
    assert_same_step(*pair(of_linear(function)), torch.randn(3, 4))


def test_probabilities_of_another_dtype_than_their_targets_are_refused_as_in_pytorch() -> None:
    targets = torch.ones(3, 4, dtype=torch.float64)
    for m in pair(of_linear(lambda y: F.binary_cross_entropy(y.sigmoid(), targets))):
        with pytest.raises(RuntimeError, match="Found dtype Double but expected Float"):
            m(torch.randn(3, 4)).backward()


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_labels_of_a_dtype_that_pytorch_refuses(loss: Callable[..., Tensor]) -> None:
    for m in pair(of_linear(lambda y: loss(y, torch.zeros(3, dtype=torch.int32)))):
        with pytest.raises(RuntimeError, match="Long"):
            m(torch.randn(3, 4))


def test_composite_ops_are_those_that_pytorch_differentiates_through() -> None:
    assert all(map(is_composite, (aten.einsum.default, aten.selu.default, aten.upsample_nearest2d.vec)))
    assert not any(map(is_composite, (aten._safe_softmax.default, aten.mish.default, aten.linalg_vector_norm.default)))


def test_masked_rows_have_the_gradient_of_pytorch() -> None:
    mask = torch.tensor([[True], [False], [False]])
    assert_same_step(
        *pair(of_linear(lambda y: aten._safe_softmax(y.masked_fill(mask, -torch.inf), 1))), torch.randn(3, 4)
    )


@pytest.mark.parametrize("label", [-1, 4, -99])
@pytest.mark.parametrize(
    "loss",
    [
        F.nll_loss,
        lambda y, t: F.nll_loss(y.log_softmax(1), t),
        lambda y, t: F.nll_loss(y, t, torch.ones(4), reduction="none"),
        F.cross_entropy,
    ],
    ids=["nll", "nll of log softmax", "weighted nll", "cross entropy"],
)
def test_labels_out_of_range_are_refused(loss: Callable[..., Tensor], label: int) -> None:
    for m in pair(Function(lambda s, x, t: loss(s.l(x), t), l=nn.Linear(4, 4))):
        with pytest.raises(IndexError):
            m(torch.randn(3, 4), torch.tensor([0, label, 3]))


def test_indices_along_a_dim_that_wrap() -> None:
    indices = torch.tensor([[0, -1], [5, 2], [3, -7]])
    assert_same_step(*pair(of_linear(lambda y: y.take_along_dim(indices, 1))), torch.randn(3, 4))


def test_statistics_of_batch_norm_that_are_read() -> None:
    def forward(s: Function, x: Tensor) -> Any:
        return torch.ops.aten._native_batch_norm_legit_functional(s.l(x), None, None, s.m, s.v, False, 0.1, 1e-5)[:3]

    members = {"l": nn.Conv2d(3, 3, 1), "m": nn.Buffer(torch.zeros(3)), "v": nn.Buffer(torch.ones(3))}
    assert_same_step(*pair(Function(forward, **members)), torch.randn(2, 3, 4, 4))


SPARSE: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "embedding": (nn.Embedding(6, 3, sparse=True), (torch.tensor([1, 2, 3, 3]),)),
    "bag": (nn.EmbeddingBag(6, 3, sparse=True), (torch.tensor([1, 2, 3, 3]), torch.tensor([0, 2]))),
    "gather": (
        Function(lambda s, i: s.p.gather(0, i, sparse_grad=True), p=nn.Parameter(torch.rand(6))),
        (torch.tensor([1, 5]),),
    ),
}


@pytest.mark.parametrize("row", SPARSE.values(), ids=SPARSE)
def test_sparse_gradients_stay_sparse(row: Any) -> None:
    module, inputs = row
    eager, ours = pair(module)
    for m in (eager, ours):
        m(*inputs).sum().backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert q.grad.layout == p.grad.layout == torch.sparse_coo
        torch.testing.assert_close(q.grad.to_dense(), p.grad.to_dense())


@pytest.mark.usefixtures("export_only")
def test_an_op_that_gives_what_it_was_not_traced_to_give() -> None:
    """PyTorch's stand-ins are not exact: here one has another dtype."""

    def statistics(s: Function, x: Tensor) -> Any:
        y = s.l(x).bfloat16()
        return torch.ops.aten._native_batch_norm_legit_functional(y, None, None, s.m, s.m, True, 0.1, 1e-5)[1:]

    eager, ours = pair(Function(statistics, l=nn.Linear(4, 4), m=nn.Buffer(torch.zeros(4).bfloat16())))
    for _ in range(2):
        x = torch.randn(3, 4)
        for expected, got in zip(eager(x), ours(x), strict=True):
            assert got.dtype == expected.dtype and got.shape == expected.shape
    assert "traced as" in ours.fallback_report()[-1].cause


@pytest.mark.usefixtures("export_only")
def test_results_are_of_the_shapes_that_the_trace_met() -> None:
    """PyTorch's stand-in for this op, run by itself, gives another one."""

    def bag(s: Function, x: Tensor) -> Any:
        return torch.embedding_bag(s.l(x), torch.tensor([1, 2]), torch.tensor([0, 1, 2]), include_last_offset=True)[2:]

    eager, ours = pair(Function(bag, l=nn.Linear(4, 4)))
    with pytest.warns(UserWarning, match="embedding_bag.* runs in PyTorch"):
        for n in (3, 4, 5):
            x = torch.randn(n, 4)
            for expected, got in zip(eager(x), ours(x), strict=True):
                assert got.dtype == expected.dtype and got.shape == expected.shape
    assert len(ours.fallback_report()) == 1


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "addmm": (torch.addmm, (3, 5), (3, 2), (2, 5)),
    "addmv": (torch.addmv, (3,), (3, 2), (2,)),
    "baddbmm": (torch.baddbmm, (4, 3, 5), (4, 3, 2), (4, 2, 5)),
    "addbmm": (torch.addbmm, (3, 5), (4, 3, 2), (4, 2, 5)),
    "addbmm of nothing": (torch.addbmm, (3, 5), (4, 3, 0), (4, 0, 5)),
}


@pytest.mark.parametrize("row", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize(("beta", "alpha"), [(0, 1), (0.5, 0), (0, 0), (0.5, 2)])
def test_what_counts_for_nothing_is_read_where_pytorch_reads_it(row: Any, beta: float, alpha: float) -> None:
    """NaN times 0 is NaN, or left out."""
    function, *shapes = row
    bias, x, y = (torch.randn(shape) for shape in shapes)
    bias = bias if beta else bias.fill_(torch.nan)
    x = x if alpha else x.fill_(torch.nan)
    results = []
    for m in pair(Function(lambda _, *xs: function(*xs, beta=beta, alpha=alpha))):
        leaves = [t.clone().requires_grad_() for t in (bias, x, y)]
        out = m(*leaves)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    torch.testing.assert_close(*results, equal_nan=True)


def test_one_index_selects_one() -> None:
    assert_same_step(*pair(Function(lambda _, x, i: x.index_select(1, i))), torch.randn(3, 4), torch.tensor(2))


def test_a_certain_probability_has_the_slope_of_pytorch() -> None:
    """Its divisor is at least 1e-12 in float32, in whatever dtype it is computed."""
    eager, ours = pair(Function(lambda _, x, t: F.binary_cross_entropy(x, t)))
    p = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    target = torch.tensor([0.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    a, b = p.clone().requires_grad_(), p.clone().requires_grad_()
    eager(a, target).backward()
    ours(b, target).backward()
    assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_in_evaluation_is_differentiated_by_differences_to_its_mean(bias: bool) -> None:
    norm = nn.BatchNorm2d(5, affine=True).eval()
    norm.bias.requires_grad_(bias)
    norm.running_mean.uniform_(900, 1100)
    eager, ours = pair(norm)
    x, g = torch.randn(3, 5, 7, 9) + norm.running_mean[:, None, None], torch.randn(3, 5, 7, 9)
    for module in (eager, ours):
        module(x).backward(g)
    torch.testing.assert_close(ours(x), eager(x), rtol=1e-6, atol=3e-4)  # both add numbers of a thousand
    torch.testing.assert_close(ours.weight.grad, eager.weight.grad, rtol=1e-5, atol=1e-4)
