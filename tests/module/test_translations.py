"""Every translation, through the whole way of the data, against eager: outputs, gradients, buffers.

An op that runs in PyTorch instead is a failure here.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import ORTModule
from wrapped import Function, assert_same_step, pair

IDS = torch.tensor([[1, 2, 2], [1, 1, 6]])
CLASSES = torch.tensor([0, 5, -100, 2])
LABELS = torch.tensor([[0, 5, -1, 2, 1, 1], [-1, 0, 0, 0, 0, 0], [3, 3, 2, -1, -1, 0], [5, 4, 3, 2, 1, 0]])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.1, 0.7, 1.5])
MASK = torch.ones(4, 4, dtype=torch.bool).tril(-1)
BIAS = torch.full((4, 4), -torch.inf).triu(1)
CORNERS = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 0]])

ELEMENTWISE: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda y: (y + 2 - 0.5 * y) / (y.abs() + 1) - (1 - y),
    "alpha": lambda y: torch.add(y, y, alpha=3) - torch.sub(y, y, alpha=2) + torch.rsub(y, 1, alpha=2),
    "pow": lambda y: (y.abs() + 1) ** 1.5 + y**2 + y**3 + (y.abs() + 1) ** -0.5 + 2**y + y**0 + y**1,
    "unary": lambda y: (
        y.exp().log1p() + y.sin() * y.cos() + y.erf() + y.expm1() + (y.abs() + 1).sqrt().rsqrt().reciprocal()
    ),
    "angles": lambda y: (
        y.tan(),
        y.atan(),
        y.tanh().asin(),
        y.tanh().acos(),
        torch.atan2(y, y[0]),
        torch.atan2(y, y * 0),
    ),
    "hyperbolic": lambda y: (y.sinh(), y.cosh(), y.asinh(), (y.abs() + 1.1).acosh(), (y.tanh() / 2).atanh()),
    "fractions": lambda y: (y.trunc() * y, y.frac(), torch.fmod(y, 0.3), torch.fmod(y, y[0].abs() + 0.3)),
    "quotients rounded to zero": lambda y: (
        y,
        torch.div(y, 0.3, rounding_mode="trunc"),
        torch.div(y, y[0], rounding_mode="trunc"),
    ),
    "logaddexp": lambda y: torch.logaddexp(y, y[0] * 3),
    "rounding": lambda y: y * (y.floor() + y.ceil() + y.round() + y.sign()),
    "division": lambda y: y * torch.div(torch.arange(6) - 3, 2, rounding_mode="floor") + y % 0.7 + torch.arange(6) // 4,
    "clamp": lambda y: y.clamp(min=0) + y.clamp(-0.5, 0.5) + y.clamp(max=y.mean()),
    "compare": lambda y: (y, y > 0, y <= y.mean(), y == 1, y != 1, ~(y > 0) | (y < -1), (y > 0) ^ True),
    "promotion": lambda y: y * torch.arange(6) + torch.tensor(2, dtype=torch.float64) + True,
    "where": lambda y: torch.where(y > 0, y, 0.0) + y.masked_fill(y > 1, -1e4) + torch.maximum(y, y * 2),
    "cast": lambda y: y.double().float() + (y * 3).long() + (y > 0).to(y),
    "in place": lambda y: y.mul_(2).add_(1).clamp_(min=0.1),
    "views in place": lambda y: (y.__setitem__((slice(None), 0), 1.0), y.__setitem__(y > 1, 2.0), y)[-1],
    "detach": lambda y: y * y.detach(),
    "isnan": lambda y: (y, y.log().isnan(), (y > 0).isnan(), torch.arange(6).isnan()),
    "lerp": lambda y: torch.lerp(y, y * 2, 0.3) + torch.addcmul(y, y, y, value=2),
    "larger of two": lambda y: (torch.fmax(y, y[0]), torch.fmin(y, y.flip(0)), torch.hypot(y, y[0])),
    "with logarithms": lambda y: (
        torch.xlogy(y, y.exp()),
        torch.special.xlog1py(y, y.exp()),
        torch.special.entr(y.exp()),
        torch.logit(y.sigmoid()),
        torch.logit(y, 0.2),
    ),
    "near": lambda y: (y, torch.isclose(y, y[0]), torch.isclose(y, y, 0, 0)),
    "of reals": lambda y: (y.sinc(), y.angle() * y, y.round(decimals=1) * y, F.rrelu(y), torch.ldexp(y, y[0].detach())),
    "step": lambda y: (y, torch.heaviside(y.detach(), torch.full_like(y, 0.5))),
    "quotient added": lambda y: torch.addcdiv(y, y[0], y.abs() + 1, value=0.3),
}
SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "slices": lambda y: (y[1:, ::2], y[:, -1], y[..., None, 1:-1], y.narrow(1, 2, 3), y[0]),
    "joins": lambda y: (
        torch.cat([y, y * 2], 1),
        torch.stack([y, y], -1),
        torch.cat([y, torch.ones(1, 6, dtype=torch.int64)]),
    ),
    "splits": lambda y: (y.split([2, 4], 1), y.chunk(4, 1), y.unbind(0), y.split(4, 1)),
    "repeats": lambda y: (y[:, None].expand(-1, 3, 6), y.repeat(2, 1, 3), y.repeat_interleave(2, dim=1), y.tile(2)),
    "moves": lambda y: (
        y.t(),
        y[None].movedim(0, -1),
        y[None].swapaxes(0, 2),
        y[:, :0].roll(1, 1),
        y.flip(1),
        y.roll(2, 1),
        y.reshape(2, -1).mT,
    ),
    "circular pads": lambda y: (F.pad(y[None, None], (1, 2, 0, 3), "circular"), F.pad(y[None], (6, 0), "circular")),
    "reflected pads": lambda y: (F.pad(y[None, None], (1, 2, 0, 3), "reflect"), F.pad(y, (5, 0), "reflect")),
    "replicated pads": lambda y: (F.pad(y[None, None], (1, 2, 0, 3), "replicate"), F.pad(y, (7, 0), "replicate")),
    "ones on the diagonal": lambda y: (
        y @ torch.eye(6, 4, dtype=y.dtype),
        y + torch.eye(len(y), 6, dtype=y.dtype),
        y.T @ torch.eye(len(y), dtype=y.dtype),
    ),
    "diagonals": lambda y: (
        y.diagonal(),
        y.diagonal(-2),
        y.diagonal(3),
        (y[:, None] * y[:, :, None]).diagonal(1, 2, 1),
    ),
    "copies": lambda y: (
        torch.expand_copy(y[:, :1], (len(y), 3)),
        torch.view_copy(y, (6, -1)),
        torch.permute_copy(y, (1, 0)),
        torch.transpose_copy(y, 0, 1),
        torch.t_copy(y),
        torch.squeeze_copy(torch.unsqueeze_copy(y, 1), 1),
        torch.alias_copy(y),
        torch.diagonal_copy(y, 1),
        *torch.split_with_sizes_copy(y, [2, 4], 1),
        *torch.unbind_copy(y, 1),
        torch.unfold_copy(y, 1, 3, 2),
        torch.slice_copy(y, 1, 2, 5),
        torch.select_copy(y, 1, -1),
    ),
    "windows": lambda y: (y.unfold(1, 3, 1), y.unfold(1, 2, 2), y.unfold(-1, 4, 4), y.unfold(0, 2, 3)),
    "pads": lambda y: (F.pad(y, (1, 2), value=3.0), F.pad(y, (-1, 2))),
    "triangles": lambda y: y.triu(1) + y.tril(-1) + y.new_ones(len(y), 6).tril(),
    "made": lambda y: y[:4] + torch.eye(4, 6) + torch.linspace(0, 1, 6) + torch.arange(0, 3, 0.5),
    "filled": lambda y: y + torch.full((6,), 2.0) + y.new_zeros(6) + torch.ones_like(y),
    "flatten": lambda y: (
        y.flatten(),
        y.view(-1, 1, 2, 3).flatten(1),
        y.unflatten(1, (2, 3)),
        y[None].squeeze(0),
        y.ravel(),
    ),
    "integer index": lambda y: (
        y[[0, 2]],
        y[[0, 2], [1, -1]],
        y[:, [1, 2, 3]],
        y[:, None, [1, 2]],
        y.index_select(1, torch.tensor([3])),
    ),
    "gather": lambda y: (
        y.gather(1, CORNERS),
        y.take_along_dim(y.argmax(1, keepdim=True), 1),
    ),
    "put by index": lambda y: (
        y.scatter(1, CORNERS, 2.5),
        y.index_fill(1, torch.tensor([0, -1]), 2.5),
        y.index_fill(1, torch.tensor([0, 3]), torch.tensor(2.5)),
        y.index_copy(1, torch.tensor([4, 0, 4]), y[:, :3] * 2),
        torch.ops.aten.index_put(y, [None, torch.tensor([[4, -6], [4, 1]])], y[:, :4].unflatten(1, (2, 2))),
        y[0].put(torch.tensor([4, 0, -2]), y[0, :3] * 2),
        y[0].put(torch.tensor([4, 0, -2]), y[0, :3] * 2, accumulate=True),
    ),
    "put along a diagonal": lambda y: (
        y[:4].diagonal_scatter(y[0, :4]),
        y[:4].diagonal_scatter(y[0, :3], -1),
        y[:2, :4].expand(3, 2, 4).diagonal_scatter(y[:2, :3].T, 1, 1, 2),
        torch.block_diag(y, y[0], y[0, 0]),
    ),
    "put at every other place": lambda y: (
        y.slice_scatter(y[:, 1::2], 1, 0, None, 2),
        y.slice_scatter(y[1:3] * 2, 0, -4, None, 2),
        y.slice_scatter(y[:, :2].double(), 1, 1, -1, 3),
        y.slice_scatter(y[:, :0], 1, 9, None, 2),
        y[0].slice_scatter(y[0, 3:], 0, 0, 5, 2),
    ),
    "taken": lambda y: (y.take(torch.tensor([[3, -1], [3, 5]])), y[0, 0].gather(0, torch.tensor([0, 0])), y.roll(2)),
    "cut off and padded": lambda y: [
        F.pad(y[None], pad, mode)
        for pad in ((-1, 2), (2, -2), (-1, -1))
        for mode in ("circular", "reflect", "replicate")
    ],
    "columns of images": lambda y: (
        F.unfold(y[:4].reshape(2, 1, 2, 6), (2, 3), (1, 2), (1, 2)),
        F.fold(y[:4].reshape(1, 4, 6), (3, 4), 2),
        F.fold(y[:2].reshape(4, 3), (2, 5), 2, dilation=(1, 2)),
    ),
    "put by a mask": lambda y: (
        y.index_put((y[:, 0] > 0,), y[0] * 2),
        y.index_put((y > 0,), torch.tensor(2.5)),
        torch.ops.aten.index_put(y, [None, MASK.any(1).repeat(2)[:6]], torch.tensor(2.5)),
    ),
    "taken by a mask": lambda y: (
        y.masked_scatter(y > 0, y.flip(0)),
        y.masked_scatter(y[:, :1] > 0, y.flip(0)),
        y[0].masked_scatter(y > 0, y.exp()),
    ),
    "one hot": lambda y: y + F.one_hot(torch.arange(len(y)), 6),
    "interpolate": lambda y: F.interpolate(y[None, None], scale_factor=2),
}
REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sums": lambda y: (y.sum(), y.sum(0), y.sum((0, 1), keepdim=True), y.mean(1), (y > 0).sum(), y.prod(1)),
    "extremes": lambda y: (y.max(1), y.min(0, True), y.amax(1), y.max(), y.amin((0, 1))),
    "positions": lambda y: (y, y.argmax(1), y.argmax(), y.argmin(0), (y * 3).int().argmax(1), (y * 3).int().max(0)),
    "spread": lambda y: (y.var(1), y.std(0, keepdim=True) + 1, torch.var_mean(y, 1), y.var(unbiased=False)),
    "spread and mean": lambda y: (
        torch.std_mean(y, 1),
        torch.std_mean(y),
        torch.std_mean(y, 0, unbiased=False, keepdim=True),
    ),
    "similarity": lambda y: (F.cosine_similarity(y, y[:1]), F.cosine_similarity(y, y * 2 + 1, dim=0, eps=3.0)),
    "trace": lambda y: ((y.T @ y).trace(), y.trace()),
    "norms": lambda y: (y.norm(), y.norm(p=1, dim=1), F.normalize(y), y.logsumexp(1)),
    "of scalars": lambda y: (y[0, 0].softmax(0), y[0, 1].log_softmax(0), y[0, 2].unfold(0, 1, 1)),
    "numbers among others": lambda y: (y.log().nanmean(1), *y.aminmax(), *y.aminmax(dim=1, keepdim=True)),
    "differences": lambda y: (y.diff(n=2), y.diff(n=0), y.diff(n=3, prepend=y[:, :1]), (y > 0).diff()),
    "of vectors": lambda y: (torch.linalg.cross(y[:, :3], y[:1, 3:]), torch.addr(y[:, :6], y[:, 0], y[0], alpha=2)),
    "scans": lambda y: (y.cumsum(1), torch.diff(y, dim=1), (y * 3).int().cumsum(1, dtype=torch.int32)),
    "truth": lambda y: (y, (y > 0).any(1), (y > 0).all(), (y > -9).all(1, keepdim=True)),
    "products": lambda y: (y @ y[0], y[0] @ y[1], torch.bmm(y[:, :, None], y[:, None])),
    "addmm": lambda y: torch.addmm(y[0], y, y.T @ y, beta=0.5, alpha=2),
    "einsum": lambda y: (torch.einsum("bi,bj->bij", y, y), torch.einsum("bi,ci->bc", y, y), torch.outer(y[0], y[1])),
}
LOSSES: dict[str, Callable[..., Any]] = {
    "cross entropy": lambda y, x, r: F.cross_entropy(y, CLASSES, WEIGHTS, reduction=r),
    "label smoothing": lambda y, x, r: F.cross_entropy(y, CLASSES, WEIGHTS, reduction=r, label_smoothing=0.1),
    "cross entropy of probabilities": lambda y, x, r: F.cross_entropy(
        y, x.softmax(1), WEIGHTS, reduction=r, label_smoothing=0.1
    ),
    "nll after log softmax": lambda y, x, r: F.nll_loss(F.log_softmax(y, 1), CLASSES, WEIGHTS, reduction=r),
    "nll": lambda y, x, r: F.nll_loss(y, CLASSES, WEIGHTS, reduction=r),
    "mse": lambda y, x, r: F.mse_loss(y, x, reduction=r),
    "l1": lambda y, x, r: F.l1_loss(y, x, reduction=r),
    "smooth l1": lambda y, x, r: F.smooth_l1_loss(y, x, reduction=r, beta=0.5),
    "huber": lambda y, x, r: F.huber_loss(y, x, reduction=r, delta=0.7),
    "bce": lambda y, x, r: F.binary_cross_entropy(y.sigmoid(), x.sigmoid(), reduction=r),
    "bce with logits": lambda y, x, r: F.binary_cross_entropy_with_logits(
        y, x.sigmoid(), WEIGHTS, reduction=r, pos_weight=WEIGHTS + 1
    ),
    "bce with logits at 0": lambda y, x, r: F.binary_cross_entropy_with_logits(y * 0, x.sigmoid(), reduction=r),
    "soft margin": lambda y, x, r: F.soft_margin_loss(y, x.detach().sign(), reduction=r),
    "multi margin": lambda y, x, r: F.multi_margin_loss(y, CLASSES.relu(), weight=WEIGHTS, reduction=r),
    "squared multi margin": lambda y, x, r: F.multi_margin_loss(y, CLASSES.relu(), 2, 0.5, reduction=r),
    "multilabel margin": lambda y, x, r: F.multilabel_margin_loss(y, LABELS, reduction=r),
    "margin ranking": lambda y, x, r: F.margin_ranking_loss(y, x, x.detach().sign(), 0.3, reduction=r),
    "hinge": lambda y, x, r: F.hinge_embedding_loss(y, x.detach().sign().long(), 0.7, reduction=r),
    "cosine embedding": lambda y, x, r: F.cosine_embedding_loss(y, x, x.detach()[:, 0].sign(), 0.1, reduction=r),
    "poisson": lambda y, x, r: F.poisson_nll_loss(y, x.abs() * 3, full=True, reduction=r),
    "poisson of rates": lambda y, x, r: F.poisson_nll_loss(y.exp(), x.abs(), log_input=False, reduction=r),
    "kl of a trained target": lambda y, x, r: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=r),
    "kl": lambda y, x, r: F.kl_div(F.log_softmax(y, 1), x.softmax(1), reduction=r),
}
# Values at which PyTorch chooses a slope or guards against overflow.
TIES = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, -1.0], [0.5, -0.5, 6.0], [-3.0, 3.0, 0.0], [2.0, 2.0, 2.0]])
LARGE = torch.tensor([[100.0, -100.0, 30.0], [25.0, -25.0, 15.0], [40.0, -40.0, 700.0]])
MASKED = torch.tensor([[-torch.inf, -torch.inf, 1.0], [0.0, -torch.inf, 2.0]])
EDGES: dict[str, tuple[Tensor, Callable[[Tensor], Any]]] = {
    "std of equal values": (TIES, lambda x: x.std(1)),
    "norm of zeros": (TIES, lambda x: (x.norm(dim=1), (x * 0).norm(), x.norm(p=3, dim=1), F.normalize(x))),
    "norms": (TIES, lambda x: (x.norm(p=1, dim=1), x.norm(p=torch.inf, dim=(0, 1)), x.norm(p=-torch.inf, dim=0))),
    "clamp by numbers": (TIES, lambda x: x.clamp(-1, 1)),
    "clamp by tensors": (TIES, lambda x: (x.clamp(min=x.flip(1)), x.clamp(max=x.flip(1)))),
    "hardtanh": (TIES, lambda x: (F.hardtanh(x), F.hardtanh(x, -0.5, 2), F.relu6(x), F.relu6(x.relu()))),
    "hard": (TIES, lambda x: (F.hardswish(x), F.hardsigmoid(x))),
    "extremes": (TIES, lambda x: (x.max(1), x.amax((0, 1)), torch.maximum(x, x.flip(1)), x.sum().max(0))),
    "products": (TIES, lambda x: (x.prod(1), x**0, x.abs() ** x.relu())),
    "softplus": (TIES, lambda x: (F.softplus(x, threshold=1), F.softplus(x, beta=2, threshold=3))),
    "margins": (
        TIES,
        lambda x: (
            F.margin_ranking_loss(x, x.flip(1), torch.ones(5, 3), reduction="none"),
            F.hinge_embedding_loss(x, torch.tensor([1, -1, 0]), 0.5, reduction="none"),
            F.cosine_embedding_loss(x, x.flip(1), torch.tensor([1, -1, 0, 1, -1]), reduction="none"),
        ),
    ),
    "similarity": (TIES, lambda x: (F.cosine_similarity(x, x.flip(0)), F.cosine_similarity(x, x * 0))),
    "angles of zeros": (TIES, lambda x: (torch.atan2(x, x.flip(1) + 8), x.asinh(), x.trunc(), x.frac(), x.fmod(0.5))),
    "logaddexp": (LARGE, lambda x: (torch.logaddexp(x, x.flip(1)), torch.logaddexp(x, x))),
    "logaddexp of infinities": (MASKED, lambda x: torch.logaddexp(x.detach(), x.detach().flip(0)) + x[1, 2]),
    "large": (LARGE, lambda x: (F.celu(x, 0.5), F.elu(x), F.softplus(x), F.logsigmoid(x), F.mish(x), F.gelu(x))),
    "saturated probabilities": (LARGE, lambda x: F.binary_cross_entropy(x.sigmoid(), (x.detach() > 0).float())),
    "logsumexp": (
        MASKED,
        lambda x: (x.logsumexp(1), x.logsumexp((0, 1)), (x.detach() - torch.inf).logsumexp(1), x[:, :0].logsumexp(1)),
    ),
}
ACTIVATIONS: list[nn.Module] = [
    *(nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ELU(), nn.SELU(), nn.LeakyReLU(0.1), nn.ReLU(inplace=True), nn.ReLU6()),
    *(nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh(), nn.Sigmoid(), nn.Tanh(), nn.Softplus(), nn.LogSigmoid()),
    *(nn.Mish(), nn.PReLU(), nn.GLU(), nn.Softmax(-1), nn.LogSoftmax(1)),
]


def after_conv(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 4, 3), layer)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(4, 8, 3, 2, 1, groups=2, bias=False), (2, 4, 8, 8)),
    "conv 1d same": (lambda: nn.Conv1d(3, 8, 4, padding="same"), (2, 3, 9)),
    "conv 3d": (lambda: nn.Conv3d(4, 6, (2, 3, 1), (1, 2, 1), (1, 0, 2), (2, 1, 1), groups=2), (2, 4, 4, 5, 6)),
    "conv 3d same": (lambda: nn.Conv3d(2, 3, (2, 3, 4), padding="same", dilation=(1, 2, 1)), (2, 2, 4, 5, 6)),
    "conv transposed": (lambda: nn.ConvTranspose2d(4, 6, (4, 3), 2, 1, (0, 1), groups=2), (2, 4, 5, 6)),
    "conv transposed, depthwise": (lambda: nn.ConvTranspose2d(3, 3, 3, 2, 1, 1, groups=3, bias=False), (2, 3, 5, 6)),
    "conv transposed 1d": (lambda: nn.ConvTranspose1d(3, 8, 4, 3, dilation=2, output_padding=2), (2, 3, 5)),
    "conv transposed 3d": (lambda: nn.ConvTranspose3d(3, 2, (2, 3, 1), 2, (1, 0, 0), 1), (2, 3, 3, 4, 2)),
    "max pool": (after_conv(nn.MaxPool2d(3, 2, 1, ceil_mode=True)), (2, 3, 9, 9)),
    "max pool 1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.MaxPool1d(2)), (2, 3, 9)),
    "max pool 3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 1), nn.MaxPool3d((2, 3, 1), (1, 2, 1), (1, 1, 0), (2, 1, 1))),
        (2, 2, 4, 5, 6),
    ),
    "average pool": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        (2, 3, 9, 9),
    ),
    "average pool, divisor": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2, divisor_override=3)),
        (2, 3, 9, 9),
    ),
    "average pool 1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.AvgPool1d(3, 2, 1, ceil_mode=True)), (2, 3, 9)),
    "average pool 3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 1), nn.AvgPool3d((3, 2, 2), 2, 1, count_include_pad=False)),
        (2, 2, 4, 5, 6),
    ),
    "average pool 3d, divisor": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 1), nn.Flatten(0, 1), nn.AvgPool3d(2, divisor_override=3)),
        (2, 2, 4, 5, 6),
    ),
    "adaptive pool 1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.AdaptiveAvgPool1d(4)), (2, 3, 9)),
    "adaptive pool 3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 1), nn.AdaptiveAvgPool3d((2, None, 4))),
        (2, 2, 3, 5, 6),
    ),
    "global pool 3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 1), nn.AdaptiveAvgPool3d(1)), (2, 2, 3, 5, 6)),
    "adaptive max pool": (after_conv(nn.AdaptiveMaxPool2d((7, 1))), (2, 3, 9, 9)),
    "adaptive max pool 3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 1), nn.AdaptiveMaxPool3d((2, 1, 3))),
        (2, 2, 4, 5, 6),
    ),
    "adaptive pool": (after_conv(nn.AdaptiveAvgPool2d((2, 3))), (2, 3, 9, 9)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)), (4, 5)),
    "batch norm, momentum": (lambda: nn.BatchNorm2d(3, momentum=0.3), (2, 3, 4, 4)),
    "batch norm, no statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (2, 3, 4, 4)),
    "batch norm in eval": (lambda: nn.BatchNorm2d(3).eval(), (2, 3, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 4)),
    "instance norm, statistics": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (2, 3, 4, 4)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm((3, 4)), nn.LayerNorm(4, bias=False), nn.RMSNorm(4)), (2, 3, 4)),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), (2, 3, 8)),
}


@pytest.fixture(autouse=True)
def fallbacks_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in PyTorch")
        yield


def projected(function: Callable[[Tensor], Any]) -> Function:
    """`function` of a linear layer's output, so that gradients flow into it."""
    return Function(lambda s, x: function(s.l(x)), l=nn.Linear(6, 6))


@pytest.mark.parametrize("row", [*ELEMENTWISE.items(), *REDUCTIONS.items()], ids=lambda r: r[0])
def test_functions(row: tuple[str, Any]) -> None:
    eager, ours = pair(projected(row[1]))
    for n in (4, 5):
        assert_same_step(eager, ours, torch.randn(n, 6))


@pytest.mark.parametrize("row", SHAPES.items(), ids=lambda r: r[0])
def test_movements(row: tuple[str, Any]) -> None:
    eager, ours = pair(projected(row[1]))
    for n in (4, 5, 6):
        assert_same_step(eager, ours, torch.randn(n, 6))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("row", LOSSES.items(), ids=lambda r: r[0])
def test_losses(row: tuple[str, Any], reduction: str) -> None:
    assert_same_step(*pair(Function(lambda s, x: row[1](s.l(x), x, reduction), l=nn.Linear(6, 6))), torch.randn(4, 6))


@pytest.mark.parametrize("row", EDGES.items(), ids=lambda r: r[0])
def test_edges(row: tuple[str, Any]) -> None:
    _, (values, function) = row
    assert_same_step(*pair(Function(lambda s, _: function(s.x), x=nn.Parameter(values))), IDS)


@pytest.mark.parametrize(
    "target", [torch.tensor([True, False, True, False, True]), torch.tensor([1, 0, 255, 1, 0]).byte()]
)
def test_targets_without_a_sign(target: Tensor) -> None:
    def losses(s: Function, x: Tensor) -> Any:
        y = s.l(x)
        hinge = F.hinge_embedding_loss(y[:, 0], target, reduction="none")
        return hinge, F.cosine_embedding_loss(y, x, target, 0.1, reduction="none")

    assert_same_step(*pair(Function(losses, l=nn.Linear(6, 6))), torch.randn(5, 6))


def test_remainders_whose_quotient_is_out_of_range() -> None:
    x, y = torch.full((40,), 3e37), torch.full((40,), 1e-3)
    for take in (torch.fmod, torch.remainder):
        got = ORTModule(Function(lambda s, x, y, take=take: take(x, y)))(x, y)
        assert take(x, y)[:32].isnan().all() and got.isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_activations(activation: nn.Module) -> None:
    assert_same_step(*pair(nn.Sequential(nn.Linear(6, 6), activation)), torch.randn(4, 6))


@pytest.mark.parametrize("row", LAYERS.items(), ids=lambda r: r[0])
def test_layers(row: tuple[str, Any]) -> None:
    _, (make, shape) = row
    eager, ours = pair(make())
    for grown in (0, 0, 1, 2):  # the last ones by a graph of open sizes
        assert_same_step(eager, ours, torch.randn(shape[0] + grown, *shape[1:]))


def test_integers_are_pooled_by_the_ops_that_pooling_is_composed_of() -> None:
    module = Function(lambda s, x: (s.l(x), F.max_pool3d((x[:, None, None] * 9).long(), (1, 2, 3))), l=nn.Linear(6, 6))
    assert_same_step(*pair(module), torch.randn(2, 4, 6))


def test_convolution_without_a_batch() -> None:
    assert_same_step(*pair(nn.Conv2d(3, 4, 3, dilation=2)), torch.randn(3, 9, 9))
    assert_same_step(*pair(nn.Conv3d(3, 4, 2)), torch.randn(3, 4, 5, 6))
    assert_same_step(*pair(nn.ConvTranspose2d(3, 4, 3, 2)), torch.randn(3, 5, 6))


def test_a_transposed_convolution_of_an_output_size() -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x, output_size=(11, 12)), l=nn.ConvTranspose2d(3, 4, 3, 2, 1)))
    assert_same_step(eager, ours, torch.randn(2, 3, 6, 6))


def test_a_transposed_convolution_of_no_images() -> None:
    assert_same_step(*pair(nn.ConvTranspose2d(3, 4, 3, 2)), torch.randn(0, 3, 5, 6))


def test_steps_of_a_convolution_that_are_too_many_for_the_core_are_pytorchs() -> None:
    """A grid for each residue modulo the steps is what its kernel keeps."""
    eager, ours = pair(nn.ConvTranspose2d(1, 1, 1, 1200))
    x = torch.randn(1, 1, 2, 2)
    with pytest.warns(UserWarning, match="ConvTranspose: .* are too many"):
        assert torch.equal(ours(x), eager(x))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True, "padding_idx": 1}], ids=str)
def test_embedding(options: dict[str, Any]) -> None:
    assert_same_step(*pair(nn.Embedding(7, 3, **options)), IDS)


@pytest.mark.parametrize(
    "attend",
    [
        lambda q: F.scaled_dot_product_attention(q, q, q),
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3),
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=MASK),  # the first row is masked wholly
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=BIAS),
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=(q @ q.mT).tanh()),
        lambda q: F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True),
        lambda q: F.scaled_dot_product_attention(q, q[:, :2], q[:, :1], enable_gqa=True, is_causal=True),
        lambda q: F.scaled_dot_product_attention(q[:, :1], q, q[:, :1]),
        lambda q: F.scaled_dot_product_attention(q, q[:1], q[1:], is_causal=True),
        lambda q: F.scaled_dot_product_attention(q[:1], q, q, attn_mask=MASK),
        lambda q: F.scaled_dot_product_attention(q[0], q[1], q[0]),
        lambda q: F.scaled_dot_product_attention(q[0], q[1, :1], q[0], attn_mask=(q[1] @ q[0].mT).tanh()),
        lambda q: F.scaled_dot_product_attention(q[0], q[1, :2], q[0, :2], enable_gqa=True),
        lambda q: F.scaled_dot_product_attention(q[0, 0], q[1, 0], q[0, 1], attn_mask=BIAS),
        lambda q: F.scaled_dot_product_attention(q[:, None], q[None], q[None] * 2, is_causal=True),
        lambda q: F.scaled_dot_product_attention(q[None], q[None], q[None], attn_mask=(q @ q.mT).tanh()),
        lambda q: F.scaled_dot_product_attention(q[:, None], q[:, None], q[:, None], attn_mask=(q @ q.mT)[:, None, :1]),
        lambda q: F.scaled_dot_product_attention(q[None], q[None], q[None], attn_mask=(q @ q.mT)[None, :1]),
    ],
    ids=[
        "plain",
        "causal",
        "bool mask",
        "float mask",
        "trained mask",
        "grouped",
        "groups of keys, one head of values",
        "one head of queries and values",
        "keys and values of one sample",
        "queries of one sample",
        "three dims",
        "three dims, one head of keys, trained mask",
        "three dims, grouped",
        "two dims",
        "five dims, broadcast",
        "five dims, mask of four",
        "five dims, mask of five",
        "five dims, one mask",
    ],
)
def test_attention(attend: Callable[[Tensor], Tensor]) -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        heads = s.l(x).view(2, 4, 3, 2).transpose(1, 2)
        return attend(torch.cat([heads, heads[:, :1] * 2], 1))

    assert_same_step(*pair(Function(forward, l=nn.Linear(6, 6))), torch.randn(2, 4, 6))


@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_attention_of_open_sizes(dims: int) -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        y = s.l(x)
        q = y[(None,) * (dims - 3)] if dims > 2 else y[:, 0]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    eager, ours = pair(Function(forward, l=nn.Linear(6, 6)))
    for batch, length in ((2, 4), (3, 4), (3, 5), (1, 1)):
        assert_same_step(eager, ours, torch.randn(batch, length, 6))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4).eval(),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.GroupNorm(2, 4),
    ],
    ids=["batch", "batch in eval", "batch without statistics", "instance", "group"],
)
def test_norms_in_functional_form(norm: nn.Module) -> None:
    """A view changed in place makes PyTorch rewrite the whole graph, norms among the rest."""

    def forward(s: Function, x: Tensor) -> Tensor:
        y = s.l(x)
        y[:, 0].mul_(2)
        return s.norm(y)

    assert_same_step(*pair(Function(forward, l=nn.Conv2d(3, 4, 1), norm=norm)), torch.randn(2, 3, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("p", [1, 1.5, 2, 3, math.inf])
def test_the_norm_of_one_number_is_its_absolute_value(p: float, dtype: torch.dtype) -> None:
    """Whatever its square would be: no power of it is taken. Its slope is that of a norm."""
    norm = torch.linalg.vector_norm
    module = Function(lambda s, x: (norm(x, p, dim=-1), norm(x, p, dim=-1, keepdim=True), F.normalize(x, dim=-1)))
    numbers = torch.tensor([[1e30], [-1e30], [1e-30], [0.0], [math.inf], [math.nan], [3.0]], dtype=dtype)
    of_all = Function(lambda s, x, y: (x.norm(p=p), torch.dist(x, y, p)))
    one = numbers[:1]
    for m, args in ((module, (numbers,)), (module, (one,)), (of_all, (one, one * 3)), (of_all, (one[0, 0], one))):
        results = []
        for each in pair(m):
            given = [t.clone().requires_grad_() for t in args]
            outputs = each(*given)
            results.append((outputs, torch.autograd.grad([y.sum() * k for k, y in enumerate(outputs, 1)], given)))
        (expected, slopes), (got, ours) = results
        for y, of_eager in zip(got, expected, strict=True):
            assert torch.equal(y.nan_to_num(nan=7.0), of_eager.nan_to_num(nan=7.0))
        torch.testing.assert_close(ours, slopes, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [1.5, 3, 6])
def test_the_slope_of_a_norm_of_one_number_of_half_precision(p: float, dtype: torch.dtype) -> None:
    """It is that of its absolute value; the root is no power that 16 bits can write."""
    for number in (-3.5, 0.4, 3.7):
        x = torch.tensor(number, dtype=dtype, requires_grad=True)
        ORTModule(Function(lambda s, x: torch.linalg.vector_norm(x, p)))(x).backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, x.detach().sign(), rtol=8 * torch.finfo(dtype).eps, atol=0)
