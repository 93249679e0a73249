"""Ordinary models of many kinds, small enough that a step of each takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Example:
    """A model whose forward takes `inputs` by name and returns its loss.

    Parameters
    ----------
    kind
        What it is used for.
    build
        Makes the model.
    inputs
        Makes the inputs of one step from a generator.
    """

    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]


class Classifier(nn.Module):
    """A network over `x` and the cross entropy of its classes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), labels)


class LossOf(nn.Module):
    """The loss of a model of transformers, alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).loss


def images(batch: int, size: int, classes: int = 100, channels: int = 3, name: str = "x") -> Callable:
    def make(g: torch.Generator) -> Inputs:
        labels = torch.randint(0, classes, (batch,), generator=g)
        return {name: torch.randn(batch, channels, size, size, generator=g), "labels": labels}

    return make


def pixels(batch: int, size: int, classes: int = 100) -> Callable:
    return images(batch, size, classes, name="pixel_values")


def tokens(batch: int, length: int, vocabulary: int) -> Callable:
    def make(g: torch.Generator) -> Inputs:
        ids = torch.randint(5, vocabulary, (batch, length), generator=g)
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def sentences(batch: int, length: int, vocabulary: int, classes: int) -> Callable:
    """Sentences of several lengths, padded, with a label each."""

    def make(g: torch.Generator) -> Inputs:
        ids = torch.randint(5, vocabulary, (batch, length), generator=g)
        lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=g)
        mask = (torch.arange(length) < lengths).long()
        return {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "labels": torch.randint(0, classes, (batch,), generator=g),
        }

    return make


# ---- vision ----


def lenet() -> nn.Module:
    """LeCun et al. (1998), with rectifiers."""
    return Classifier(
        nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 8 * 8, 256),
            nn.ReLU(),
            nn.Linear(256, 100),
        )
    )


def vgg() -> nn.Module:
    """VGG-11 (Simonyan and Zisserman, 2014), half as wide, with dropout."""
    layers: list[nn.Module] = []
    inputs = 3
    for width in (32, 0, 64, 0, 128, 128, 0, 256, 256, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
    head = [nn.Flatten(), nn.Linear(256 * 16, 1024), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(1024, 100)]
    return Classifier(nn.Sequential(*layers, *head))


class UNet(nn.Module):
    """Segmentation (Ronneberger et al., 2015): two levels down, two up by transposed convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for a in (inputs, outputs):
                layers += [nn.Conv2d(a, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            return nn.Sequential(*layers)

        self.down1, self.down2, self.middle = double(3, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up2, self.up1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.left2, self.left1 = double(4 * width, 2 * width), double(2 * width, width)
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.left2(torch.cat([b, self.up2(c)], 1))
        a = self.left1(torch.cat([a, self.up1(b)], 1))
        return F.cross_entropy(self.head(a), labels)


class Variational(nn.Module):
    """A convolutional variational autoencoder (Kingma and Welling, 2013)."""

    def __init__(self, width: int = 32, latent: int = 64) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.SiLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.SiLU(), nn.Flatten()
        )
        self.moments = nn.Linear(2 * width * 64, 2 * latent)
        self.spread = nn.Linear(latent, 2 * width * 64)
        self.decode = nn.Sequential(
            nn.SiLU(), nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.moments(self.encode(x)).chunk(2, 1)
        z = mean + noise * (0.5 * log_variance).exp()
        y = self.decode(self.spread(z).unflatten(1, (-1, 8, 8)))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(y, x) + 1e-3 * divergence


def unet_inputs(g: torch.Generator) -> Inputs:
    return {"x": torch.randn(4, 3, 64, 64, generator=g), "labels": torch.randint(0, 5, (4, 64, 64), generator=g)}


def variational_inputs(g: torch.Generator) -> Inputs:
    return {"x": torch.randn(32, 3, 32, 32, generator=g), "noise": torch.randn(32, 64, generator=g)}


def of_transformers(model: str, config: str, **options: object) -> Callable[[], nn.Module]:
    """A model of transformers with fresh weights, by the names of its classes."""

    def build() -> nn.Module:
        import transformers

        return LossOf(getattr(transformers, model)(getattr(transformers, config)(**options)))

    return build


# ---- language ----


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocabulary: int = 4000, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        y, _ = self.lstm(self.embed(input_ids))
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


class Translator(nn.Module):
    """``nn.Transformer`` with causal and padding masks."""

    def __init__(self, vocabulary: int = 2000, width: int = 192) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        y = self.transformer(
            self.embed(source),
            self.embed(target[:, :-1]),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return F.cross_entropy(self.head(y).flatten(0, 1), target[:, 1:].flatten())


def translator_inputs(g: torch.Generator) -> Inputs:
    source, target = (torch.randint(0, 2000, (8, 48), generator=g) for _ in range(2))
    lengths = torch.randint(24, 49, (8, 1), generator=g)
    return {"source": source, "target": target, "padding": torch.arange(48) >= lengths}


def sequence_to_sequence(batch: int, length: int, vocabulary: int) -> Callable:
    def make(g: torch.Generator) -> Inputs:
        return {n: torch.randint(5, vocabulary, (batch, length), generator=g) for n in ("input_ids", "labels")}

    return make


# ---- recommenders ----


class Dlrm(nn.Module):
    """Embedding bags, and products of all pairs of features (Naumov et al., 2019)."""

    def __init__(self, tables: int = 8, rows: int = 5000, width: int = 32) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.click = nn.Linear(128, 1)
        self.register_buffer("lower", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *[bag(sparse[i]) for i, bag in enumerate(self.bags)]], 1)
        products = features @ features.mT
        pairs = products[:, self.lower[0], self.lower[1]]
        return F.binary_cross_entropy_with_logits(self.click(self.top(torch.cat([x, pairs], 1))).squeeze(1), labels)


class Collaborative(nn.Module):
    """Neural collaborative filtering (He et al., 2017)."""

    def __init__(self, users: int = 4000, items: int = 2000, width: int = 64) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        self.deep = nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.score = nn.Linear(2 * width, 1)

    def forward(self, user: Tensor, item: Tensor, labels: Tensor) -> Tensor:
        (a, b), (c, d) = self.user(user).chunk(2, 1), self.item(item).chunk(2, 1)
        score = self.score(torch.cat([a * c, self.deep(torch.cat([b, d], 1))], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, labels)


class WideAndDeep(nn.Module):
    """A linear part and a deep one over categories (Cheng et al., 2016)."""

    def __init__(self, fields: int = 20, rows: int = 20000, width: int = 16) -> None:
        super().__init__()
        self.wide, self.embed = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        widths = (fields * width, 512, 256, 1)
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        self.deep = nn.Sequential(*layers[:-1])

    def forward(self, categories: Tensor, labels: Tensor) -> Tensor:
        score = self.wide(categories).sum(1) + self.deep(self.embed(categories).flatten(1))
        return F.binary_cross_entropy_with_logits(score.squeeze(1), labels)


def dlrm_inputs(g: torch.Generator) -> Inputs:
    return {
        "dense": torch.randn(512, 13, generator=g),
        "sparse": torch.randint(0, 5000, (8, 512, 4), generator=g),
        "labels": torch.randint(0, 2, (512,), generator=g).float(),
    }


def collaborative_inputs(g: torch.Generator) -> Inputs:
    return {
        "user": torch.randint(0, 4000, (1024,), generator=g),
        "item": torch.randint(0, 2000, (1024,), generator=g),
        "labels": torch.randint(0, 2, (1024,), generator=g).float(),
    }


def wide_inputs(g: torch.Generator) -> Inputs:
    return {
        "categories": torch.randint(0, 20000, (512, 20), generator=g),
        "labels": torch.randint(0, 2, (512,), generator=g).float(),
    }


# ---- audio ----


def waves() -> nn.Module:
    """Convolutions over raw sound (M5; Dai et al., 2016)."""
    layers: list[nn.Module] = []
    inputs = 1
    for width, kernel, stride in ((32, 80, 4), (32, 3, 1), (64, 3, 1), (128, 3, 1)):
        layers += [nn.Conv1d(inputs, width, kernel, stride), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(4)]
        inputs = width
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 35)))


def sound(g: torch.Generator) -> Inputs:
    return {"x": torch.randn(16, 1, 8000, generator=g), "labels": torch.randint(0, 35, (16,), generator=g)}


def speech(g: torch.Generator) -> Inputs:
    return {"input_values": torch.randn(2, 8000, generator=g), "labels": torch.randint(1, 30, (2, 6), generator=g)}


def spectra(g: torch.Generator) -> Inputs:
    return {
        "input_features": torch.randn(2, 40, 200, generator=g),
        "labels": torch.randint(5, 1000, (2, 24), generator=g),
    }


# ---- tables ----


def tabular(widths: tuple[int, ...] = (60, 512, 512, 256, 10)) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths[:-1]):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.2)]
    return Classifier(nn.Sequential(*layers, nn.Linear(*widths[-2:])))


class FeatureTransformer(nn.Module):
    """A token for each column (FT-Transformer; Gorishniy et al., 2021)."""

    def __init__(self, columns: int = 30, width: int = 96) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(columns, width)), nn.Parameter(torch.zeros(columns, width))
        layer = nn.TransformerEncoderLayer(width, 8, 2 * width, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x.unsqueeze(2) * self.scale + self.shift).mean(1)), labels)


def columns(batch: int, n: int) -> Callable:
    def make(g: torch.Generator) -> Inputs:
        return {"x": torch.randn(batch, n, generator=g), "labels": torch.randint(0, 10, (batch,), generator=g)}

    return make


_BERT = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 768}
_WORDS = {"vocab_size": 4000, "bos_token_id": 1, "eos_token_id": 2}

EXAMPLES = {
    "LeNet": Example("vision", lenet, images(64, 32)),
    "VGG": Example("vision", vgg, images(8, 64)),
    "ResNet-50": Example(
        "vision",
        of_transformers("ResNetForImageClassification", "ResNetConfig", num_labels=100),
        pixels(4, 96),
    ),
    "MobileNetV2": Example(
        "vision",
        of_transformers("MobileNetV2ForImageClassification", "MobileNetV2Config", num_labels=100),
        pixels(8, 96),
    ),
    "EfficientNet": Example(
        "vision",
        of_transformers(
            "EfficientNetForImageClassification",
            "EfficientNetConfig",
            num_labels=100,
            width_coefficient=1.0,
            depth_coefficient=1.0,
            hidden_dim=1280,
        ),
        pixels(4, 96),
    ),
    "ConvNeXt": Example(
        "vision",
        of_transformers(
            "ConvNextForImageClassification", "ConvNextConfig", num_labels=100, hidden_sizes=[48, 96, 192, 384]
        ),
        pixels(4, 96),
    ),
    "ViT": Example(
        "vision",
        of_transformers("ViTForImageClassification", "ViTConfig", image_size=96, patch_size=8, num_labels=100, **_BERT),
        pixels(8, 96),
    ),
    "Swin": Example(
        "vision",
        of_transformers(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=112,
            window_size=7,
            embed_dim=48,
            depths=[2, 2, 2],
            num_heads=[2, 4, 8],
            num_labels=100,
        ),
        pixels(4, 112),
    ),
    "U-Net": Example("vision", UNet, unet_inputs),
    "VAE": Example("vision", Variational, variational_inputs),
    "BERT": Example(
        "language",
        of_transformers("BertForSequenceClassification", "BertConfig", num_labels=5, **_BERT, **_WORDS),
        sentences(8, 64, 4000, 5),
    ),
    "DistilBERT": Example(
        "language",
        of_transformers(
            "DistilBertForMaskedLM", "DistilBertConfig", dim=192, hidden_dim=768, n_layers=3, n_heads=4, **_WORDS
        ),
        tokens(8, 48, 4000),
    ),
    "GPT-2": Example(
        "language",
        of_transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            loss_type="ForCausalLM",
            n_embd=192,
            n_layer=3,
            n_head=4,
            use_cache=False,
            **_WORDS,
        ),
        tokens(4, 96, 4000),
    ),
    "Llama": Example(
        "language",
        of_transformers("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, use_cache=False, **_BERT, **_WORDS),
        tokens(4, 96, 4000),
    ),
    "T5": Example(
        "language",
        of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            d_model=192,
            d_kv=48,
            d_ff=768,
            num_layers=2,
            num_heads=4,
            use_cache=False,
            decoder_start_token_id=0,
            **_WORDS,
        ),
        sequence_to_sequence(8, 48, 4000),
    ),
    "Mamba": Example(
        "language",
        of_transformers(
            "MambaForCausalLM", "MambaConfig", hidden_size=128, num_hidden_layers=2, use_cache=False, **_WORDS
        ),
        tokens(4, 48, 4000),
    ),
    "LSTM": Example("language", Recurrent, tokens(16, 48, 4000)),
    "nn.Transformer": Example("language", Translator, translator_inputs),
    "DLRM": Example("recommender", Dlrm, dlrm_inputs),
    "NCF": Example("recommender", Collaborative, collaborative_inputs),
    "Wide & Deep": Example("recommender", WideAndDeep, wide_inputs),
    "M5": Example("audio", waves, sound),
    "Wav2Vec2": Example(
        "audio",
        of_transformers(
            "Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=32, conv_dim=(64,) * 7, mask_time_prob=0.0, **_BERT
        ),
        speech,
    ),
    "Whisper": Example(
        "audio",
        of_transformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=1000,
            num_mel_bins=40,
            d_model=128,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=512,
            decoder_ffn_dim=512,
            max_source_positions=100,
            max_target_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            use_cache=False,
        ),
        spectra,
    ),
    "tabular MLP": Example("tables", tabular, columns(1024, 60)),
    "FT-Transformer": Example("tables", FeatureTransformer, columns(64, 30)),
    "tiny MLP": Example("tables", lambda: tabular((20, 64, 64, 10)), columns(64, 20)),
}
