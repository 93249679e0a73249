"""Training in half precision: as eager's under autocast, close to float32, and the same with no pass at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import ORTModule
from wrapped import pair

transformers = pytest.importorskip("transformers")

STEPS = 10
Batch = tuple[Tensor, ...]


class WithLoss(nn.Module):
    """A network and its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


class LanguageModel(nn.Module):
    """A model of transformers that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def mlp() -> nn.Module:
    return WithLoss(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))


class Block(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n), nn.ReLU(inplace=True),
            nn.Conv2d(n, n, 3, padding=1, bias=False), nn.BatchNorm2d(n),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x), inplace=True)


def resnet() -> nn.Module:
    return WithLoss(
        nn.Sequential(
            nn.Conv2d(3, 16, 3), Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
        )
    )


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return LanguageModel(transformers.BertForMaskedLM(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=32, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return LanguageModel(transformers.GPT2LMHeadModel(config))


def vectors() -> Batch:
    return torch.randn(32, 20), torch.randint(10, (32,))


def images() -> Batch:
    return torch.randn(8, 3, 12, 12), torch.randint(10, (8,))


def ids() -> Batch:
    return (torch.randint(100, (4, 16)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "mlp": (mlp, vectors),
    "resnet": (resnet, images),
    "bert": (bert, ids),
    "gpt2": (gpt2, ids),
}


def made(name: str) -> tuple[nn.Module, list[Batch]]:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model = build()
    return model, [batch() for _ in range(2)]


def trained(
    model: nn.Module, batches: list[Batch], steps: int = STEPS, dtype: torch.dtype | None = None
) -> list[float]:
    """The losses of so many steps over the batches in turn, in eager's autocast if there is a dtype."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(*batches[step % len(batches)])
        assert loss.dtype is torch.float32
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_those_of_eager(name: str) -> None:
    eager, batches = made(name)
    ours = ORTModule(copy.deepcopy(eager), precision="bf16")
    want, got = trained(eager, batches, dtype=torch.bfloat16), trained(ours, batches)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-2, atol=0)
    assert not ours.fallback_report()
    assert ours.stats()["dynamo_graphs"] == 0


@pytest.mark.parametrize("name", MODELS)
def test_autocast_of_the_caller_is_the_same(name: str) -> None:
    model, batches = made(name)
    ours, theirs = ORTModule(copy.deepcopy(model), precision="bf16"), ORTModule(copy.deepcopy(model))
    assert trained(ours, batches, 3) == trained(theirs, batches, 3, torch.bfloat16)


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_the_curve_is_within_one_percent_of_that_in_float32(name: str) -> None:
    model, batches = made(name)
    curves = [
        torch.tensor(trained(ORTModule(copy.deepcopy(model), precision=p), batches, 60)) for p in ("fp32", "bf16")
    ]
    assert curves[0][-1] < 0.8 * curves[0][0]
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-2, atol=0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_far_from_float32_as_those_of_eager(name: str, precision: Any) -> None:
    model, (batch, _) = made(name)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    eager, ours = copy.deepcopy(model), ORTModule(copy.deepcopy(model), precision=precision)
    scale = 2.0**10 if precision == "fp16" else 1.0
    (model(*batch) * scale).backward()
    with torch.autocast("cpu", dtype):
        loss = eager(*batch)
    (loss * scale).backward()
    (ours(*batch) * scale).backward()
    exact, of_eager, of_ours = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, eager, ours))
    assert of_ours.dtype is torch.float32
    assert (of_ours - exact).norm() <= 1.5 * (of_eager - exact).norm()


def test_gradients_accumulate_over_steps_under_autocast() -> None:
    eager, batches = made("mlp")
    ours = ORTModule(copy.deepcopy(eager))
    for model in (eager, ours):
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*batch)
            loss.backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert (q.grad - p.grad).norm() <= 2e-2 * p.grad.norm()


def test_running_statistics_are_updated_in_float32_under_autocast() -> None:
    eager, batches = made("resnet")
    ours = ORTModule(copy.deepcopy(eager), precision="bf16")
    trained(eager, batches, 2, torch.bfloat16)
    trained(ours, batches, 2)
    for (name, b), c in zip(eager.named_buffers(), ours.buffers(), strict=True):
        assert c.dtype is b.dtype
        torch.testing.assert_close(c, b, rtol=2e-2, atol=2e-3, msg=name)


def test_the_gradient_of_a_weight_is_not_rounded_to_16_bits() -> None:
    layer = nn.Linear(8, 8, bias=False)
    ours = ORTModule(layer, precision="bf16")
    ours(torch.randn(33, 8)).square().sum().backward()
    assert not torch.equal(layer.weight.grad, layer.weight.grad.bfloat16().float())


@pytest.mark.parametrize("shape", [(4, 3, 8, 5), (3, 3, 3, 3), (1, 3, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_instances_in_16_bits_are_of_squares_beyond_them(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    eager, ours = pair(nn.InstanceNorm2d(3, track_running_stats=True).to(dtype))
    for _ in range(3):
        x = torch.randn(shape).mul(300).add(500).to(dtype)
        ours(x), eager(x)
        torch.testing.assert_close(dict(ours.module.named_buffers()), dict(eager.named_buffers()))
    assert ours.module.running_var.isfinite().all() and not ours.fallback_report()
