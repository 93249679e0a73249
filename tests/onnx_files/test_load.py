"""Modules made of ONNX files: they compute what ONNX says, train as PyTorch does, and refuse by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from torch import nn

import ortmodule_c
from ortmodule_c import DebugOptions, NotExportable, ORTModule, ORTModuleError


def model(body: str, weights: dict[str, torch.Tensor], opset: int = 20) -> onnx.ModelProto:
    made = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {body}')
    for node in made.graph.node:  # the parser knows no names with dots
        node.input[:] = [name.replace("__", ".") for name in node.input]
    made.graph.initializer.extend(numpy_helper.from_array(t.detach().numpy(), name) for name, t in weights.items())
    return made


MLP = """net (float[N, 6] x) => (float[N, 3] y) {
  h = Gemm<transB = 1>(x, fc1__weight, fc1__bias)
  a = Relu(h)
  y = Gemm<transB = 1>(a, fc2__weight, fc2__bias)
}"""
CONV = """net (float[N, 3, H, W] x) => (float[N, 2] y) {
  c = Conv<pads = [1, 1, 1, 1]>(x, conv__weight, conv__bias)
  n = BatchNormalization<momentum = 0.8>(c, bn__weight, bn__bias, bn__running_mean, bn__running_var)
  r = Clip(n, zero, six)
  p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
  g = GlobalAveragePool(p)
  f = Flatten(g)
  y = Gemm<transB = 1>(f, fc__weight, fc__bias)
}"""
ATTENTION = """net (float[B, T, 8] x) => (float[B, T, 8] y) {
  q = MatMul(x, wq)
  k = MatMul(x, wk)
  kt = Transpose<perm = [0, 2, 1]>(k)
  s = MatMul(q, kt)
  d = Div(s, scale)
  w = Softmax(d)
  o = MatMul(w, x)
  a = Add(x, o)
  y = LayerNormalization(a, ln__weight, ln__bias)
}"""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.max_pool2d(nn.functional.relu6(self.bn(self.conv(x))), 2)
        return self.fc(h.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.ln = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = (x @ self.wq @ (x @ self.wk).transpose(1, 2) / 8**0.5).softmax(-1)
        return self.ln(x + w @ x)


BOUNDS = {"zero": torch.tensor(0.0), "six": torch.tensor(6.0)}
NETS = {
    "mlp": (Mlp, MLP, {}, [(4, 6), (3, 6), (1, 6)]),
    "conv": (Conv, CONV, BOUNDS, [(4, 3, 8, 8), (2, 3, 6, 10)]),
    "attention": (Attention, ATTENTION, {"scale": torch.tensor(8**0.5)}, [(2, 5, 8), (3, 8, 8)]),
}


def pair(name: str) -> tuple[nn.Module, nn.Module, list[tuple[int, ...]]]:
    make, body, more, shapes = NETS[name]
    theirs = make()
    state = {k: v.clone() for k, v in theirs.state_dict().items() if "num_batches" not in k}
    return theirs, ortmodule_c.onnx.load(model(body, {**state, **more})), shapes


@pytest.mark.parametrize("name", NETS)
def test_it_trains_as_pytorch_does(name: str) -> None:
    """Of any size, with the names that the file has."""
    theirs, ours, shapes = pair(name)
    ours.train()
    assert set(ours.state_dict()) == {k for k in theirs.state_dict() if "num_batches" not in k}
    both = [(m, torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.5)) for m in (theirs, ours)]
    for shape in shapes * 3:
        x, losses, grads = torch.randn(shape), [], []
        for m, optimizer in both:
            given = x.clone().requires_grad_()
            optimizer.zero_grad()
            loss = m(given).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            grads.append(given.grad)
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    expected = {k: v for k, v in theirs.named_parameters()}
    torch.testing.assert_close(dict(ours.named_parameters()), expected, rtol=1e-3, atol=1e-3)


def test_running_statistics_are_those_of_onnx() -> None:
    """Their variance is that of the elements, not that of a sample."""
    _, ours, _ = pair("conv")
    x = torch.randn(4, 3, 8, 8)
    conv = nn.functional.conv2d(x, ours.conv.weight, ours.conv.bias, padding=1)
    assert not ours.training
    before = copy.deepcopy(ours.state_dict())
    ours(x)
    assert torch.equal(before["bn.running_var"], ours.state_dict()["bn.running_var"])
    ours.train()(x)
    var = 0.8 * before["bn.running_var"] + 0.2 * conv.detach().var((0, 2, 3), unbiased=False)
    torch.testing.assert_close(ours.state_dict()["bn.running_var"], var, rtol=1e-4, atol=1e-5)


DROPOUT = "net (float[64, 64] x) => (float[64, 64] y) {{ y = Dropout(x, ratio{more}) }}"


def test_the_mode_of_the_module_says_whether_dropout_drops() -> None:
    inference = ortmodule_c.onnx.load(model(DROPOUT.format(more=""), {"ratio": torch.tensor(0.25)}))
    flag = {"ratio": torch.tensor(0.25), "on": torch.tensor(True)}
    training = ortmodule_c.onnx.load(model(DROPOUT.format(more=", on"), flag))
    assert not inference.training and training.training
    x = torch.ones(64, 64)
    assert torch.equal(inference(x), x) and torch.equal(training.eval()(x), x)
    for module in (inference, training):
        torch.manual_seed(0)
        first = module.train()(x)
        assert 0.2 < (first == 0).float().mean() < 0.3
        torch.manual_seed(0)
        assert torch.equal(first, module(x)) and not torch.equal(first, module(x))


def test_inputs_by_name_and_position() -> None:
    module = ortmodule_c.onnx.load(
        model("net (float[2] a, float[2] b) => (float[2] y, float[2] z) { y = Sub(a, b) z = Neg(b) }", {})
    )
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert [t.tolist() for t in module(b=b, a=a)] == [t.tolist() for t in module(a, b)] == [[-2, -3], [-3, -5]]
    assert (module.input_names, module.output_names) == (["a", "b"], ["y", "z"])
    with pytest.raises(TypeError, match=r"inputs \['b'\] are not given"):
        module(a)
    with pytest.raises(TypeError, match="'c' is none of the model"):
        module(a, b, c=a)
    with pytest.raises(TypeError, match="'a' is given twice"):
        module(a, a=a)
    with pytest.raises(TypeError, match="'b' is a list, not a tensor"):
        module(a, [1.0])
    with pytest.raises(ValueError, match=r"'a' has shape \[3\], the model takes \[2\]"):
        module(torch.ones(3), b)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("y = StringNormalizer(x)", "StringNormalizer of domain ai.onnx, version 10"),
        ("y = com.acme.Wibble(x)", "Wibble of domain com.acme, opset 1"),
        ("y = Cast<to = 8>(x)", "Cast of domain ai.onnx, version 19: dtype STRING is not known"),
        ("y = Mod(x, x)", "Mod of domain ai.onnx, version 13: .* sign of the dividend, and fmod=1"),
        ("y = Reshape(x, x)", "Reshape of domain ai.onnx, version 19"),
    ],
)
def test_what_has_no_translation_is_named(node: str, said: str) -> None:
    made = model("net (float[4] x) => (float[4] y) { y = Neg(x) }", {})
    made.opset_import.append(helper.make_opsetid("com.acme", 1))
    parsed = parser.parse_node(node)
    made.graph.node[0].CopyFrom(parsed)
    made.graph.node[0].name = "here"
    with pytest.raises(NotExportable, match=f"node 'here': {said}"):
        ortmodule_c.onnx.load(made)(torch.ones(4))


@pytest.mark.parametrize("op", ["RegexFullMatch", "StringConcat", "StringSplit"])
def test_what_has_no_row_is_refused(op: str) -> None:
    made = model("net (float[4] x) => (float[4] y) { y = Neg(x) }", {})
    made.graph.node[0].op_type = op
    with pytest.raises(NotExportable, match=f"{op} of domain ai.onnx"):
        ortmodule_c.onnx.load(made)


def test_names_that_a_module_cannot_have_are_mended() -> None:
    names = ["a.b", "a", "forward", "training.w", "x..y", "/enc/w:0", ".lead"]
    body = "".join(f"t{i} = Add({'x' if not i else f't{i - 1}'}, w{i}) " for i in range(len(names)))
    made = model(f"net (float[2] x) => (float[2] y) {{ {body} y = Neg(t{len(names) - 1}) }}", {})
    for i, name in enumerate(names):
        made.graph.node[i].input[1] = name
        made.graph.initializer.append(numpy_helper.from_array(np.full(2, 10.0**i, np.float32), name))
    module = ortmodule_c.onnx.load(made)
    assert len(list(module.parameters())) == len(names)
    assert module(torch.zeros(2)).tolist() == [-1111111, -1111111]
    again = copy.deepcopy(module)
    again.load_state_dict({k: torch.zeros(2) for k in module.state_dict()})
    assert again(torch.zeros(2)).tolist() == [0, 0] and module(torch.zeros(2)).tolist() == [-1111111, -1111111]


def test_a_weight_that_is_changed_is_seen() -> None:
    _, ours, _ = pair("mlp")
    x = torch.randn(4, 6)
    before = ours(x)
    with torch.no_grad():
        ours.fc2.bias += 1
    torch.testing.assert_close(ours(x), before + 1)
    ours.double()
    assert ours(x.double()).dtype == torch.float64
    ours.fc2.bias.requires_grad_(False)
    ours(x.double()).sum().backward()
    assert ours.fc2.bias.grad is None and ours.fc1.bias.grad is not None


def test_backward_twice_needs_the_graph_as_in_pytorch() -> None:
    _, ours, _ = pair("mlp")
    loss = ours(torch.randn(4, 6)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# Meanings that changed with the opset: the reference of ONNX says what each is.
X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
VERSIONS = [
    ("Clip<min = -0.5, max = 0.5>(x)", {}, (6, 10)),
    ("Clip(x, low)", {"low": np.float32(-0.5)}, (11, 12, 13)),
    *[(f"{op}<axis = 1>(x)", {}, (13,)) for op in ("Softmax", "LogSoftmax", "Hardmax")],
    *[(f"{op}(x)", {}, (13,)) for op in ("Softmax", "LogSoftmax", "Hardmax")],
    ("Unsqueeze<axes = [0, 2]>(x)", {}, (1, 11)),
    ("Unsqueeze(x, axes)", {"axes": np.array([0, 2])}, (13, 21)),
    ("Squeeze<axes = [0]>(one)", {"one": X[:1]}, (1, 11)),
    ("Squeeze(one, axes)", {"one": X[:1], "axes": np.array([-3])}, (13, 21)),
    ("Squeeze(one)", {"one": X[:1]}, (11, 13)),
    *[(f"{op}<axes = [1], keepdims = 0>(x)", {}, (1, 11)) for op in ("ReduceSum", "ReduceMean", "ReduceL2")],
    *[(f"{op}<axes = [-1]>(x)", {}, (11,)) for op in ("ReduceMax", "ReduceLogSumExp", "ReduceSumSquare")],
    ("ReduceSum(x, axes)", {"axes": np.array([1])}, (13,)),
    ("ReduceMean(x, axes)", {"axes": np.array([0, 2])}, (18,)),
    ("ReduceMean<axes = [0, 2]>(x)", {}, (13,)),
    ("Slice<axes = [1, 2], starts = [1, -3], ends = [9, -1]>(x)", {}, (1, 9)),
    ("Slice(x, s, e, a, p)", {k: np.array(v) for k, v in zip("seap", ([3], [0], [2], [-1]), strict=True)}, (10, 13)),
    ("Pad<pads = [0, 1, 0, 0, 0, 2], value = 1.5>(x)", {}, (2,)),
    ("Pad(x, p, v)", {"p": np.array([0, 1, 0, 0, 0, 2]), "v": np.float32(1.5)}, (11, 18)),
    ("Pad(x, p, v, a)", {"p": np.array([1, 2]), "v": np.float32(1.5), "a": np.array([-2])}, (18, 21)),
    ("Dropout<ratio = 0.5>(x)", {}, (7, 10)),
    ("Dropout(x, r)", {"r": np.float32(0.5)}, (12, 13)),
    *[
        (
            "BatchNormalization(x, w, w, w, v)",
            {"w": np.ones(3, np.float32), "v": np.full(3, 2, np.float32)},
            (14, 15),
        )
    ],
    ("Reshape(x, s)", {"s": np.array([0, -1])}, (5, 13, 14)),
    ('Gelu<approximate = "tanh">(x)', {}, (20,)),
    ("Transpose(x)", {}, (1, 13)),
    ("Sum(x, x, x)", {}, (6, 8, 13)),
    ("Mean(x, k)", {"k": np.ones((4,), np.float32)}, (8, 13)),
]


@pytest.mark.parametrize(
    ("node", "more", "opset"), [(n, m, v) for n, m, versions in VERSIONS for v in versions], ids=lambda v: str(v)[:40]
)
def test_each_version_means_what_it_meant_then(node: str, more: dict[str, np.ndarray], opset: int) -> None:
    made = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {max(opset, 7)}]> g (float[2, 3, 4] x) => (y) {{ y = {node} }}'
    )
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in more.items())
    (expected,) = ReferenceEvaluator(made).run(None, {"x": X})
    got = ortmodule_c.onnx.load(made)(torch.from_numpy(X))
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_before_opset_13_a_softmax_is_over_all_dims_from_the_axis_on(op: str, axis: int) -> None:
    rows = X.reshape(int(np.prod(X.shape[:axis])), -1)
    now = model(f"g (float[R, C] x) => (y) {{ y = {op}<axis = 1>(x) }}", {})
    (expected,) = ReferenceEvaluator(now).run(None, {"x": rows})
    then = model(f"g (float[2, 3, 4] x) => (y) {{ y = {op}<axis = {axis}>(x) }}", {}, 11)
    got = ortmodule_c.onnx.load(then)(torch.from_numpy(X))
    np.testing.assert_allclose(got.numpy(), expected.reshape(X.shape), rtol=1e-5, atol=1e-6)


def test_an_op_that_onnx_defines_by_others_needs_no_row_of_its_own() -> None:
    body = "h = Celu<alpha = 2.0>(x) t = ThresholdedRelu<alpha = 0.1>(h) y = Shrink<lambd = 0.2>(t)"
    made = model(f"net (float[2, 3] x) => (float[2, 3] y) {{ {body} }}", {}, 22)
    x = torch.randn(2, 3)
    (expected,) = ReferenceEvaluator(made).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(ortmodule_c.onnx.load(made)(x).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_functions_of_the_model_are_followed() -> None:
    made = parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "local": 1]>
        net (float[3] x) => (float[3] y) { y = local.scaled<by = 3.0>(x) }
        <domain: "local", opset_import: ["": 18]> scaled<by>(a) => (b) {
            k = Constant<value_float: float = @by>()
            b = Mul(a, k)
        }""")
    assert ortmodule_c.onnx.load(made)(torch.tensor([1.0, 2.0, 3.0])).tolist() == [3, 6, 9]


@pytest.mark.parametrize("name", NETS)
def test_what_is_written_can_be_read(name: str, tmp_path: Path) -> None:
    """The exported graph, ops of our own included, as a module: the weights are inputs of it."""
    theirs, _, shapes = pair(name)
    options = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
    x = torch.randn(shapes[0])
    theirs.eval()
    ORTModule(theirs, options)(x).sum().backward()
    read = ortmodule_c.onnx.load(tmp_path / "net_exported_training.onnx")
    state = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers()), "x": x}
    got = read(**{k: state[k] for k in read.input_names})
    torch.testing.assert_close(got, theirs(x), rtol=1e-5, atol=1e-5)


class _Net(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_it_needs_no_wrapper_and_a_part_of_a_module_keeps_the_others_in_c() -> None:
    loaded = ortmodule_c.onnx.load(model("n (float[N, 2] x) => (float[N, 2] y) { y = Tanh(x) }", {}))
    with pytest.raises(ORTModuleError, match="runs in the C core by itself"):
        ORTModule(loaded)
    whole = _Net(loaded)
    ours, x = ORTModule(whole), torch.randn(4, 2)
    with pytest.warns(UserWarning, match="its part body is of an ONNX file"):
        y = ours(x)
    torch.testing.assert_close(y, whole(x))
    assert ours.stats()["dynamo_graphs"] == 1


@pytest.mark.parametrize("source", [b"", None, nn.Linear(1, 1)])
def test_what_is_no_model_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a path or an onnx\.ModelProto"):
        ortmodule_c.onnx.load(source)


def test_the_backend_runs_nodes_and_models() -> None:
    node = helper.make_node("Gemm", ["a", "b"], ["y"], transB=1)
    a, b = np.ones((2, 3), np.float32), np.full((4, 3), 2, np.float32)
    (y,) = ortmodule_c.backend.run_node(node, [a, b])
    assert y.tolist() == [[6.0] * 4] * 2
    prepared = ortmodule_c.backend.prepare(model("n (float[2] x) => (float[2] y) { y = Neg(x) }", {}))
    assert prepared.run({"x": np.ones(2, np.float32)}).y.tolist() == [-1, -1]
    assert ortmodule_c.backend.supports_device("CPU") and not ortmodule_c.backend.supports_device("CUDA")
    with pytest.raises(NotExportable, match="no kernels for device 'CUDA'"):
        ortmodule_c.backend.prepare(model("n (float[2] x) => (float[2] y) { y = Neg(x) }", {}), "CUDA")


def test_a_graph_has_the_values_of_those_inputs_in_it_that_it_cannot_do_without() -> None:
    body = "net (float[N, 6] x, int64[K] shape, int64[N] ids) => (y, z) { y = Reshape(x, shape) z = Gather(x, ids) }"
    module = ortmodule_c.onnx.load(model(body, {}))
    x = torch.randn(4, 6, requires_grad=True)
    for shape in ([-1, 12], [24], [2, 2, -1]):
        for ids in ([0, 1, 2, 3], [3, 3, 0, 0]):
            y, z = module(x, torch.tensor(shape), torch.tensor(ids))
            assert torch.equal(y, x.reshape(shape)) and torch.equal(z, x[ids])
    assert {name for name, _ in module._pinned} == {"shape"}
    with pytest.raises(NotExportable, match="Reshape"):
        module(x, torch.tensor([5]), torch.tensor(ids))


def test_an_opset_of_the_future_is_refused() -> None:
    with pytest.raises(NotExportable, match="written for opset 999"):
        ortmodule_c.onnx.load(model("net (float[2] x) => (float[2] y) { y = Neg(x) }", {}, 999))


def test_every_loss_and_norm_of_onnx_has_its_gradient() -> None:
    body = """net (float[4, 3] x, int64[4] t) => (float loss) {
        n = LayerNormalization(x, scale)
        loss = SoftmaxCrossEntropyLoss<ignore_index = 1>(n, t, weight)
    }"""
    weights = {"scale": torch.ones(3), "weight": torch.tensor([0.5, 1.0, 2.0])}
    module = ortmodule_c.onnx.load(model(body, weights))
    module.weight.requires_grad_(False)
    x, t = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 2])
    scale = torch.ones(3, requires_grad=True)
    normed = nn.functional.layer_norm(x, (3,), scale)
    expected = nn.functional.cross_entropy(normed, t, weights["weight"], ignore_index=1)
    loss = module(x, t)
    torch.testing.assert_close(loss, expected)
    ours = torch.autograd.grad(loss, [x, module.scale])
    torch.testing.assert_close(ours, torch.autograd.grad(expected, [x, scale]))


def test_halves_are_loaded_to_the_bit() -> None:
    for dtype, code in ((torch.bfloat16, TensorProto.BFLOAT16), (torch.float16, TensorProto.FLOAT16)):
        w = torch.randn(3).to(dtype)
        raw = helper.make_tensor("w", code, [3], w.view(torch.uint8).numpy().tobytes(), raw=True)
        info = [helper.make_tensor_value_info(n, code, [3]) for n in "xy"]
        graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", info[:1], info[1:], [raw])
        module = ortmodule_c.onnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
        assert torch.equal(module.w, w)
        assert torch.equal(module(torch.zeros(3, dtype=dtype)), w)
