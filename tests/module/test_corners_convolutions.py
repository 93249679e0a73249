"""Convolutions large enough for a transform that mixes the numbers of a tile, of which some are not finite.

Infinities and NaN must be where PyTorch has them, and nowhere else.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from corners import INF, NAN
from wrapped import pair

SIZE = 33
HALVES = (torch.float16, torch.bfloat16)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Conv2d": lambda: nn.Conv2d(SIZE, SIZE + 1, 3, padding=1),
    "no padding": lambda: nn.Conv2d(SIZE, SIZE, 3),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(SIZE, SIZE, 3, padding=1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("corner", [INF, -INF, NAN])
@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_not_finite_stays_in_its_windows(layer: str, corner: float, dtype: torch.dtype) -> None:
    eager, ours = pair(LAYERS[layer]().to(dtype))
    x = torch.randn(2, SIZE, 19, 17, dtype=dtype)
    grad = torch.randn_like(eager(x))
    x[1, 5, 8, 9] = grad[0, 3, 4, 6] = corner
    wide = torch.float32 if dtype in HALVES else dtype  # where oneDNN has no halves, eager adds in them
    found: list[list[Any]] = []
    for module, kind in ((eager, dtype), (ours, dtype), (copy.deepcopy(eager).to(wide), wide)):
        leaf = x.to(kind, copy=True).requires_grad_()
        y = module(leaf)
        y.backward(grad.to(kind))
        found.append([y, leaf.grad, *[p.grad for p in module.parameters()]])
    assert not ours.fallback_report()
    assert 0 < sum(int(y.isfinite().logical_not().sum()) for y in found[0][:2]) < 2000
    tolerance = 1e-2 if dtype in HALVES else 1e-4
    for of_eager, of_ours, of_exact in zip(*found, strict=True):
        assert torch.equal(of_ours.isfinite(), of_eager.isfinite())
        torch.testing.assert_close(of_ours, of_exact.to(dtype), equal_nan=True, rtol=tolerance, atol=tolerance)
