"""The benchmark models, with the work one training step of each must do at least.

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

    def floor(self, flops: float, bandwidth: float, size: int = 4) -> float:
        """Seconds of a step at the measured ceilings (FLOP/s, bytes/s), nothing overlapped.

        `size` is that of an activation's element; parameters, gradients and moments are of 4 bytes.
        """
        moved = self.elementwise_bytes * size / 4 + 28 * self.parameters
        return self.gemm_flops / flops + moved / bandwidth


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


def residual(blocks: list[nn.Module], features: int, classes: int) -> nn.Sequential:
    """A ResNet's beginning and end around its blocks."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


def resnet18(classes: int = 1000) -> nn.Sequential:
    blocks: list[nn.Module] = []
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return residual(blocks, inputs, classes)


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


class Labelled(nn.Module):
    """A model of transformers called with one input and labels; returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.model(x, labels=labels).loss


class Recurrent(nn.Module):
    """A language model of LSTM layers (the medium one of Zaremba et al., 2014)."""

    def __init__(self, vocabulary: int, width: int, p: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=p)
        self.drop, self.loss = nn.Dropout(p), nn.CrossEntropyLoss()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y, _ = self.lstm(self.drop(self.embed(x)))
        return self.loss(self.head(self.drop(y)).flatten(0, 1), labels.flatten())


def llama(p: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    config = LlamaConfig(**sizes, num_key_value_heads=4, use_cache=False, attention_dropout=p)
    return HuggingFace(LlamaForCausalLM(config))


def vit(p: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_labels=1000, hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    return Labelled(ViTForImageClassification(config))


def t5(p: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(dropout_rate=p, use_cache=False, decoder_start_token_id=0)
    return HuggingFace(T5ForConditionalGeneration(config))


def masked(batch: int, tokens: int, vocabulary: int, kept: float) -> Data:
    """Ids, and labels of which all but a part are ignored."""

    def make(g: torch.Generator) -> tuple[Tensor, ...]:
        x = torch.randint(0, vocabulary, (batch, tokens), generator=g)
        return x, x.masked_fill(torch.rand(x.shape, generator=g) >= kept, -100)

    return make


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

# Beside those four, in full size alone. Products are those of the weights, and attention.
MORE = {
    "bert15": Workload(
        "BERT-base MLM, 15 % of the labels, B8 S128",
        bert,
        masked(8, 128, 30522, 0.15),
        (),
        gemm_flops=6 * 1024 * (12 * 12 * 768**2 + 0.15 * 30522 * 768) + 12 * 12 * 8 * 128**2 * 768,
        elementwise_bytes=1024 * (120 * 768 * 12 + 0.15 * 8 * 30522),
        parameters=109.5e6,
    ),
    "llama": Workload(
        "Llama 110M, B2 T512",
        llama,
        ids(2, 512, 32000),
        (),
        gemm_flops=6 * 1024 * (12 * 6.29e6 + 32000 * 768) + 6 * 12 * 2 * 512**2 * 768,
        elementwise_bytes=1024 * (120 * 768 * 12 + 8 * 32000),
        parameters=124.7e6,
    ),
    "vit": Workload(
        "ViT-B/16, B8 224x224",
        vit,
        images(8, 224, 1000),
        (),
        gemm_flops=6 * 8 * 197 * 85e6 + 12 * 12 * 8 * 197**2 * 768,
        elementwise_bytes=8 * 197 * 120 * 768 * 12,
        parameters=86.6e6,
    ),
    "t5": Workload(
        "T5-small, B8 S64 T64",
        t5,
        ids(8, 64, 32128),
        (),
        gemm_flops=6 * 512 * (6 * 3.15e6 + 6 * 4.2e6 + 32128 * 512),
        elementwise_bytes=512 * (120 * 512 * 15 + 8 * 32128),
        parameters=60.5e6,
    ),
    "lstm": Workload(
        "LSTM language model 2x650, B20 T35",
        lambda p: Recurrent(10000, 650, p),
        ids(20, 35, 10000),
        (),
        gemm_flops=6 * 700 * (2 * 8 * 650**2 + 10000 * 650),
        elementwise_bytes=700 * (120 * 650 + 8 * 10000),
        parameters=19.8e6,
    ),
}

# The same models as the first four, small: for tests and for `--quick`.
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

SCALES = {"full": WORKLOADS | MORE, "small": SMALL, "deep": DEEP}
