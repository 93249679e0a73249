"""Losses at the corners of their dtype, against eager PyTorch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from corners import FLOATS, Row, cases, lists, moderate, pairs, probabilities

B = 2  # pairs
LOSSES = {
    "mse": Row(lambda x, y: F.mse_loss(x, y, reduction="none"), B),
    "l1": Row(lambda x, y: F.l1_loss(x, y, reduction="none"), B),
    "smooth l1": Row(lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5), B),
    "smooth l1, beta 0": Row(lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.0), B),
    "huber": Row(lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.5), B),
    "smooth l1, beta 0.3": Row(lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.3), B),
    "huber, delta 3": Row(lambda x, y: F.huber_loss(x, y, reduction="none", delta=3.0), B),
    "hinge": Row(lambda x, y: F.hinge_embedding_loss(x, y.detach().sign(), 0.5, reduction="none"), B),
    "means": Row(lambda x: (F.huber_loss(x[:8], x[8:16]), F.mse_loss(x[:7], x[:1]), F.smooth_l1_loss(x[:8], x[1:9]))),
    # PyTorch's least divisor is of float32 in float64 too.
    "bce": Row(
        lambda x: F.binary_cross_entropy(x, (x.detach() > 0.2).to(x.dtype), reduction="none"),
        values=probabilities,
        signed_zeros=False,
        dtypes=FLOATS[:1],
    ),
    "bce, of the target": Row(
        lambda x, y: F.binary_cross_entropy(x.detach(), y, reduction="none"),
        B,
        values=lambda t: pairs(probabilities(t)[0]),
        signed_zeros=False,
        dtypes=FLOATS[:1],
    ),
    "bce with logits": Row(lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), B, floor=1),
    "bce with logits, weights": Row(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, y.detach(), pos_weight=y.detach(), reduction="none"),
        ulps=8,
        floor=1,
        values=lambda t: [pairs(moderate(t))[0], pairs(moderate(t))[1].nan_to_num(2, 3, -3)],
    ),
    "bce with logits, mean": Row(F.binary_cross_entropy_with_logits, B, floor=1),
    "bce with logits, weighted mean": Row(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, y.detach()), floor=1, values=lambda t: pairs(moderate(t))
    ),
    "kl": Row(lambda x, y: F.kl_div(x, y, reduction="none"), B, floor=1),
    "kl of logs": Row(lambda x, y: F.kl_div(x, y, reduction="none", log_target=True), B, floor=1),
    "soft margin": Row(
        lambda x, y: F.soft_margin_loss(x, y.detach(), reduction="none"), floor=1, values=lambda t: pairs(moderate(t))
    ),
    "hinge embedding": Row(lambda x: F.hinge_embedding_loss(x, torch.ones_like(x), reduction="none")),
    "margin ranking": Row(lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x), reduction="none"), B),
    "poisson": Row(lambda x, y: F.poisson_nll_loss(x, y, reduction="none"), B, floor=1),
    "poisson, full": Row(
        lambda x, y: F.poisson_nll_loss(x, y, log_input=False, full=True, reduction="none"), B, ulps=8, floor=1
    ),
    "gaussian": Row(
        lambda x, y: F.gaussian_nll_loss(x, y, x.detach().abs() + 1, reduction="none"), B, floor=1, broken=True
    ),
}
CLASSES = torch.tensor([0, 1, 2, 3] * 6)
SOME = torch.where(torch.arange(24) % 5 == 0, -100, CLASSES)
OF_CLASSES = {
    "cross entropy": Row(lambda x: F.cross_entropy(x, CLASSES, reduction="none"), floor=1),
    "cross entropy mean": Row(lambda x: F.cross_entropy(x[:7], SOME[:7]), floor=1),
    "cross entropy, smoothing": Row(
        lambda x: F.cross_entropy(x, SOME, reduction="none", label_smoothing=0.1), ulps=16, floor=1
    ),
    "cross entropy, ignored": Row(lambda x: F.cross_entropy(x, SOME, reduction="none"), floor=1),
    "cross entropy, all ignored": Row(lambda x: F.cross_entropy(x, torch.full((24,), -100)), floor=1),
    "cross entropy, all ignored, sum": Row(
        lambda x: F.cross_entropy(x, torch.full((24,), -100), reduction="sum"), floor=1
    ),
    "cross entropy, no weights": Row(
        lambda x: F.cross_entropy(x[:7], CLASSES[:7], torch.zeros(4, dtype=x.dtype)), floor=1
    ),
    "cross entropy, some weights": Row(
        lambda x: F.cross_entropy(x, CLASSES, torch.tensor([0.0, 1, 2, 0], dtype=x.dtype), reduction="none"), floor=1
    ),
    "cross entropy, negative index ignored": Row(lambda x: F.cross_entropy(x, SOME // 100, ignore_index=-1), floor=1),
    "cross entropy of probabilities": Row(
        lambda x: F.cross_entropy(x, x.detach().softmax(1).nan_to_num(0.25)), floor=1
    ),
    "cross entropy of pixels": Row(
        lambda x: F.cross_entropy(x.reshape(2, 12, 4).mT, CLASSES.reshape(2, 12), reduction="none"), floor=1
    ),
    "nll": Row(lambda x: F.nll_loss(x, CLASSES, reduction="none")),
    "nll mean": Row(lambda x: F.nll_loss(x[:7], SOME[:7])),
    "nll, all ignored": Row(lambda x: F.nll_loss(x, torch.full((24,), -100))),
    "nll, no weights": Row(lambda x: F.nll_loss(x[:7], CLASSES[:7], torch.zeros(4, dtype=x.dtype))),
    "nll, weights": Row(lambda x: F.nll_loss(x, SOME, torch.tensor([0.0, 1, 2, 0], dtype=x.dtype), reduction="none")),
}
OF_CLASSES = {name: replace(row, values=lists) for name, row in OF_CLASSES.items()}


@pytest.mark.parametrize(
    "differences", cases(ordinary={**LOSSES, **OF_CLASSES}, special={**LOSSES, **OF_CLASSES}, largest=LOSSES)
)
def test_values_and_gradients(differences: Callable[[], str]) -> None:
    assert not differences()
