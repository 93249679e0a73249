"""A linear layer over many classes and its loss: logits that nobody else reads are never there as a whole."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ortmodule_c import ORTModule

CLASSES = 20011  # 64 rows of which are enough logits


class Head(nn.Module):
    def __init__(self, bias: bool = True, tied: bool = False, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 24)
        self.mix = nn.Linear(24, 24)
        self.head = nn.Linear(24, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.options = options

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.mix(self.embed(ids))))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), **self.options)


def data(ignored: float = 0.5, index: int = -100) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, CLASSES, (4, 17), generator=g)
    labels = torch.randint(0, CLASSES, (4, 17), generator=g)
    return ids, labels.masked_fill(torch.rand(4, 17, generator=g) < ignored, index)


def pair(**options: object) -> tuple[Head, ORTModule]:
    torch.manual_seed(0)
    plain = Head(**options)
    return plain, ORTModule(copy.deepcopy(plain))


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}


def check_gradients(wrapped: nn.Module, plain: nn.Module, rtol: float = 1e-4) -> None:
    got, want = gradients(wrapped), gradients(plain)
    assert got.keys() == want.keys()
    for name, g in want.items():
        if g is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(got[name], g, rtol=rtol, atol=rtol * float(g.abs().max()), msg=name)


@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.98])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"tied": True},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"ignore_index": 5},
        {"weight": torch.linspace(0, 2, CLASSES)},
    ],
    ids=str,
)
def test_trains_as_eager(options: dict, ignored: float) -> None:
    plain, wrapped = pair(**options)
    ids, labels = data(ignored, options.get("ignore_index", -100))
    for _ in range(2):
        a, b = plain(ids, labels), wrapped(ids, labels)
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
        for loss in (a, b):
            (loss * 3).backward()
    check_gradients(wrapped, plain)


def test_logits_are_not_kept() -> None:
    """The arena is smaller than the logits alone."""
    _, wrapped = pair()
    torch.manual_seed(0)
    ids, labels = torch.randint(0, CLASSES, (2, 8, 512))
    wrapped(ids, labels).backward()
    assert wrapped.stats()["live_bytes"] < 4 * ids.numel() * CLASSES


def test_all_labels_ignored() -> None:
    plain, wrapped = pair()
    ids, labels = data(1.1)
    a, b = plain(ids, labels), wrapped(ids, labels)
    assert math.isnan(a.item()) and math.isnan(b.item())
    a.backward()
    b.backward()
    check_gradients(wrapped, plain)


def test_a_label_out_of_range_is_an_error_and_the_next_step_works() -> None:
    plain, wrapped = pair()
    ids, labels = data()
    bad = labels.clone()
    bad[0, 0] = CLASSES
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        wrapped(ids, bad)
    torch.testing.assert_close(wrapped(ids, labels), plain(ids, labels), rtol=1e-5, atol=1e-6)


def test_backward_twice() -> None:
    plain, wrapped = pair(tied=True)
    ids, labels = data()
    for net in (plain, wrapped):
        loss = net(ids, labels)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    check_gradients(wrapped, plain)


@pytest.mark.parametrize("frozen", ["head.weight", "head.bias", "mix.weight", "embed.weight"])
def test_frozen(frozen: str) -> None:
    plain, wrapped = pair()
    ids, labels = data()
    for net in (plain, wrapped):
        dict(net.named_parameters())[frozen].requires_grad_(False)
        net(ids, labels).backward()
    check_gradients(wrapped, plain)


def test_evaluation() -> None:
    plain, wrapped = pair()
    ids, labels = data()
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(ids, labels), plain.eval()(ids, labels), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    plain, wrapped = pair()
    ids, labels = data()
    for net in (plain, wrapped):
        with torch.autocast("cpu", dtype):
            loss = net(ids, labels)
        assert loss.dtype == torch.float32
        (loss * 1024).backward()
    check_gradients(wrapped, plain, rtol=2e-2)


def test_the_same_bits_for_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            _, wrapped = pair()
            loss = wrapped(*data())
            loss.backward()
            results.append([loss.detach(), *gradients(wrapped).values()])
    finally:
        torch.set_num_threads(before)
    for same in zip(*results, strict=True):
        assert all(torch.equal(same[0], other) for other in same[1:])


def test_the_gradient_of_a_bias_over_many_rows() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 64)
    wrapped = ORTModule(WithLoss(copy.deepcopy(plain)))
    exact = WithLoss(copy.deepcopy(plain).double())
    x, labels = torch.randn(40000, 4), torch.randint(0, 64, (40000,))
    wrapped(x, labels).backward()
    exact(x.double(), labels).backward()
    torch.testing.assert_close(wrapped.module.head.bias.grad.double(), exact.head.bias.grad, rtol=1e-6, atol=1e-9)


def test_a_wide_layer_over_few_rows_is_not_paid_for_twice() -> None:
    """A gradient of the weight that waits for the backward would take more than the logits."""
    wrapped = ORTModule(WithLoss(nn.Linear(256, 20000)))
    x, labels = torch.randn(64, 256), torch.randint(0, 20000, (64,))
    wrapped(x, labels).backward()
    assert wrapped.stats()["live_bytes"] < 4 * 256 * 20000


class WithLoss(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)


class Looked(Head):
    """Returns its logits too."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.mix(self.embed(ids))).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten()), logits


def test_logits_that_are_returned() -> None:
    torch.manual_seed(0)
    plain = Looked()
    wrapped = ORTModule(copy.deepcopy(plain))
    ids, labels = data()
    for net in (plain, wrapped):
        loss, logits = net(ids, labels)
        (loss + logits[0, 0]).backward()
    check_gradients(wrapped, plain)
