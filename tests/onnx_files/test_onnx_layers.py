"""Layers of ONNX that are more than one op of the core: their numbers and gradients are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onnx import ModelProto, helper, numpy_helper, parser
from torch import Tensor, nn
from torch.nn import functional as F

import ortmodule_c
from ortmodule_c import NotExportable
from ortmodule_c.onnx import control

Eager = Callable[..., Tensor]


def made(text: str, constants: dict[str, Any], opset: int = 22) -> ModelProto:
    """A model, of which constants are initializers."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(torch.as_tensor(v).detach().numpy(), name) for name, v in constants.items()
    )
    return model


def compare(model: ModelProto, eager: Eager, inputs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Results, and gradients of inputs that are floats: 0 of those that a result does not hang on."""
    module = ortmodule_c.onnx.load(model).eval()
    outcomes = []
    for f in (module, eager):
        given = [v.detach().clone().requires_grad_(v.is_floating_point()) for v in inputs.values()]
        y = f(*given)
        (y * torch.arange(y.numel()).reshape(y.shape).cos()).sum().backward()
        grads = [v.grad if v.grad is not None else torch.zeros_like(v) for v in given if v.requires_grad]
        outcomes.append([y.detach(), *grads])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


RESIZE = "net (float[A, B, C, D] x) => (float[E, F, G, H] y) {{ y = Resize<{said}>(x, , {given}) }}"
FACTORS, SIZES = {"s": [1.0, 1.0, 2.0, 0.6]}, {"e": [2, 3, 11, 3]}


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize(("mode", "theirs"), [("linear", "bilinear"), ("cubic", "bicubic")])
def test_resize_interpolates(mode: str, theirs: str, corners: bool) -> None:
    said = f'mode = "{mode}", coordinate_transformation_mode = "{"align_corners" if corners else "pytorch_half_pixel"}"'
    x = torch.randn(2, 3, 5, 7)
    sizes = RESIZE.format(said=said, given=", e")
    compare(made(sizes, SIZES), lambda x: F.interpolate(x, (11, 3), mode=theirs, align_corners=corners), {"x": x})
    if not corners:
        factors = RESIZE.format(said=said, given="s")
        compare(made(factors, FACTORS), lambda x: F.interpolate(x, scale_factor=(2, 0.6), mode=theirs), {"x": x})
        smooth = RESIZE.format(said=said + ", antialias = 1, exclude_outside = 1", given=", e")
        if mode == "linear":  # PyTorch smooths cubic curves by another one
            compare(made(smooth, SIZES), lambda x: F.interpolate(x, (11, 3), mode=theirs, antialias=True), {"x": x})


def test_resize_takes_the_nearest() -> None:
    said = 'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'
    x = torch.randn(2, 3, 5, 7)
    compare(made(RESIZE.format(said=said, given=", e"), SIZES), lambda x: F.interpolate(x, (11, 3)), {"x": x})
    x = torch.arange(24).reshape(1, 2, 3, 4).int()
    model = made(RESIZE.format(said=said, given=", e").replace("float", "int32"), {"e": [1, 2, 6, 4]})
    assert torch.equal(ortmodule_c.onnx.load(model)(x), x.repeat_interleave(2, 2))


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample(mode: str, padding: str, corners: bool) -> None:
    said = f'mode = "{mode.removeprefix("bi")}", padding_mode = "{padding}", align_corners = {int(corners)}'
    text = f"net (float[2, 3, 5, 6] x, float[2, 4, 7, 2] g) => (float[2, 3, 4, 7] y) {{ y = GridSample<{said}>(x, g) }}"
    inputs = {"x": torch.randn(2, 3, 5, 6), "g": torch.randn(2, 4, 7, 2)}
    compare(
        made(text, {}),
        lambda x, g: F.grid_sample(x, g, mode=mode, padding_mode=padding, align_corners=corners),
        inputs,
        1e-4,
    )


class Recurrent(nn.Module):
    """One of PyTorch's layers as ONNX has its weights: gates in another order, a dim of directions."""

    def __init__(self, kind: str, both: bool, **said: Any) -> None:
        super().__init__()
        self.order = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}[kind]
        self.directions = 1 + both
        self.layer: nn.RNNBase = getattr(nn, kind)(4, 3, bidirectional=both, **said)

    def weights(self) -> dict[str, Tensor]:
        def of(name: str, suffix: str) -> Tensor:
            parts = getattr(self.layer, f"{name}_l0{suffix}").chunk(len(self.order))
            return torch.cat([parts[i] for i in self.order])

        ends = ["", "_reverse"][: self.directions]
        return {
            "w": torch.stack([of("weight_ih", e) for e in ends]),
            "r": torch.stack([of("weight_hh", e) for e in ends]),
            "b": torch.stack([torch.cat([of("bias_ih", e), of("bias_hh", e)]) for e in ends]),
        }

    def forward(self, x: Tensor, w: Tensor, r: Tensor, b: Tensor) -> Tensor:
        """Outputs of [steps, directions, batch, hidden], of weights that are given."""
        given = {}
        back = [self.order.index(i) for i in range(len(self.order))]
        for k, end in enumerate(["", "_reverse"][: self.directions]):
            parts = {"weight_ih": w[k], "weight_hh": r[k], "bias_ih": b[k].chunk(2)[0], "bias_hh": b[k].chunk(2)[1]}
            for name, v in parts.items():
                chunks = v.chunk(len(back))
                given[f"{name}_l0{end}"] = torch.cat([chunks[i] for i in back])
        y = torch.func.functional_call(self.layer, given, (x,))[0]
        return y.unflatten(2, (self.directions, -1)).transpose(1, 2)


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("both", [False, True], ids=["forward", "both ways"])
@pytest.mark.parametrize(("kind", "more"), [("LSTM", {}), ("GRU", {}), ("RNN", {}), ("RNN", {"nonlinearity": "relu"})])
def test_recurrent_layers(kind: str, more: dict[str, Any], both: bool, lengths: bool) -> None:
    layer = Recurrent(kind, both, **more)
    said = f'hidden_size = 3, direction = "{"bidirectional" if both else "forward"}"'
    said += ", linear_before_reset = 1" if kind == "GRU" else ""
    said += ", activations = [" + ", ".join(['"Relu"'] * (1 + both)) + "]" if more else ""
    head = "net (float[5, 2, 4] x, float[D, G, 4] w, float[D, G, 3] r, float[D, H] b) => (float[5, D, 2, 3] y)"
    text = f"{head} {{ y = {kind}<{said}>(x, w, r, b{', n' if lengths else ''}) }}"
    model = made(text, {"n": torch.tensor([5, 3], dtype=torch.int32)} if lengths else {})

    def eager(x: Tensor, *weights: Tensor) -> Tensor:
        if not lengths:
            return layer(x, *weights)
        short = F.pad(layer(x[:3, 1:], *weights), (0, 0, 0, 0, 0, 0, 0, 2))
        return torch.cat([layer(x[:, :1], *weights), short], 2)

    compare(model, eager, {"x": torch.randn(5, 2, 4), **layer.weights()})


EQUATIONS = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("bij,bjk", (2, 3, 4), (2, 4, 5)),
    ("...ij,...kj->...ik", (2, 3, 3, 4), (3, 5, 4)),
    ("bhqd,bhkd->bqhk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("ij,kl->", (3, 4), (2, 5)),
    ("ii,ij->j", (3, 3), (3, 3)),
    ("i,j->ji", (3,), (4,)),
    ("...i,...i->...", (1, 4), (3, 1)),
]


@pytest.mark.parametrize(("equation", "a", "b"), EQUATIONS)
def test_einsum(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    types = [f"float[{', '.join(map(str, s))}] {name}" for s, name in ((a, "a"), (b, "b"))]
    model = made(f'net ({", ".join(types)}) => (float y) {{ y = Einsum<equation = "{equation}">(a, b) }}', {})
    model.graph.output[0].type.tensor_type.ClearField("shape")
    compare(model, lambda a, b: torch.einsum(equation, a, b), {"a": torch.randn(a), "b": torch.randn(b)})


def multiplied(x: torch.Tensor, dim: int, ids: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return x.scatter_reduce(dim, ids, updates, "prod")


def test_what_is_put_at_places() -> None:
    x, ids, updates = torch.randn(4, 5), torch.tensor([[0, 2], [3, 1], [4, 0]]), torch.randn(3, 2)
    inputs = {"x": x, "i": ids, "u": updates}
    head = "net (float[4, 5] x, int64[3, 2] i, float[3, 2] u) => (float[4, 5] y)"
    for reduction, theirs in (("none", torch.scatter), ("add", torch.scatter_add), ("mul", multiplied)):
        text = f'{head} {{ y = ScatterElements<axis = 1, reduction = "{reduction}">(x, i, u) }}'
        compare(made(text, {}), lambda x, i, u, f=theirs: f(x, 1, i, u), inputs)
    head = "net (float[4, 5] x, int64[2, 1] i, float[2, 5] u) => (float[4, 5] y)"
    inputs = {"x": x, "i": torch.tensor([[2], [0]]), "u": torch.randn(2, 5)}
    for reduction in ("none", "add"):
        text = f'{head} {{ y = ScatterND<reduction = "{reduction}">(x, i, u) }}'
        compare(made(text, {}), lambda x, i, u, a=reduction: x.index_put((i[:, 0],), u, accumulate=a == "add"), inputs)


def test_sequences_are_turned_round() -> None:
    text = "net (float[5, 3, 2] x, int64[3] n) => (float[5, 3, 2] y) { y = ReverseSequence(x, n) }"

    def eager(x: Tensor, n: Tensor) -> Tensor:
        return torch.stack([torch.cat([x[:k, i].flip(0), x[k:, i]]) for i, k in enumerate(n.tolist())], 1)

    compare(made(text, {}), eager, {"x": torch.randn(5, 3, 2), "n": torch.tensor([4, 1, 5])})


def test_norms_over_neighbours() -> None:
    text = "net (float[2, 7, 3] x) => (float[2, 7, 3] y) { y = LRN<size = 3, alpha = 0.1, beta = 0.6, bias = 1.5>(x) }"
    x = {"x": torch.randn(2, 7, 3)}
    compare(made(text, {}), lambda x: F.local_response_norm(x, 3, 0.1, 0.6, 1.5), x)
    for p in (1, 2):
        text = f"net (float[2, 7, 3] x) => (float[2, 7, 3] y) {{ y = LpNormalization<axis = 1, p = {p}>(x) }}"
        compare(made(text, {}), lambda x, p=p: F.normalize(x, p, 1), x)


# Control flow: what is known when a graph is made decides.

BRANCHES = """net (float[3] x, bool up) => (float[3] y) {
  h = Mul(x, w)
  y = If (up) <
    then_branch = more () => (float[3] a) { a = Add(h, v) },
    else_branch = less () => (float[3] b) { b = Neg(h) }
  >
}"""


def test_a_branch_is_taken_and_its_weights_are_trained() -> None:
    w, v = torch.randn(3), torch.randn(3)
    module = ortmodule_c.onnx.load(made(BRANCHES, {"w": w, "v": v}))
    assert set(dict(module.named_parameters())) == {"w", "v"}
    x = torch.randn(3)
    torch.testing.assert_close(module(x, torch.tensor(True)), x * w + v)
    torch.testing.assert_close(module(x, torch.tensor(False)), -x * w)
    module(x, torch.tensor(True)).sum().backward()
    torch.testing.assert_close(module.w.grad, x)
    torch.testing.assert_close(module.v.grad, torch.ones(3))


LOOP = """net (float[3] x, int64 n) => (float[3] y, float[K, 3] all) {
  y, all = Loop (n, , x) <
    body = step (int64 i, bool on, float[3] a) => (bool on_, float[3] b, float[3] c) {
      on_ = Identity(on)
      b = Mul(a, w)
      c = Add(b, a)
    }
  >
}"""


def test_a_loop_runs_as_often_as_is_said() -> None:
    w = torch.randn(3)
    module = ortmodule_c.onnx.load(made(LOOP, {"w": w}))
    x = torch.randn(3)
    for n in (1, 3):
        y, every = module(x, torch.tensor(n))
        torch.testing.assert_close(y, x * w**n)
        torch.testing.assert_close(every, torch.stack([x * w**i + x * w ** (i + 1) for i in range(n)]))
    module(x, torch.tensor(3))[0].sum().backward()
    torch.testing.assert_close(module.w.grad, 3 * x * w**2)


def test_a_scan_goes_along_an_axis_from_either_end() -> None:
    text = """net (float[2] s, float[4, 2] x) => (float[2] last, float[4, 2] y) {
      last, y = Scan<num_scan_inputs = 1, scan_input_directions = [BACK], scan_output_directions = [BACK],
        body = step (float[2] a, float[2] v) => (float[2] b, float[2] c) { b = Add(a, v) c = Identity(b) }>(s, x)
    }"""
    s, x = torch.randn(2), torch.randn(4, 2)
    for back in (0, 1):
        last, y = ortmodule_c.onnx.load(made(text.replace("BACK", str(back)), {}))(s, x)
        expected = s + (x.flip(0).cumsum(0).flip(0) if back else x.cumsum(0))
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(last, expected[0 if back else -1])


def test_control_flow_that_hangs_on_numbers_is_refused() -> None:
    text = BRANCHES.replace("bool up", "float[3] z").replace("h = Mul(x, w)", "h = Mul(x, w) up = Cast<to = 9>(t)")
    text = text.replace("float[3] z", "float[100] z").replace("up = Cast", "t = ReduceSum<keepdims = 0>(z) up = Cast")
    module = ortmodule_c.onnx.load(made(text, {"w": torch.ones(3), "v": torch.ones(3)}))
    with pytest.raises(NotExportable, match=r"If of domain ai.onnx, .*: the condition must be known"):
        module(torch.ones(3), torch.ones(100))


def test_a_branch_with_weights_of_its_own_is_refused() -> None:
    model = made(BRANCHES, {"w": torch.ones(3), "v": torch.ones(3)})
    branch = model.graph.node[1].attribute[0].g
    branch.initializer.append(numpy_helper.from_array(torch.ones(3).numpy(), "own"))
    branch.node[0].CopyFrom(helper.make_node("Add", ["h", "own"], [branch.output[0].name]))
    with pytest.raises(NotExportable, match="its graph has weights of its own, 'own'"):
        ortmodule_c.onnx.load(model)


def test_a_loop_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MOST_STEPS", 50)
    text = LOOP.replace("(n, , x)", "(, go, x)").replace("int64 n", "bool go")
    module = ortmodule_c.onnx.load(made(text, {"w": torch.ones(3)}))
    with pytest.raises(NotExportable, match="more than 50 steps"):
        module(torch.ones(3), torch.tensor(True))


# Neighbours, transforms and whole numbers.


@pytest.mark.parametrize(("mode", "theirs"), [("reflect", "reflect"), ("edge", "replicate"), ("wrap", "circular")])
def test_pads_of_its_own_elements(mode: str, theirs: str) -> None:
    text = f'net (float[2, 3, 4, 5] x, int64[8] p) => (float[A, B, C, D] y) {{ y = Pad<mode = "{mode}">(x, p) }}'
    pads = torch.tensor([0, 0, 2, 1, 0, 0, 3, 2])
    inputs = {"x": torch.randn(2, 3, 4, 5), "p": pads}
    compare(made(text, {}), lambda x, _: F.pad(x, (1, 2, 2, 3), mode=theirs), inputs)


def test_powers_over_windows() -> None:
    said = "kernel_shape = [2, 3], strides = [2, 1], p = 3"
    text = f"net (float[2, 3, 6, 5] x) => (float[2, 3, 3, 3] y) {{ y = LpPool<{said}>(x) }}"
    eager: Eager = lambda x: F.lp_pool2d(x.abs(), 3, (2, 3), (2, 1))  # noqa: E731
    compare(made(text, {}), eager, {"x": torch.randn(2, 3, 6, 5)}, 1e-4)


def test_blocks_are_added_up() -> None:
    said = "strides = [2, 1], pads = [1, 0, 0, 1], dilations = [1, 2]"
    text = f"net (float[2, 18, 9] x, int64[2] s, int64[2] k) => (float[2, 3, 5, 6] y) {{ y = Col2Im<{said}>(x, s, k) }}"
    inputs = {"x": torch.randn(2, 18, 9), "s": torch.tensor([5, 6]), "k": torch.tensor([2, 3])}

    def eager(x: Tensor, *_: Tensor) -> Tensor:
        whole = F.fold(x, (6, 7), (2, 3), stride=(2, 1), dilation=(1, 2))
        return whole[:, :, 1:, :6]

    compare(made(text, {}), eager, inputs)


@pytest.mark.parametrize("length", [5, 6, 7])
@pytest.mark.parametrize("said", ["inverse = 0", "inverse = 1", "onesided = 1"])
def test_transforms(said: str, length: int) -> None:
    parts = 1 if "onesided" in said else 2
    text = f"net (float[3, 6, {parts}] x, int64 n, int64 a) => (float[3, A, 2] y) {{ y = DFT<{said}>(x, n, a) }}"

    def eager(x: Tensor, *_: Tensor) -> Tensor:
        if parts == 1:
            return torch.view_as_real(torch.fft.rfft(x[..., 0], length, 1))
        given = torch.view_as_complex(x)
        return torch.view_as_real((torch.fft.ifft if "1" in said else torch.fft.fft)(given, length, 1))

    inputs = {"x": torch.randn(3, 6, parts), "n": torch.tensor(length), "a": torch.tensor(1)}
    compare(made(text, {}), eager, inputs)


def test_whole_numbers_stand_for_floats_and_scales_are_trained() -> None:
    head = "net (int8[2, 3] q, float[3] s, int8[3] z) => (float[2, 3] y)"
    q, z = torch.randint(-128, 128, (2, 3), dtype=torch.int8), torch.tensor([3, -128, 127], dtype=torch.int8)
    eager: Eager = lambda q, s, z: (q.int() - z.int()) * s  # noqa: E731
    inputs = {"q": q, "s": torch.rand(3) + 0.1, "z": z}
    compare(made(f"{head} {{ y = DequantizeLinear<axis = 1>(q, s, z) }}", {}), eager, inputs)
    head = "net (float[2, 3] x, float[3] s, int8[3] z) => (int8[2, 3] y)"
    module = ortmodule_c.onnx.load(made(f"{head} {{ y = QuantizeLinear<axis = 1>(x, s, z) }}", {}))
    x, s = torch.randn(2, 3) * 50, torch.rand(3) + 0.1
    expected = ((x / s).round() + z).clamp(-128, 127).to(torch.int8)
    assert torch.equal(module(x, s, z), expected)


def test_the_last_of_the_highest() -> None:
    text = "net (float[2, 5] x) => (int64[2, 1] y) { y = ArgMax<axis = 1, select_last_index = 1>(x) }"
    x = torch.tensor([[1.0, 3, 3, 0, 3], [2, 1, 2, 0, 1]])
    assert ortmodule_c.onnx.load(made(text, {}))(x).tolist() == [[4], [2]]


def test_operands_before_version_7_lie_where_the_node_says() -> None:
    text = "net (float[2, 3, 4] x, float[3] v) => (float[2, 3, 4] y) { y = Mul<broadcast = 1, axis = 1>(x, v) }"
    inputs = {"x": torch.randn(2, 3, 4), "v": torch.randn(3)}
    compare(made(text, {}, opset=6), lambda x, v: x * v[:, None], inputs)


def test_sequences_hold_what_is_split_and_joined() -> None:
    text = """net (float[5, 3] x) => (float[6, 3] y) {
      parts = SplitToSequence<axis = 0>(x, two)
      last = SequenceAt(parts, minus_one)
      fewer = SequenceErase(parts, one)
      more = SequenceInsert(fewer, last, minus_one)
      n = SequenceLength(more)
      wide = ConcatFromSequence<axis = 0>(more)
      f = Cast<to = 1>(n)
      z = Mul(wide, f)
      pad = Identity(z)
      y = Concat<axis = 0>(pad, x2)
    }"""
    constants = {"two": torch.tensor(2), "one": torch.tensor(1), "minus_one": torch.tensor(-1), "x2": torch.ones(2, 3)}

    def eager(x: Tensor) -> Tensor:
        return torch.cat([3 * torch.cat([x[:2], x[4:], x[4:]]), torch.ones(2, 3)])

    compare(made(text, constants), eager, {"x": torch.randn(5, 3)})


def test_a_loop_collects_a_sequence() -> None:
    text = """net (float[3] x, int64 n) => (float[K, 3] y) {
      none = SequenceEmpty()
      all = Loop (n, , none) <
        body = step (int64 i, bool on, seq(float[3]) a) => (bool on_, seq(float[3]) b) {
          on_ = Identity(on)
          f = Cast<to = 1>(i)
          v = Mul(x, f)
          b = SequenceInsert(a, v)
        }
      >
      y = ConcatFromSequence<axis = 0, new_axis = 1>(all)
    }"""
    compare(made(text, {}), lambda x, n: x * torch.arange(int(n))[:, None], {"x": torch.randn(3), "n": torch.tensor(4)})


def test_a_maximum_of_several_windows_is_put_back_once() -> None:
    said = "kernel_shape = [3, 3], strides = [2, 2]"
    text = f"""net (float[1, 2, 7, 7] x) => (float[1, 2, 7, 7] y) {{
      p, i = MaxPool<{said}>(x)
      y = MaxUnpool<{said}>(p, i)
    }}"""
    x = torch.randn(1, 2, 7, 7)
    y = ortmodule_c.onnx.load(made(text, {}))(x)
    values, places = F.max_pool2d(x, 3, 2, return_indices=True)
    torch.testing.assert_close(y, F.max_unpool2d(values, places, 3, 2))


@pytest.mark.parametrize("node", ["LpPool<kernel_shape = [2], strides = [2]>(x)", "LpNormalization<p = 2>(x)"])
def test_roots_of_zero_have_no_gradient(node: str) -> None:
    module = ortmodule_c.onnx.load(made(f"net (float[1, 2, 4] x) => (float[A, B, C] y) {{ y = {node} }}", {}))
    x = torch.zeros(1, 2, 4, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.zeros(1, 2, 4))


def test_a_model_that_names_no_value_is_refused() -> None:
    with pytest.raises(NotExportable, match=r"Relu of domain ai.onnx, .*: there is no value 'z'"):
        ortmodule_c.onnx.load(made("net (float[2] x) => (float[2] y) { y = Relu(z) }", {}))(torch.ones(2))
