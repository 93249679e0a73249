"""Tensors rearranged by einops or einx are traced as those are that PyTorch reshapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import DebugOptions, ORTModule
from side_by_side import assert_ran_in_core, library
from wrapped import Function, assert_same_step, assert_same_steps, pair

einops = library("einops")
layers = library("einops.layers.torch")


def attends(s: Any, x: Tensor) -> Tensor:
    q = einops.rearrange(s.l(x), "b n (h d) -> b h n d", h=2)
    scores = einops.einsum(q, q, "b h i d, b h j d -> b h i j").softmax(-1)
    return einops.rearrange(einops.einsum(scores, q, "b h i j, b h j d -> b h i d"), "b h n d -> b n (h d)")


def packs(s: Any, x: Tensor) -> Tensor:
    first = einops.repeat(s.l.bias, "d -> b d", b=x.shape[0])
    packed, shapes = einops.pack([first, s.l(x)], "b * d")
    return einops.unpack(packed * 2, shapes, "b * d")[1]


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "attention": attends,
    "a repeated parameter, packed": packs,
    "patches": lambda s, x: s.l(einops.rearrange(x, "b (n p) c -> (b n) p c", p=2)),
    "a mean": lambda s, x: einops.reduce(s.l(x), "b n d -> b d", "mean"),
    "the largest": lambda s, x: einops.reduce(s.l(x), "b (n p) d -> b n d", "max", p=2),
    "parsed sizes": lambda s, x: s.l(x) * einops.parse_shape(x, "b n _")["n"],
    "an axis of one": lambda s, x: s.l(x) + einops.rearrange(x.mean((0, 2)), "n -> 1 n 1"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_batch_and_length_has_one_graph(use: Callable[[Any, Tensor], Any]) -> None:
    x = [(torch.randn(*size, 8),) for size in ((2, 6), (2, 6), (3, 10), (5, 4))]
    ours = assert_same_steps(Function(use, l=nn.Linear(8, 8)), *x)
    assert_ran_in_core(ours)
    assert ours.stats()["graphs"] == 1


@pytest.mark.parametrize("capture", ["export", "dynamo"])
def test_a_layer_is_compared(capture: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), layers.Rearrange("b n (h d) -> b h n d", h=2), nn.Linear(4, 4))

    eager = model()
    ours = ORTModule(model(), DebugOptions(capture=capture))
    ours.load_state_dict(eager.state_dict())
    for h, axes in ((2, "h n d"), (2, "h n d"), (2, "n h d"), (2, "h n d")):
        for m in (eager, ours.module):
            m[1].__dict__.update(layers.Rearrange(f"b n (h d) -> b {axes}", h=h).__dict__)
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(3, 5, 8))
    assert_ran_in_core(ours)


def test_a_pattern_that_does_not_fit_is_einops_error() -> None:
    eager, ours = pair(Function(lambda s, x: einops.rearrange(s.l(x), "b (n p) d -> b n p d", p=2), l=nn.Linear(8, 8)))
    assert_same_step(eager, ours, torch.randn(2, 4, 8))
    for m in (eager, ours):
        with pytest.raises(einops.EinopsError, match="can't divide axis of length 5"):
            m(torch.randn(2, 5, 8))


def test_einx_computes_in_the_core() -> None:
    einx = library("einx")

    def forward(s: Any, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=x.dtype)
        distances = einx.subtract("j, i -> i j", places, places)
        return einx.dot("i j, b j c -> b i c", distances, einx.add("b n c, c", s.l(x), s.l.bias))

    ours = assert_same_steps(Function(forward, l=nn.Linear(8, 8)), (torch.randn(2, 6, 8),), (torch.randn(3, 5, 8),))
    assert_ran_in_core(ours)
