"""The benchmark models in the sizes of a GPU, and tiny ones of the same names to rehearse with."""

from __future__ import annotations

from torch import Tensor, nn

import models
from models import WithLoss, Workload, bert, gpt2, ids, images, mlp, residual, resnet18, transformer, vectors


class Bottleneck(nn.Module):
    """Bottleneck block of ResNet-50 (He et al., 2015), with the stride on the middle convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet50(classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Sequential:
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for block in range(depth):
            blocks.append(Bottleneck(inputs, width, 2 if block == 0 and stage else 1))
            inputs = 4 * width
    return residual(blocks, inputs, classes)


# Parameters of AdamW, and the floors of models.py, are of these sizes too.
GPU = {
    "gpt2": Workload(
        "GPT-2 124M, B32 T1024",
        gpt2,
        ids(32, 1024, 50257),
        (),
        parameters=124.4e6,
        **transformer(32, 1024, 12, 768, 50257, True),
    ),
    "gpt2_medium": Workload(
        "GPT-2 medium, B8 T1024",
        lambda p: gpt2(p, n_embd=1024, n_layer=24, n_head=16),
        ids(8, 1024, 50257),
        (),
        parameters=354.8e6,
        **transformer(8, 1024, 24, 1024, 50257, True),
    ),
    "bert": Workload(
        "BERT-base MLM, B8 S128",
        bert,
        ids(8, 128, 30522),
        (),
        parameters=109.5e6,
        **transformer(8, 128, 12, 768, 30522, False),
    ),
    "bert_large": Workload(
        "BERT-large MLM, B32 S128",
        lambda p: bert(p, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
        ids(32, 128, 30522),
        (),
        parameters=335.2e6,
        **transformer(32, 128, 24, 1024, 30522, False),
    ),
    "resnet18": Workload(
        "ResNet-18, B256 224x224",
        lambda p: WithLoss(resnet18(), nn.CrossEntropyLoss()),
        images(256, 224, 1000),
        (),
        256 * 10.88e9,
        256 * 99e6,
        11.69e6,
    ),
    "resnet50": Workload(
        "ResNet-50, B128 224x224",
        lambda p: WithLoss(resnet50(), nn.CrossEntropyLoss()),
        images(128, 224, 1000),
        (),
        128 * 24.5e9,
        128 * 444e6,
        25.56e6,
    ),
    "mlp": Workload(
        "MLP 1024-4096-4096-1000, B256",
        lambda p: WithLoss(mlp((1024, 4096, 4096, 1000)), nn.CrossEntropyLoss()),
        vectors(256, 1024, 1000),
        (),
        6 * 256 * 25.07e6,
        0,
        25.07e6,
    ),
}

_WORDS = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 16}
_MASKED = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "vocab_size": 50,
}
_GPT2 = Workload("GPT-2 1x16", lambda p: gpt2(p, **_WORDS), ids(2, 9, 50), (), 1e6, 1e5, 1e4)
_BERT = Workload("BERT 1x16", lambda p: bert(p, **_MASKED), ids(2, 9, 50), (), 1e6, 1e5, 1e4)
TINY = {
    "gpt2": _GPT2,
    "gpt2_medium": _GPT2,
    "bert": _BERT,
    "bert_large": _BERT,
    "resnet18": Workload(
        "ResNet-18, B2 32x32",
        lambda p: WithLoss(resnet18(10), nn.CrossEntropyLoss()),
        images(2, 32, 10),
        (),
        2 * 2e8,
        2 * 2e6,
        11.2e6,
    ),
    "resnet50": Workload(
        "ResNet with bottlenecks, B2 32x32",
        lambda p: WithLoss(resnet50(10, (1, 1)), nn.CrossEntropyLoss()),
        images(2, 32, 10),
        (),
        2 * 2e8,
        2 * 2e6,
        0.5e6,
    ),
    "mlp": Workload(
        "MLP 20-30-10, B8",
        lambda p: WithLoss(mlp((20, 30, 10)), nn.CrossEntropyLoss()),
        vectors(8, 20, 10),
        (),
        6 * 8 * 1e3,
        0,
        1e3,
    ),
}

SCALES = {**models.SCALES, "gpu": GPU, "tiny": TINY}
