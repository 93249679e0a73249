"""Slopes at infinities, ties, zeros and NaN, and between elements: those of PyTorch's own formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c.lowering.translations.registry import EXACTLY_DECOMPOSED
from wrapped import Function, pair

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*runs in PyTorch")  # that is fine here


# Where PyTorch chooses, divides by zero or overflows; each meets each in a row and a column.
CORNERS = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, torch.inf, -torch.inf, torch.nan, 1e-40, 0.5, 20.5])


LINE = CORNERS[None, None]


IMAGE = CORNERS.view(1, 1, 3, 4)


DECOMPOSED: dict[Any, tuple[Any, ...]] = {
    aten._upsample_nearest_exact1d.default: (LINE, [18]),
    aten._upsample_nearest_exact2d.default: (IMAGE, [5, 6]),
    aten._upsample_nearest_exact3d.default: (IMAGE[None], [2, 5, 6]),
    aten.channel_shuffle.default: (CORNERS.view(1, 4, 1, 3), 2),
    aten.count_nonzero.dim_IntList: (CORNERS.view(3, 4), [1]),
    aten.deg2rad.default: (CORNERS,),
    aten.diag_embed.default: (CORNERS,),
    aten.isinf.default: (CORNERS,),
    aten.isneginf.default: (CORNERS,),
    aten.isposinf.default: (CORNERS,),
    aten.nansum.default: (CORNERS.view(3, 4), [1]),
    aten.pixel_shuffle.default: (CORNERS.view(1, 4, 1, 3), 2),
    aten.pixel_unshuffle.default: (CORNERS[:8].view(1, 1, 2, 4), 2),
    aten.rad2deg.default: (CORNERS,),
    aten.rot90.default: (CORNERS.view(3, 4), 1, [0, 1]),
    aten.threshold.default: (CORNERS, 1.0, -5.0),
    aten.upsample_nearest1d.default: (LINE, [18]),
    aten.upsample_nearest2d.default: (IMAGE, [5, 6]),
    aten.upsample_nearest3d.default: (IMAGE[None], [2, 5, 6]),
}


def test_every_op_that_is_decomposed_is_compared() -> None:
    assert set(DECOMPOSED) == EXACTLY_DECOMPOSED


def assert_same_at_corners(function: Callable[..., Tensor], *operands: Tensor) -> None:
    """Result and gradients of a function of parameters, and no word of PyTorch having been called."""
    names = [f"p{i}" for i in range(len(operands))]
    parameters = {n: nn.Parameter(t.clone()) for n, t in zip(names, operands, strict=True)}
    eager, ours = pair(Function(lambda s, _: function(*[getattr(s, n) for n in names]), **parameters))
    results = []
    for m in (eager, ours):
        out = m(CORNERS)
        if out.requires_grad:
            out.backward(torch.full_like(out, 2.0))
        results.append([out, *[p.grad for p in m.parameters()]])
    torch.testing.assert_close(*reversed(results), equal_nan=True)
    assert not ours.fallback_report()


@pytest.mark.parametrize("row", DECOMPOSED.items(), ids=lambda r: r[0].name())
def test_decomposed_ops_are_exact(row: Any) -> None:
    op, (x, *rest) = row
    assert_same_at_corners(lambda y: op(y, *rest), x)


RESIZED = {"linear": LINE, "bilinear": IMAGE, "bicubic": IMAGE, "trilinear": IMAGE[None]}


@pytest.mark.parametrize("mode", RESIZED)
def test_what_lies_between_elements_is_what_pytorch_interpolates(mode: str) -> None:
    """Between an infinity and a number it is infinite."""
    eager, ours = pair(
        Function(
            lambda s, x: F.interpolate(x * s.w, scale_factor=1.5, mode=mode, align_corners=False),
            w=nn.Parameter(torch.ones(())),
        )
    )
    for x in (RESIZED[mode], RESIZED[mode].flip(-1)):
        torch.testing.assert_close(ours(x), eager(x), rtol=1e-6, atol=2e-6, equal_nan=True)


ROWS = torch.tensor(
    [
        [1.0, 2.0, 2.0],
        [0.0, 3.0, 0.0],
        [torch.inf, 1.0, 2.0],
        [-torch.inf, -torch.inf, -torch.inf],
        [torch.nan, 1.0, 1.0],
        [torch.inf, torch.inf, 1.0],
        [2.0, 2.0, 2.0],
        [torch.inf, -torch.inf, 0.0],
        [0.0, -torch.inf, 0.0],
    ]
)


SPREAD: dict[str, Callable[[Tensor], Tensor]] = {
    "norm of 2": lambda x: x.norm(dim=1),
    "norm of 1.5": lambda x: x.norm(1.5, 1),
    "norm of 3": lambda x: x.norm(3, 1),
    "variance": lambda x: x.var(1),
    "variance of all there are": lambda x: x.var(1, correction=0),
    "deviation": lambda x: x.std(1),
    "normalized": F.normalize,
}


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("what", SPREAD)
def test_slopes_overflow_and_vanish_where_those_of_pytorch_do(what: str) -> None:
    """Whatever the gradient is that they are multiplied with: 0 times an infinity is nothing, or is taken for 0."""
    eager, ours = pair(Function(lambda s, x: SPREAD[what](x * s.w), w=nn.Parameter(torch.ones(()))))
    rows = torch.cat([ROWS, torch.tensor([[0.0, 0, 0], [-0.0, 0, 1e-40], [LARGEST, LARGEST, 1], [1e20, 1, -1e20]])])
    for upstream in (1.0, 0.0, torch.nan, torch.inf, LARGEST, -LARGEST):
        found = []
        for m in (eager, ours):
            x = rows.clone().requires_grad_()
            out = m(x)
            out.backward(torch.full_like(out, upstream))
            found.append((out, x.grad))
        torch.testing.assert_close(found[1], found[0], equal_nan=True, rtol=1e-5, atol=0)


ACROSS, DOWN = CORNERS.expand(12, 12), CORNERS[:, None].expand(12, 12)


WRITTEN: dict[str, tuple[Callable[..., Any], *tuple[Tensor, ...]]] = {
    "clamp by a tensor": (lambda x, y: x.clamp(min=y) + x.clamp(max=y), DOWN, ACROSS),
    "clamp of fewer dims": (lambda x, y: x.clamp(min=y), CORNERS, ACROSS),
    "clamp by numbers": (lambda x: x.clamp(-1, 2) + x.clamp(min=0.5), CORNERS),
    "hardtanh": (lambda x: F.hardtanh(x, -1, 2) + F.hardtanh(x, 0.5, 0.5) + F.relu6(x), CORNERS.repeat(16)),
    "prelu": (F.prelu, DOWN, CORNERS),
    "maximum": (lambda x, y: torch.maximum(x, y) + torch.minimum(x, y), DOWN, ACROSS),
    "where": (lambda x, y: torch.where(x > 0, x, y), DOWN, ACROSS),
    "masked fill": (lambda x: x.masked_fill(x.isnan(), 0.0), CORNERS),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), DOWN, ACROSS),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=2), DOWN, ACROSS),
    "norms": (lambda x: torch.stack([x.norm(dim=1), x.norm(1, 1), x.norm(3, 1), x.norm(torch.inf, 1)]), ROWS),
    "norm of all": (lambda x: x[[0, 1, 6]].norm(), ROWS),
    "normalize": (F.normalize, ROWS),
    "distance": (torch.dist, ROWS[:2], ROWS[:1]),
    "pairwise distance": (F.pairwise_distance, ROWS, ROWS.flip(0)),
    "std": (lambda x: x.std(1) + x.var(0).sum(), ROWS),
    "logsumexp": (lambda x: x.logsumexp(1), ROWS),
    "extremes": (lambda x: x.amax(1) + x.amin(1) + x.max(1)[0] + x.min(1)[0], ROWS),
    "softmax": (lambda x: x.softmax(1), ROWS),
    "layer norm": (lambda x: F.layer_norm(x, (3,)), ROWS),
    "statistics of layer norm": (lambda x: torch.native_layer_norm(x, (3,), None, None, 1e-5)[0], ROWS),
    "rms norm": (lambda x: F.rms_norm(x, (3,)), ROWS),
    "smooth l1": (lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5), DOWN, ACROSS),
    "huber": (lambda x, y: F.huber_loss(x, y, reduction="none"), DOWN, ACROSS),
    "bce with logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x) / 4, reduction="none"),
        CORNERS,
    ),
    "x log y": (lambda x: torch.xlogy(DOWN, ACROSS) * x, CORNERS),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), ROWS, torch.ones(9, 1)),
}


@pytest.mark.parametrize("row", WRITTEN.values(), ids=WRITTEN)
def test_translations_have_the_gradients_of_pytorch(row: Any) -> None:
    assert_same_at_corners(*row)
