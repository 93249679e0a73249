"""Functions of lists of elements, constant, tied, with infinities and NaN: reductions, scans, layers, indexing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from corners import INF, NAN, Row, cases, finite, lists, tame
from ortmodule_c import ORTModule
from wrapped import Function

LABELS = torch.tensor([[0, -1, 2, 3], [1, 2, -1, 0], [3, 3, 1, -1], [-1, 0, 0, 0], [0, 1, 2, 3], [2, -1, 0, 1]] * 4)
CLASSES = torch.tensor([0, 1, 2, 3] * 6)
LISTS = {
    "sum": Row(lambda x: x.sum(1)),
    "sum of all": Row(lambda x: x.sum()),
    "sum keepdim": Row(lambda x: x.sum(1, keepdim=True)),
    "sum of columns": Row(lambda x: x.sum(0)),
    "sum over no axes": Row(lambda x: (x.sum(()), x.amax(()), x.mean(()))),
    "mean": Row(lambda x: x.mean(1)),
    "amax": Row(lambda x: x.amax(1), signed_zeros=False),
    "amin": Row(lambda x: x.amin(1), signed_zeros=False),
    "amax of columns": Row(lambda x: x.amax(0)),
    "max of all": Row(lambda x: (x.max(), x[:7].max(), x[12].max())),
    "min of all": Row(lambda x: (x.min(), x[:7].min())),
    "max": Row(lambda x: x.max(1)),
    "min": Row(lambda x: x.min(1)),
    "max of columns": Row(lambda x: x.max(0)),
    "min of columns": Row(lambda x: x.min(0)),
    "argmax": Row(lambda x: (x.argmax(1), x.argmax(), x.argmax(0), x.argmin(1), x.argmin(), x.argmin(0), x * 1)),
    "median": Row(lambda x: x.median(1)),
    "sort": Row(lambda x: x.sort(stable=True, dim=1)),
    # PyTorch does not say which of equal elements it takes.
    "topk": Row(lambda x: (x.detach().topk(2, 1).values, x * 1), signed_zeros=False),
    "prod": Row(lambda x: x.prod(1)),
    "prod of all": Row(lambda x: (x.prod(), x[:2].prod(), x[3].prod(), x[4].prod(), (x[0] * 0 + x[3]).prod())),
    "prod of columns": Row(lambda x: x.prod(0)),
    "var": Row(lambda x: x.var(1), ulps=16, values=tame),
    "var, correction 0": Row(lambda x: x.var(1, correction=0), ulps=16, values=tame),
    "var, correction 4": Row(lambda x: x.var(1, correction=4), ulps=16),
    "var, correction 5": Row(lambda x: x.var(1, correction=5), ulps=16),
    "var of one": Row(lambda x: x[:, :1].var(1)),
    "std of one": Row(lambda x: x[:, :1].std(1)),
    "std": Row(lambda x: x.std(1), ulps=16, values=tame),
    "std, correction 0": Row(lambda x: x.std(1, correction=0), ulps=16, values=tame),
    # PyTorch's mean beside a variance is NaN where it is infinite.
    "var mean": Row(lambda x: torch.var_mean(x, 1), ulps=16, values=finite),
    # PyTorch's mean beside a variance is NaN where it is infinite.
    "std mean": Row(lambda x: torch.std_mean(x, 1), ulps=16, values=finite),
    "norm": Row(lambda x: x.norm(dim=1)),
    **{f"norm {p}": Row(lambda x, p=p: x.norm(p=p, dim=1)) for p in (0.5, 1, 1.5, INF, -INF)},
    "norm 3": Row(lambda x: x.norm(p=3, dim=1), ulps=64),
    "normalize": Row(lambda x: F.normalize(x, dim=1), ulps=16),
    "cosine": Row(lambda x: F.cosine_similarity(x, x.flip(0), dim=1), ulps=16, floor=1),
    "pairwise distance": Row(lambda x: F.pairwise_distance(x, x.flip(0)), ulps=16, floor=1),
    "logsumexp": Row(lambda x: x.logsumexp(1), floor=1),
    "logsumexp of columns": Row(lambda x: x.logsumexp(0), floor=1),
    "softmax": Row(lambda x: x.softmax(1), floor=1),
    "softmax of columns": Row(lambda x: x.T.softmax(0), floor=1),
    "softmin": Row(lambda x: F.softmin(x, 1), floor=1),
    "log softmax": Row(lambda x: x.log_softmax(1), floor=1),
    "log softmax of columns": Row(lambda x: x.T.log_softmax(0), floor=1),
    "log of softmax": Row(lambda x: x.softmax(1).log(), floor=1),
    "masked softmax": Row(lambda x: x.masked_fill(x > 1, -INF).softmax(1), floor=1),
    "safe softmax": Row(lambda x: torch.ops.aten._safe_softmax(x, 1), floor=1),
    "cumsum": Row(lambda x: (x.cumsum(1), x.cumsum(0))),
    "cumprod": Row(lambda x: x.cumprod(1), floor=1),
    "diff": Row(lambda x: x.diff(dim=1)),
    "any": Row(lambda x: torch.where(x.any(1, keepdim=True) ^ x.all(1, keepdim=True), x, 2.0)),
    "tril": Row(lambda x: (x.tril(-1), x.triu(1), x.tril(30), x.triu(-30), x.tril(-30), x.triu(30))),
    "layer norm": Row(lambda x: F.layer_norm(x, (4,)), ulps=32, floor=1, signed_zeros=False, values=tame),
    "layer norm, eps 0": Row(
        lambda x: F.layer_norm(x, (4,), eps=0.0), ulps=32, floor=1, signed_zeros=False, values=tame
    ),
    "layer norm of one": Row(
        lambda x: F.layer_norm(x.reshape(-1, 1), (1,)), ulps=32, floor=1, signed_zeros=False, values=tame
    ),
    "rms norm": Row(lambda x: F.rms_norm(x, (4,)), ulps=32, floor=1, signed_zeros=False, values=tame),
    "group norm": Row(lambda x: F.group_norm(x, 2), ulps=32, floor=1, signed_zeros=False, values=tame),
    "batch norm": Row(
        lambda x: F.batch_norm(x[:6], None, None, training=True), ulps=32, floor=1, signed_zeros=False, values=tame
    ),
    "batch norm of all": Row(
        lambda x: F.batch_norm(x.T, None, None, training=True), ulps=32, floor=1, signed_zeros=False, values=tame
    ),
    "max pool": Row(lambda x: F.max_pool1d(x[:, None], 2, 1, 1)),
    "max pool 2d": Row(lambda x: F.max_pool2d(x[None], 3, 2, 1)),
    "max pool, indices": Row(lambda x: F.max_pool2d(x[None], 3, 2, 1, return_indices=True)),
    "max pool 3d, indices": Row(
        lambda x: F.max_pool3d(x[None, None, None], (1, 3, 2), 1, (0, 1, 1), return_indices=True)
    ),
    "average pool": Row(lambda x: F.avg_pool1d(x[:, None], 2, 1, 1)),
    "average pool 2d": Row(lambda x: F.avg_pool2d(x[None], 3, 2, 1, count_include_pad=False), floor=1, values=tame),
    "average pool 3d": Row(lambda x: F.avg_pool3d(x[None, None], (1, 2, 2), 1, (0, 1, 1)), floor=1, values=tame),
    "adaptive average pool": Row(lambda x: F.adaptive_avg_pool1d(x[:, None], 3)),
    "adaptive max pool": Row(
        lambda x: [F.adaptive_max_pool1d(x[:, None], n, return_indices=k) for n, k in ((3, False), (1, False))]
    ),
    "adaptive max pool, indices": Row(lambda x: F.adaptive_max_pool2d(x.reshape(4, 4, 6), (2, 3), return_indices=True)),
    "columns": Row(lambda x: F.unfold(x.reshape(2, 2, 4, 6), (2, 3), (1, 2), (1, 2))),
    "columns, summed": Row(lambda x: (F.fold(x.reshape(1, 8, 12), (4, 5), 2), F.fold(x.reshape(1, 8, 12), (3, 7), 2))),
    "multi margin": Row(lambda x: F.multi_margin_loss(x, CLASSES, reduction="none")),
    "squared multi margin": Row(
        lambda x: F.multi_margin_loss(x, CLASSES, 2, 0.5, torch.tensor([0, 1, 2, 0.5]).to(x), reduction="none")
    ),
    "multilabel margin": Row(lambda x: F.multilabel_margin_loss(x, LABELS, reduction="none")),
    "conv": Row(lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 3, dtype=x.dtype), padding=1)),
    "linear": Row(lambda x: F.linear(x, torch.ones(2, 4, dtype=x.dtype))),
    "matmul": Row(lambda x: x @ x[:4], floor=1, values=tame),
    "gather": Row(
        lambda x: (x.gather(1, CLASSES[:, None]), x[[-1, 0, -24]], x.take_along_dim(x.argmax(1)[:, None], 1))
    ),
    "taken": Row(lambda x: (x.take(torch.tensor([[3, -1], [3, 50]])), x[0, 0].gather(0, torch.tensor([0])))),
    "put": Row(
        lambda x: (
            x.index_put((torch.tensor([3, 0, -2, 3]),), x[:4] * 2),
            x.index_copy(0, torch.tensor([3, 0, 5, 3]), x[:4] * 2),
            x.index_fill(0, torch.tensor([3, 0, -1]), x[0, 0].detach()),
            x.put(torch.tensor([3, 0, -2, 3]), x[0] * 2),
            x.diagonal_scatter(x[0, :3], 1),
        )
    ),
    "numbers among others": Row(lambda x: (x.nanmean(1), x.nanmean(), x.nanmean(0, keepdim=True))),
    "both extremes": Row(lambda x: (*x.aminmax(dim=1), *x.aminmax(), *x[0, 0].aminmax(dim=0)), signed_zeros=False),
    "differences": Row(lambda x: (x.diff(n=2), x.diff(n=3, prepend=x[:, :1]))),
    "cross": Row(lambda x: torch.linalg.cross(x[:, :3], x.flip(0)[:, 1:]), floor=1, values=tame),
    "addr": Row(lambda x: torch.addr(x, x[:, 0], x[1], beta=0.3, alpha=0.7), floor=1, values=tame),
    "blocks": Row(lambda x: (torch.block_diag(x[0], x[:, :2], x[0, 0]), x.roll(5), x.repeat_interleave(3))),
    "cut off and padded": Row(lambda x: [F.pad(x[None], (-1, 2), m) for m in ("circular", "reflect", "replicate")]),
    "scatter": Row(lambda x: torch.zeros_like(x).scatter_add(1, CLASSES[:, None], x[:, :1])),
    "index add": Row(lambda x: torch.zeros_like(x).index_add(0, CLASSES, x)),
    "expand and reduce": Row(lambda x: (x[:, None] * x.flip(0)[:, :, None]).sum(1), floor=1),
    "maximum of broadcast": Row(lambda x: torch.maximum(x, x[:1])),
    "pad": Row(lambda x: (F.pad(x, (1, 1), value=-INF), F.pad(x, (-1, 2), value=NAN))),
    "scalars": Row(lambda x: (x[0, 0].sum(), x[0, 1].amax(), x[0, 2].var(correction=0), x[0, 3].softmax(0))),
    "empty": Row(lambda x: (x[:0].sum(), x[:0].mean(), x[:0].prod(), x[:0].var(), x[:, :0].logsumexp(1))),
    "truth of nothing": Row(lambda x: (x[:0].any(), x[:0].all(), x * 1)),
}
LISTS = {name: row if row.values else replace(row, values=lists) for name, row in LISTS.items()}


@pytest.mark.parametrize("differences", cases(ordinary=LISTS))
def test_values_and_gradients(differences: Callable[[], str]) -> None:
    assert not differences()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_elements_have_no_deviation(dtype: torch.dtype) -> None:
    """Their mean is one of them, though their sum is rounded."""
    x = torch.tensor([0.1, 1 / 3, 1e-30, 7.7], dtype=dtype).expand(3, 4).clone().requires_grad_()
    deviation = ORTModule(Function(lambda _, x: x.std(0)))(x)
    deviation.sum().backward()
    assert not deviation.any() and x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("dims", [0, 1, (0, 1)])
def test_variance_of_large_elements_that_are_close(dims: int | tuple[int, int]) -> None:
    """They are as many steps of float32 apart as would be lost in a rounded mean."""
    x = torch.randn(300, 77) + 1e6
    ours = ORTModule(Function(lambda _, x: x.var(dims)))(x)
    torch.testing.assert_close(ours.double(), x.double().var(dims), rtol=1e-6, atol=0)


def test_variance_of_equal_elements_is_not_below_zero() -> None:
    x = torch.tensor([0.1, 1 / 3, 1e-30, 1e6 + 0.3]).expand(1001, 4).clone()
    for function in (lambda _, x: x.var(0), lambda _, x: x.var(0).sqrt()):
        assert not ORTModule(Function(function))(x).any()
