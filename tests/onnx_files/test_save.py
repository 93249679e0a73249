"""Modules written by ``ortmodule_c.onnx.save``, run by ONNX's reference evaluator and read again, beside PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional as F

import ortmodule_c
from ortmodule_c import NotExportable, ORTModule


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(8 * 16, 5),
        nn.LayerNorm(5),
        nn.GELU(),
    )


def evaluated(model: onnx.ModelProto, *inputs: Tensor) -> list[np.ndarray]:
    names = [i.name for i in model.graph.input]
    return ReferenceEvaluator(model).run(None, {n: t.numpy() for n, t in zip(names, inputs, strict=True)})


def assert_as_in_pytorch(module: nn.Module, path: Path, *inputs: Tensor) -> None:
    with torch.no_grad():
        expected = module.eval()(*inputs)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    read = ortmodule_c.onnx.load(path)(*inputs)
    for found in (evaluated(onnx.load(path), *inputs), [read] if isinstance(read, Tensor) else read):
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(got).detach(), want, rtol=1e-4, atol=1e-5)


def test_a_module_is_written_as_in_evaluation_and_left_as_it_was(tmp_path: Path) -> None:
    module, x = net(), torch.randn(4, 3, 16, 16)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    assert module.training and module[1].num_batches_tracked == 0
    model = onnx.load(tmp_path / "net.onnx")
    assert [i.name for i in model.graph.input] == ["input"] and [o.name for o in model.graph.output] == ["output"]
    stored = {t.name: t for t in model.graph.initializer}
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(stored["0.weight"]), module[0].weight.detach())
    assert_as_in_pytorch(module, tmp_path / "net.onnx", x)


def test_sizes_may_be_left_open(tmp_path: Path) -> None:
    module, x = net(), torch.randn(4, 3, 16, 16)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,), dynamic_axes={"input": [0]}, output_names=["scores"])
    (given,), (result,) = (getattr(onnx.load(tmp_path / "net.onnx").graph, kind) for kind in ("input", "output"))
    assert given.type.tensor_type.shape.dim[0].dim_param and result.name == "scores"
    for n in (4, 7):
        assert_as_in_pytorch(module, tmp_path / "net.onnx", torch.randn(n, 3, 16, 16))


class Named(nn.Module):
    """Names that meet those of values of the graph, and a weight of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.add = nn.Linear(3, 3)
        self.again = self.add

    def forward(self, relu: Tensor, *, scale: float = 2.0) -> dict[str, Tensor]:
        x = torch.relu(self.add(relu)) + 1
        return {"mul": x * scale, "y": self.again(x)}


def test_names_are_those_of_the_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Named(), torch.randn(2, 3)
    ortmodule_c.onnx.save(tmp_path / "named.onnx", module, {"relu": x, "scale": 3.0})
    model = onnx.load(tmp_path / "named.onnx")
    assert [o.name for o in model.graph.output] == ["mul", "y"]
    for got, want in zip(evaluated(model, x), module(x, scale=3.0).values(), strict=True):
        torch.testing.assert_close(torch.as_tensor(got), want.detach())


def test_a_wrapper_says_in_what_precision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(4, 6)
    ortmodule_c.onnx.save(tmp_path / "half.onnx", ORTModule(module, precision="bf16"), (x,))
    model = onnx.load(tmp_path / "half.onnx")
    casts = [a.i for n in model.graph.node if n.op_type == "Cast" for a in n.attribute]
    assert onnx.TensorProto.BFLOAT16 in casts
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ortmodule_c.onnx.load(model)(x), module(x).float(), rtol=0.02, atol=0.02)


def test_a_graph_of_training_is_that_of_training_mode(tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(6, 3)
    with pytest.raises(NotExportable, match="in training ONNX has no BatchNorm"):
        ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,), training=True)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module[0], (x,), training=True)
    assert_as_in_pytorch(module[0], tmp_path / "net.onnx", x)


def test_a_module_of_a_file_is_written_with_its_weights_of_now(tmp_path: Path) -> None:
    module, x = net(), torch.randn(4, 3, 16, 16)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    read = ortmodule_c.onnx.load(tmp_path / "net.onnx")
    with torch.no_grad():
        for p in read.parameters():
            p.mul_(1.5)
    ortmodule_c.onnx.save(tmp_path / "again.onnx", read, (x,))
    torch.testing.assert_close(ortmodule_c.onnx.load(tmp_path / "again.onnx")(x), read(x))


def test_large_weights_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortmodule_c.onnx.export._MOST_BYTES", 1000)
    module, x = net(), torch.randn(4, 3, 16, 16)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    assert (tmp_path / "net.onnx.data").stat().st_size > 1000
    assert_as_in_pytorch(module, tmp_path / "net.onnx", x)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def sizes_compared(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 4 else x


class Compares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sizes_compared(x)


MISTAKES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "an argument that there is not": (net, {"dynamic_axes": {"x": [0]}}, ValueError, "dynamic_axes has 'x', expected"),
    "an axis that there is not": (net, {"dynamic_axes": {"input": [4]}}, ValueError, "axis 4 of 'input', which has 4"),
    "too many names": (net, {"output_names": ["a", "b"]}, ValueError, "1 outputs, and names for 1 and 2: input, a, b"),
    "a name of an input": (net, {"output_names": ["input"]}, ValueError, "'input' would be the name of two"),
    "a branch on values": (Branches, {}, NotExportable, ""),
    "a size that is compared": (Compares, {"dynamic_axes": {"x": [0]}}, NotExportable, "cannot be left open"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_written_is_refused_and_leaves_no_file(name: str, tmp_path: Path) -> None:
    make, options, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        ortmodule_c.onnx.save(tmp_path / "net.onnx", make(), (torch.randn(4, 3, 16, 16),), **options)
    assert not list(tmp_path.iterdir())


class Attends(nn.Module):
    """Attention in one of its forms."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masks: dict[str, Tensor | None] = {
            "bool": torch.arange(7) <= torch.arange(5)[:, None],
            "added": torch.linspace(-2, 2, 35).reshape(5, 7),
            "rows of nothing": torch.arange(7) < torch.arange(5)[:, None],
        }
        scale = 0.3 if self.mask == "scaled" else None
        causal = self.mask == "causal"
        return F.scaled_dot_product_attention(q, k, v, masks.get(self.mask), is_causal=causal, scale=scale)


@pytest.mark.parametrize("mask", ["none", "bool", "added", "rows of nothing", "causal", "scaled"])
@pytest.mark.parametrize("is_open", [False, True], ids=["fixed", "open"])
def test_attention_is_composed(mask: str, is_open: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6)
    axes = {name: [0] for name in "qkv"} if is_open else {}
    ortmodule_c.onnx.save(tmp_path / "net.onnx", Attends(mask), (q, k, v), dynamic_axes=axes)
    assert_as_in_pytorch(Attends(mask), tmp_path / "net.onnx", q, k, v)
    if is_open:
        assert_as_in_pytorch(Attends(mask), tmp_path / "net.onnx", *[torch.cat([t, t * 2]) for t in (q, k, v)])


class Recurs(nn.Module):
    """A recurrent layer, and all that it gives."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, ends = self.layer(x)
        return (y, *ends) if isinstance(ends, tuple) else (y, ends)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "said", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}], ids=str
)
def test_recurrent_layers_are_those_of_onnx(kind: type[nn.RNNBase], said: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Recurs(kind(4, 6, **said)), torch.randn(5, 3, 4)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    ops = [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]
    assert ops.count(kind.__name__) == 4 if "bidirectional" in said else 1
    assert_as_in_pytorch(module, tmp_path / "net.onnx", x)


def test_a_layer_with_relu_is_that_of_onnx(tmp_path: Path) -> None:
    """ONNX's reference evaluator knows no other function than tanh there."""
    torch.manual_seed(0)
    module, x = Recurs(nn.RNN(4, 6, nonlinearity="relu")), torch.randn(5, 3, 4)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    for got, want in zip(ortmodule_c.onnx.load(tmp_path / "net.onnx")(x), module(x), strict=True):
        torch.testing.assert_close(got, want)


class Loss(nn.Module):
    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(**said)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y)


LAYERS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "a loss": (Loss(ignore_index=1), (torch.linspace(-1, 1, 12).reshape(4, 3), torch.tensor([0, 1, 2, 1]))),
    "a loss with weights": (
        Loss(weight=torch.tensor([1.0, 2.0, 3.0]), reduction="none"),
        (torch.linspace(-1, 1, 24).reshape(4, 3, 2), torch.tensor([[0, 1], [1, 1], [2, 0], [0, 0]])),
    ),
    "a mean of all": (nn.AdaptiveAvgPool2d(1), (torch.linspace(0, 1, 60).reshape(1, 2, 5, 6),)),
    "means of parts": (nn.AdaptiveAvgPool2d((2, 3)), (torch.linspace(0, 1, 48).reshape(1, 2, 4, 6),)),
    "a norm": (nn.RMSNorm([3, 2], eps=1e-3), (torch.linspace(-1, 2, 24).reshape(4, 3, 2),)),
    "a norm without weights": (nn.RMSNorm(4, elementwise_affine=False), (torch.linspace(-1, 2, 24).reshape(6, 4),)),
    "a transformer": (
        nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True),
        (torch.linspace(-1, 1, 80).reshape(2, 5, 8),),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_composed(name: str, tmp_path: Path) -> None:
    module, inputs = LAYERS[name]
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module.eval(), inputs)
    assert_as_in_pytorch(module, tmp_path / "net.onnx", *inputs)


@pytest.mark.parametrize(
    ("module", "op"),
    [(nn.AdaptiveAvgPool2d((3, 3)), "AdaptiveAvgPool"), (Loss(label_smoothing=0.1), "CrossEntropy")],
    ids=["pool", "loss"],
)
def test_what_onnx_cannot_compose_is_refused_by_name(module: nn.Module, op: str, tmp_path: Path) -> None:
    x: Any = (torch.randn(4, 3), torch.tensor([0, 1, 2, 1])) if op == "CrossEntropy" else (torch.randn(1, 2, 4, 5),)
    with pytest.raises(NotExportable, match=f"in evaluation ONNX has no {op}"):
        ortmodule_c.onnx.save(tmp_path / "net.onnx", module, x)


class Added(nn.Module):
    def forward(self, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.baddbmm(c, x, y, beta=0.5, alpha=0.125)


def test_what_follows_a_product_of_halves_is_done_before_it_is_rounded(tmp_path: Path) -> None:
    c, x, y = (torch.full(size, 300.0).half() for size in ((2, 3, 5), (2, 3, 4), (2, 4, 5)))
    ortmodule_c.onnx.save(tmp_path / "added.onnx", Added(), (c, x, y))
    assert_as_in_pytorch(Added(), tmp_path / "added.onnx", c, x, y)


class Turned(nn.Module):
    """Complex numbers inside, and at the border if it is `bare`."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64) if bare else torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        turn = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return torch.view_as_real(torch.view_as_complex(x) * turn)


def test_complex_numbers_are_written_as_pairs(tmp_path: Path) -> None:
    ortmodule_c.onnx.save(tmp_path / "net.onnx", Turned(bare=False), (torch.randn(3, 4, 2),))  # compared there
    with pytest.raises(NotExportable, match=r"in evaluation 'weight' is of torch\.complex64"):
        ortmodule_c.onnx.save(tmp_path / "bare.onnx", Turned(bare=True), (torch.randn(3, 4, 2),))


def test_a_language_model_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "use_cache": False}
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    ids = torch.randint(50, (3, 9))
    ortmodule_c.onnx.save(tmp_path / "gpt2.onnx", module, {"input_ids": ids})
    model = onnx.load(tmp_path / "gpt2.onnx")
    assert [o.name for o in model.graph.output] == ["logits"]
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(evaluated(model, ids)[0]), module(ids).logits, rtol=1e-4, atol=1e-5)
