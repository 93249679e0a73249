"""Graphs of the core as ONNX models: what is in ONNX's own domain is ONNX, to its checker and in what it computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from ortmodule_c import _C, DebugOptions, ORTModule
from ortmodule_c.onnx.write import FUNCTIONS, to_model

OWN = "ai.ortmodule_c"


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.a(x))
        weights = (h @ h.transpose(-1, -2)).softmax(-1)
        return self.b(nn.functional.gelu(weights @ h)).clamp(-0.5, 0.5).log_softmax(-1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ELU(), nn.Softplus(), nn.Linear(8, 3))


def conv() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU6(), nn.MaxPool2d(2), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 2), nn.Sigmoid())


NETS = {"mlp": (mlp, (5, 6)), "conv": (conv, (2, 3, 16, 16)), "transformer": (Transformer, (2, 5, 6))}


def written(module: nn.Module, x: torch.Tensor, folder: Path) -> list[onnx.ModelProto]:
    options = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(folder), fallback="error")
    ORTModule(module, options)(x)
    return [onnx.load(p) for p in sorted(folder.iterdir())]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_of_onnx_computes_the_same(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, shape = NETS[name]
    module, x = make().to(dtype).eval(), torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        exported, _ = written(module, x, tmp_path)
        expected = module(x)
    assert {n.op_type for n in exported.graph.node if n.domain} <= {f.name for f in exported.functions}
    onnx.checker.check_model(exported, full_check=True)
    values = {"input": x, "x": x, **dict(module.named_parameters()), **dict(module.named_buffers())}
    given = {i.name: values[i.name].detach().numpy() for i in exported.graph.input}
    (got,) = ReferenceEvaluator(exported).run(None, given)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-7  # epsilon is an attribute, of 32 bits
    np.testing.assert_allclose(got, expected.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_all_stages_of_training_pass_the_checker(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, shape = NETS[name]
    options = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
    ours = ORTModule(make().to(dtype), options)
    ours(torch.randn(shape, dtype=dtype)).float().sum().backward()
    assert len(list(tmp_path.iterdir())) == 3
    for path in tmp_path.iterdir():
        onnx.checker.check_model(onnx.load(path), full_check=True)


def model_of(text: str, **constants: torch.Tensor) -> onnx.ModelProto:
    model = to_model(_C.describe(text, "parse" if "?" in text else "specialize", constants=constants))
    onnx.checker.check_model(model, full_check=True)
    return model


def attributes_of(node: onnx.NodeProto) -> dict[str, object]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def test_every_kind_of_attribute_arrives_as_it_is() -> None:
    (node,) = model_of(
        "input %x : f32[?]\n"
        r'%y : f32[?] = FusedElementwise(%x) {ops=["a, b]", "q\"\\\n}", "é"], args=[], imm=[-0.0, 1e-9, inf], '
        'outs=[1, -2], dtypes=[1], class="f32"}'
        ' name="h.0 = {\\"x\\"}"\n'
        "return %y\n"
    ).graph.node
    assert attributes_of(node) == {
        "ops": [b"a, b]", b'q"\\\n}', "é".encode()],
        "args": [],
        "imm": pytest.approx([0.0, 1e-9, float("inf")]),
        "outs": [1, -2],
        "dtypes": [1],
        "class": b"f32",
    }
    (empty,) = [a for a in node.attribute if a.name == "args"]
    assert empty.type == AttributeProto.INTS
    assert node.name == 'h.0 = {"x"}' and node.domain == OWN


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("turned", ["transA=0", "transA=1", "transB=1", "transA=1, transB=1"])
@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 3), (3, 3)), ((2, 3, 3), (3, 3)), ((2, 1, 3, 3), (2, 3, 3)), ((3,), (3, 3)), ((3, 3), (3,))],
    ids=str,
)
def test_a_product_is_what_onnx_composes_it_of(a: tuple[int, ...], b: tuple[int, ...], turned: str) -> None:
    x, y, bias = torch.randn(a), torch.randn(b), torch.randn(3)
    biased = len(b) > 1
    text = "".join(f"input %{name} : f32[{','.join('?' * t.dim())}]\n" for name, t in (("x", x), ("y", y), ("c", bias)))
    text += f"%z = FusedMatMul(%x, %y{', %c' if biased else ''}) {{{turned}}}\nreturn %z\n"
    model = model_of(text)
    assert not {n.domain for n in model.graph.node} - {""}
    (got,) = ReferenceEvaluator(model).run(None, {"x": x.numpy(), "y": y.numpy(), "c": bias.numpy()})
    x, y = (x.mT if "transA=1" in turned and x.dim() > 1 else x), (y.mT if "transB=1" in turned and y.dim() > 1 else y)
    np.testing.assert_allclose(got, (x @ y + (bias if biased else 0)).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("rest", [(), (3,)], ids=str)
def test_picking_from_an_axis_on_is_what_onnx_composes_it_of(axis: int, rest: tuple[int, ...]) -> None:
    x, ids = torch.randn(*(3, 3)[:axis], 4, 3, *rest), torch.tensor([[[3, 0], [1, -1], [-4, 2]]])
    text = f"input %x : f32[{','.join('?' * x.dim())}]\ninput %i : i64[?,?,2]\n"
    model = model_of(f"{text}%y = GatherND(%x, %i) {{axis={axis}}}\nreturn %y\n")
    assert not {n.domain for n in model.graph.node} - {""}
    (got,) = ReferenceEvaluator(model).run(None, {"x": x.numpy(), "i": ids.numpy()})
    wanted = x[(*[slice(None)] * axis, *ids.unbind(-1))]
    np.testing.assert_array_equal(got, wanted.numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 3, 40])
def test_constants_are_written_to_the_bit(dtype: torch.dtype, n: int) -> None:
    text = {torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int8: "i8"}
    text |= {torch.float32: "f32", torch.float64: "f64", torch.uint8: "u8", torch.bool: "bool"}
    data = (torch.randn(n) * 3).to(dtype)
    if dtype.is_floating_point and n > 2:
        data[:3] = torch.tensor([float("nan"), -0.0, float("-inf")])
    model = model_of(f"const %c : {text[dtype]}[{n}] = @\n%y = Identity(%c)\nreturn %y\n", c=data)
    (constant,) = model.graph.initializer
    assert constant.raw_data == data.view(torch.uint8).numpy().tobytes()


def test_bounds_and_elements_are_tensors_of_their_dtype() -> None:
    model = model_of(
        "input %x : i64[?,2]\nconst %m : i64[] = [3]\n%s = Shape(%x)\n"
        "%o = ConstantOfShape(%s) {value=2.0, dtype=7}\n%y = Clip(%x, _, %m)\nreturn %y, %o\n"
    )
    _, fill, clip = model.graph.node
    assert list(clip.input[:2]) == ["x", ""]
    assert numpy_helper.to_array(attributes_of(fill)["value"]).tolist() == [2]
    x = np.array([[1, 9]])
    y, o = ReferenceEvaluator(model).run(None, {"x": x})
    assert y.tolist() == [[1, 3]] and o.tolist() == [[2, 2]] and o.dtype == np.int64


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ("Mod(%x, %x)", "f32[2]"),  # ONNX gives floats the sign of the dividend
        ("MaxPool(%x) {kernel_shape=[2]}", "f32[3,8]"),  # ONNX has an axis of samples and one of channels
        ("LayerNormalization(%x, _)", "f32[2,3]"),  # ONNX has no such without scale
        ("Elu(%x) {scale=1.5}", "f32[2]"),  # ONNX has no such attribute
        ("ReduceMax(%x) {nan_ties=1}", "f32[2]"),
        ("Relu(%x)", "u8[2]"),  # ONNX has no such for the dtype
        ("FloorDiv(%x, %x)", "f32[2]"),
    ],
)
def test_what_onnx_does_not_know_is_in_a_domain_of_its_own(node: str, kind: str) -> None:
    (written,) = model_of(f"input %x : {kind}\n%y = {node}\nreturn %y\n").graph.node
    assert written.domain == OWN


@pytest.mark.parametrize(
    "node",
    [
        "Mod(%i, %i)",
        "Mod(%x, %x) {fmod=1}",
        "Elu(%x) {scale=1.0}",
        "Softplus(%x) {beta=1.0, threshold=20.0}",
        "ReduceMax(%x) {nan_ties=0}",
    ],
)
def test_what_says_nothing_else_is_onnx(node: str) -> None:
    (written,) = model_of(f"input %x : f32[2]\ninput %i : i64[2]\n%y = {node}\nreturn %y\n").graph.node
    assert written.domain == ""


@pytest.mark.parametrize("op", FUNCTIONS)
def test_an_op_of_ours_that_onnx_can_express_brings_its_meaning_along(op: str) -> None:
    given = {"Embedding": "%x, %i", "MulAdd": "%x, %x, %x", "NotEqual": "%x, %i"}.get(op, "%x")
    kind = "f32" if op == "NotEqual" else "i64"
    text = f"input %x : f32[4,2]\ninput %i : {kind}[4,2]\n%y = {op}({given})\nreturn %y\n"
    model = model_of(text)
    assert [f.name for f in model.functions] == [op]
    x = torch.rand(4, 2)
    i = torch.where(x > 0.5, x, 0.0) if kind == "f32" else torch.arange(8).reshape(4, 2) % 4
    (expected,), _ = _C.Session(text, {}).plan([x, i], [False, False]).forward([x, i], 0)
    (got,) = ReferenceEvaluator(model).run(None, {"x": x.numpy(), "i": i.numpy()})
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6)


def test_indices_of_a_pool_are_written_only_where_they_are_read() -> None:
    text = "input %x : f32[1,2,8,8]\n%y, %i, %t = MaxPool(%x) {{kernel_shape=[2, 2]}}\nreturn %y{}\n"
    (alone,) = model_of(text.format("")).graph.node
    (both,) = model_of(text.format(", %i")).graph.node
    (with_taps,) = model_of(text.format(", %t")).graph.node
    assert (alone.domain, len(alone.output)) == ("", 1)
    assert (both.domain, len(both.output)) == (OWN, 2)
    assert (with_taps.domain, with_taps.output[1]) == (OWN, "")


def test_a_value_may_be_several_results() -> None:
    model = model_of("input %x : f32[2]\n%y = Neg(%x)\nreturn %y, %x, %y\n")
    assert len({o.name for o in model.graph.output} | {"x"}) == 4
    x = np.array([1.0, -2.0], np.float32)
    assert [v.tolist() for v in ReferenceEvaluator(model).run(None, {"x": x})] == [[-1, 2], [1, -2], [-1, 2]]


def test_types_and_open_dims_are_written() -> None:
    model = model_of("input %x : bf16[?,2] grad\n%y = Neg(%x)\nreturn %y\n")
    (x,) = model.graph.input
    assert x.type.tensor_type.elem_type == TensorProto.BFLOAT16
    assert [d.dim_value for d in x.type.tensor_type.shape.dim] == [0, 2]


def test_an_output_names_the_input_that_it_is_written_over() -> None:
    text = "input %x : f32[2]\ninput %old : f32[2]\n%y = Add(%x, %old)\nreturn %y, %y over %old, %x over %x\n"
    model = to_model(_C.describe(text, "parse"))
    assert [[(p.key, p.value) for p in o.metadata_props] for o in model.graph.output] == [
        [],
        [("ortmodule_c.over", "old")],
        [("ortmodule_c.over", "x")],
    ]
