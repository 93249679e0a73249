"""The four benchmark models, with the work one training step of each must do at least.

FLOP and byte counts are of one step, forward and backward: a matrix product of m, n, k counts
2·m·n·k forward and twice that backward; attention with a causal mask counts half; AdamW reads
gradient, weight and two moments and writes three of them (28 bytes a parameter in fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

Data = Callable[[torch.Generator], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Workload:
    """A model, its data and its floor.

    Parameters
    ----------
    title
        What the table calls it.
    build
        Makes the model; its forward returns the loss.
    data
        Makes the inputs of one step from a generator.
    sizes
        The same in other sizes, in the order in which `cold.py` meets them.
    gemm_flops, elementwise_bytes, parameters
        Floor of one step: multiply-adds counted twice, bytes of elementwise traffic at the best
        practical fusion, trained parameters.
    """

    title: str
    build: Callable[[float], nn.Module]
    data: Data
    sizes: tuple[Data, ...]
    gemm_flops: float
    elementwise_bytes: float
    parameters: float

    def floor(self, flops: float, bandwidth: float) -> float:
        """Seconds of a step at the measured ceilings (FLOP/s, bytes/s), nothing overlapped."""
        return self.gemm_flops / flops + (self.elementwise_bytes + 28 * self.parameters) / bandwidth


class WithLoss(nn.Module):
    """A network and a loss, so that the step's output is the loss alone."""

    def __init__(self, net: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


class HuggingFace(nn.Module):
    """A Hugging Face model called with ids and labels; returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=labels).loss


class Block(nn.Module):
    """Basic block of ResNet-18 (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18(classes: int = 1000) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def bert(p: float, **sizes: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return HuggingFace(BertForMaskedLM(BertConfig(hidden_dropout_prob=p, attention_probs_dropout_prob=p, **sizes)))


def gpt2(p: float, **sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, use_cache=False, **sizes)
    config.loss_type = "ForCausalLM"
    return HuggingFace(GPT2LMHeadModel(config))


def ids(batch: int, tokens: int, vocabulary: int) -> Data:
    def make(g: torch.Generator) -> tuple[Tensor, ...]:
        x = torch.randint(0, vocabulary, (batch, tokens), generator=g)
        return x, x.clone()

    return make


def images(batch: int, size: int, classes: int) -> Data:
    def make(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(batch, 3, size, size, generator=g), torch.randint(0, classes, (batch,), generator=g)

    return make


def vectors(batch: int, width: int, classes: int) -> Data:
    def make(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(batch, width, generator=g), torch.randint(0, classes, (batch,), generator=g)

    return make


def transformer(batch: int, tokens: int, layers: int, width: int, vocabulary: int, causal: bool) -> dict[str, float]:
    """Floor of a transformer with a feed-forward of 4 widths and a tied head over every token."""
    n = batch * tokens
    attention = 12 * layers * batch * tokens**2 * width * (0.5 if causal else 1.0)
    return {
        "gemm_flops": 6 * n * 12 * layers * width**2 + 6 * n * vocabulary * width + attention,
        "elementwise_bytes": n * (120 * width * layers + 8 * vocabulary),
    }


WORKLOADS = {
    "mlp": Workload(
        "MLP 1024-4096-4096-1000, B256",
        lambda p: WithLoss(mlp((1024, 4096, 4096, 1000)), nn.CrossEntropyLoss()),
        vectors(256, 1024, 1000),
        (vectors(200, 1024, 1000), vectors(144, 1024, 1000), vectors(231, 1024, 1000)),
        6 * 256 * 25.07e6,
        0,
        25.07e6,
    ),
    "resnet18": Workload(
        "ResNet-18, B16 224x224",
        lambda p: WithLoss(resnet18(), nn.CrossEntropyLoss()),
        images(16, 224, 1000),
        (images(9, 224, 1000), images(12, 224, 1000), images(12, 192, 1000)),
        16 * 10.88e9,
        16 * 99e6,
        11.69e6,
    ),
    "bert": Workload(
        "BERT-base MLM, B8 S128",
        bert,
        ids(8, 128, 30522),
        (ids(5, 128, 30522), ids(8, 96, 30522), ids(6, 112, 30522)),
        parameters=109.5e6,
        **transformer(8, 128, 12, 768, 30522, False),
    ),
    "gpt2": Workload(
        "GPT-2 124M, B1 T1024",
        gpt2,
        ids(1, 1024, 50257),
        (ids(1, 768, 50257), ids(1, 896, 50257), ids(2, 512, 50257)),
        parameters=124.4e6,
        **transformer(1, 1024, 12, 768, 50257, True),
    ),
}

# The same models, small: for tests and for `--quick`.
SMALL = {
    "mlp": Workload(
        "MLP 250-510-130, B100",
        lambda p: WithLoss(mlp((250, 510, 130)), nn.CrossEntropyLoss()),
        vectors(100, 250, 130),
        (vectors(64, 250, 130), vectors(36, 250, 130), vectors(77, 250, 130)),
        6 * 100 * 194e3,
        0,
        194e3,
    ),
    "resnet18": Workload(
        "ResNet-18, B4 64x64",
        lambda p: WithLoss(resnet18(100), nn.CrossEntropyLoss()),
        images(4, 64, 100),
        (images(3, 64, 100), images(5, 64, 100), images(5, 48, 100)),
        4 * 10.88e9 / 12.25,
        4 * 99e6 / 12.25,
        11.2e6,
    ),
    "bert": Workload(
        "BERT 2x256, B3 S97",
        lambda p: bert(
            p, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024, vocab_size=5000
        ),
        ids(3, 97, 5000),
        (ids(2, 97, 5000), ids(3, 64, 5000), ids(4, 80, 5000)),
        parameters=3.1e6,
        **transformer(3, 97, 2, 256, 5000, False),
    ),
    "gpt2": Workload(
        "GPT-2 2x256, B2 T130",
        lambda p: gpt2(p, n_embd=256, n_layer=2, n_head=4, vocab_size=5000, n_positions=256),
        ids(2, 130, 5000),
        (ids(3, 130, 5000), ids(2, 96, 5000), ids(4, 112, 5000)),
        parameters=2.9e6,
        **transformer(2, 130, 2, 256, 5000, True),
    ),
}

# As many layers as the models have, but narrow ones: what capturing and compiling cost depends on these alone.
DEEP = {
    "mlp": SMALL["mlp"],
    "resnet18": SMALL["resnet18"],
    "bert": Workload(
        "BERT 12x64, B8 S32",
        lambda p: bert(
            p, hidden_size=64, num_hidden_layers=12, num_attention_heads=4, intermediate_size=256, vocab_size=500
        ),
        ids(8, 32, 500),
        (ids(5, 32, 500), ids(8, 24, 500), ids(6, 28, 500)),
        parameters=0.7e6,
        **transformer(8, 32, 12, 64, 500, False),
    ),
    "gpt2": Workload(
        "GPT-2 12x64, B4 T64",
        lambda p: gpt2(p, n_embd=64, n_layer=12, n_head=4, vocab_size=500, n_positions=128),
        ids(4, 64, 500),
        (ids(3, 64, 500), ids(4, 48, 500), ids(5, 30, 500)),
        parameters=0.7e6,
        **transformer(4, 64, 12, 64, 500, True),
    ),
}

SCALES = {"full": WORKLOADS, "small": SMALL, "deep": DEEP}
