"""Files of ``ortmodule_c.onnx.save`` at sizes that are left open, and read again to be trained."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import ortmodule_c
from ortmodule_c import NotExportable


class OfSize(nn.Module):
    """A forward that asks for the size of its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        if self.kind == "squeezed":
            return x.sum(1, keepdim=True).squeeze() + x.sum(0, keepdim=True).squeeze(0)[0]
        other = n == 1 if self.kind == "one" else n < 4 if self.kind == "few" else n > 100
        if self.kind == "between":
            other = 1 < n <= 64
        return x * 3 if other else x * 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one", r"where n = 1 result 0 of the graph is another than the module's"),
        ("few", r"where n = (1|3) result 0"),
        ("many", r"where n = 101 result 0"),
        ("between", r"where n = (1|65) result 0"),
        ("squeezed", r"where n = 1 "),
    ],
)
def test_a_size_for_which_the_forward_computes_otherwise_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(NotExportable, match=message):
        ortmodule_c.onnx.save(tmp_path / "net.onnx", OfSize(kind), (torch.randn(7, 3),), dynamic_axes={"x": {0: "n"}})
    assert not list(tmp_path.iterdir())
    ortmodule_c.onnx.save(tmp_path / "net.onnx", OfSize(kind), (torch.randn(7, 3),))


def evaluated(path: Path, *inputs: Tensor) -> list[Any]:
    model = onnx.load(path)
    feed = {i.name: t.numpy() for i, t in zip(model.graph.input, inputs, strict=True)}
    return ReferenceEvaluator(model).run(None, feed)


@pytest.mark.parametrize(
    "module",
    [nn.Conv2d(3, 4, 3), nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2))],
    ids=["unpadded", "pooled"],
)
def test_sizes_that_a_forward_needs_to_be_large_enough_may_be_open(module: nn.Module, tmp_path: Path) -> None:
    ortmodule_c.onnx.save(
        tmp_path / "net.onnx", module, (torch.randn(2, 3, 9, 10),), dynamic_axes={"input": {0: "n", 2: "h", 3: "w"}}
    )
    (given,) = onnx.load(tmp_path / "net.onnx").graph.input
    assert [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim] == ["n", 3, "h", "w"]
    for sizes in ((1, 3, 9, 10), (4, 3, 6, 13)):
        x = torch.randn(sizes)
        torch.testing.assert_close(torch.as_tensor(evaluated(tmp_path / "net.onnx", x)[0]), module(x).detach())


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.words(ids)).flatten(0, 1), labels.flatten())


def test_sizes_of_one_name_are_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Tagger()
    ids, labels = torch.randint(9, (3, 5)), torch.randint(4, (3, 5))
    with pytest.raises(NotExportable, match=r"asks of open sizes, or binds them, that .*ids.shape\[0\]"):
        axes = {"ids": [0, 1], "labels": [0, 1]}
        ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (ids, labels), dynamic_axes=axes)
    named = {name: {0: "batch", 1: "length"} for name in ("ids", "labels")}
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (ids, labels), dynamic_axes=named)
    ids, labels = torch.randint(9, (4, 2)), torch.randint(4, (4, 2))
    found = evaluated(tmp_path / "net.onnx", ids, labels)[0]
    torch.testing.assert_close(torch.as_tensor(found), module(ids, labels).detach())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([10.0, 20.0, 30.0]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2 + self.x
        return y, y


def test_two_values_do_not_share_a_name(tmp_path: Path) -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match="'x' would be the name of two values"):
        ortmodule_c.onnx.save(tmp_path / "net.onnx", Named(), (x,))
    ortmodule_c.onnx.save(tmp_path / "net.onnx", Named(), (x,), input_names=["given"], output_names=["a", "b"])
    for found in evaluated(tmp_path / "net.onnx", x):
        np.testing.assert_array_equal(found, [12, 22, 32])


def test_what_is_read_trains_as_what_was_written(tmp_path: Path) -> None:
    """Weights as they are, statistics as buffers; what was frozen, and other buffers, stay as they are."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=1.0), Shifted(), nn.Linear(6, 3))
    module[0].bias.requires_grad_(False)
    with torch.no_grad():
        module[1].running_mean.uniform_(), module[1].running_var.uniform_(0.5, 2)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,), dynamic_axes={"input": [0]})
    read = ortmodule_c.onnx.load(tmp_path / "net.onnx")
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert {name for name, _ in read.named_parameters()} == trained
    buffers = dict(read.named_buffers())
    assert {"1.running_mean", "1.running_var", "2.shift", "0.bias"} <= set(buffers)
    for model in (read.train(), module.train()):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for name, p in read.named_parameters():
        torch.testing.assert_close(p, dict(module.named_parameters())[name], rtol=1e-4, atol=1e-5)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


LAYERS: dict[str, tuple[nn.Module, Tensor]] = {
    "batch norm": (nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 5)),
    "batch norm without weights": (nn.BatchNorm1d(3, affine=False).eval(), torch.randn(2, 3)),
    "group norm": (nn.GroupNorm(2, 4), torch.randn(2, 4, 5)),
    "instance norm": (nn.InstanceNorm1d(4), torch.randn(2, 4, 5)),
    "layer norm without weights": (nn.LayerNorm(5, elementwise_affine=False), torch.randn(2, 4, 5)),
    "selu": (nn.SELU(), torch.linspace(-3, 3, 9)),
    "celu": (nn.CELU(0.7), torch.linspace(-3, 3, 9)),
    "pools of one image": (nn.AdaptiveAvgPool2d((2, 2)), torch.randn(1, 3, 4, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_norms_and_activations_are_composed(name: str, tmp_path: Path) -> None:
    module, x = LAYERS[name]
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    torch.testing.assert_close(torch.as_tensor(evaluated(tmp_path / "net.onnx", x)[0]), module(x).detach())
    if name.startswith("batch norm"):
        assert [n.op_type for n in onnx.load(tmp_path / "net.onnx").graph.node] == ["BatchNormalization"]


@pytest.mark.parametrize(
    "module",
    [nn.GroupNorm(3, 6), nn.GroupNorm(3, 6, affine=False), nn.InstanceNorm2d(6), nn.GroupNorm(3, 6).half()],
    ids=str,
)
def test_norms_of_images_of_any_size(module: nn.Module, tmp_path: Path) -> None:
    for p in module.parameters():
        nn.init.uniform_(p)
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    x = torch.randn(2, 6, 4, 5, dtype=dtype)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,), dynamic_axes={"input": [0, 2, 3]})
    for shape in ((2, 6, 4, 5), (3, 6, 7, 2)):
        x = torch.randn(shape, dtype=dtype)
        torch.testing.assert_close(torch.as_tensor(evaluated(tmp_path / "net.onnx", x)[0]), module(x).detach())


def test_a_group_norm_of_no_images(tmp_path: Path) -> None:
    module = nn.GroupNorm(3, 6)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (torch.randn(2, 6, 4),), dynamic_axes={"input": [0]})
    assert ortmodule_c.onnx.load(tmp_path / "net.onnx")(torch.randn(0, 6, 4)).shape == (0, 6, 4)


class ByLastAxis(nn.Module):
    """Looks as a batch norm does, but for the axis of its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(-1, 1, 3))
        self.register_buffer("var", torch.linspace(1, 2, 3))
        self.weight, self.bias = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        factor = (self.var + 1e-5).rsqrt() * self.weight
        shift = self.bias - self.mean * factor
        return x * factor.reshape(1, 1, 1, 3) + shift.reshape(1, 1, 1, 3)


def test_channels_that_come_last_are_no_batch_norm(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 3, 3)
    module = ByLastAxis()
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    torch.testing.assert_close(torch.as_tensor(evaluated(tmp_path / "net.onnx", x)[0]), module(x).detach())


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[1][0]


class Small(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.log1p(x), torch.expm1(x)


class Attends(nn.Module):
    def forward(self, q: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, mask)


def test_what_is_read_of_a_layer_may_be_its_last_state(tmp_path: Path) -> None:
    module, x = LastState(), torch.randn(5, 3, 4)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    torch.testing.assert_close(torch.as_tensor(evaluated(tmp_path / "net.onnx", x)[0]), module(x).detach())


def test_numbers_at_the_ends_come_out_right(tmp_path: Path) -> None:
    x = torch.tensor([1e-9, -1e-9, 0.0, 0.5, -0.5, 80.0, -80.0, float("inf"), float("nan")])
    ortmodule_c.onnx.save(tmp_path / "net.onnx", Small(), (x,))
    with np.errstate(all="ignore"):
        log1p, expm1 = evaluated(tmp_path / "net.onnx", x)
    torch.testing.assert_close(torch.as_tensor(log1p), torch.log1p(x), rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(torch.as_tensor(expm1), torch.expm1(x), rtol=1e-5, atol=0, equal_nan=True)


def test_attention_of_halves_does_not_overflow_and_shows_nan(tmp_path: Path) -> None:
    q, mask = torch.full((1, 1, 2, 128), 24.0, dtype=torch.float16), torch.zeros(2, 2, dtype=torch.float16)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", Attends(), (q, mask))
    assert np.isfinite(evaluated(tmp_path / "net.onnx", q, mask)[0]).all()
    mask[0, 1] = float("nan")
    found = evaluated(tmp_path / "net.onnx", q, mask)[0]
    assert np.isnan(found[0, 0, 0]).all() and np.isfinite(found[0, 0, 1]).all()


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortmodule_c.onnx.export._MOST_BYTES", 1000)
    module, x = nn.Linear(40, 40), torch.randn(2, 40)
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert set(before) == {"net.onnx", "net.onnx.data"}
    ortmodule_c.onnx.save(tmp_path / "net.onnx", module, (x,))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before

    def full(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(onnx, "save_model", full)
    with pytest.raises(OSError, match="the disk is full"):
        ortmodule_c.onnx.save(tmp_path / "net.onnx", nn.Linear(40, 40), (x,))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_module_of_a_file_is_written_in_its_dtype(tmp_path: Path) -> None:
    ortmodule_c.onnx.save(tmp_path / "net.onnx", nn.Linear(3, 2), (torch.randn(4, 3),))
    read = ortmodule_c.onnx.load(tmp_path / "net.onnx")
    with pytest.raises(ValueError, match="is written as it was read"):
        ortmodule_c.onnx.save(tmp_path / "again.onnx", read, (), output_names=["y"])
    with pytest.raises(NotExportable, match=r"is of torch.float64, another dtype than the file's"):
        ortmodule_c.onnx.save(tmp_path / "again.onnx", read.double(), ())
