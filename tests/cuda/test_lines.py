"""Ops along lines on the emulated GPU: each team of threads, parts, every dtype, and what is empty or not finite."""

from __future__ import annotations

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor, inf, nan

from case import type_text

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def graph(call: str, inputs: list[Tensor], outputs: int = 1) -> str:
    lines = [f"input %x{i} : {type_text(t)}" for i, t in enumerate(inputs)]
    names = ", ".join(f"%y{k}" for k in range(outputs))
    return "\n".join([*lines, f"{names} = {call}", f"return {names}", ""])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def few(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """-1, 0 and 1, of which any order gives the same sum."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def reduced(gpu: Gpu, op: str, x: Tensor, axes: list[int]) -> Tensor:
    text = graph(f"{op}(%x0, %axes) {{keepdims=0}}", [x])
    text = text.replace("%y0 =", f"const %axes : i64[{len(axes)}] = {axes}\n%y0 =", 1)
    return gpu.forward(text, [x])[0]


REDUCTIONS = [
    ((5, 37), [1]),  # a warp for each line
    ((3, 5000), [1]),  # a block
    ((2, 70001), [1]),  # many blocks
    ((90000,), [0]),
    ((40, 8), [1]),  # as many lines as a warp has lanes
    ((70, 3), [0]),
    ((700, 37), [0]),
    ((20000, 5), [0]),
    ((700, 264), [0]),  # columns by packs, the last warp's in part
    ((9, 8), [0]),
    ((5, 264), [1]),  # a warp for a line of whole packs
    ((700, 16), [0]),  # columns for few lanes of a warp
    ((8, 17000), [0]),  # and so many that more lanes have some
    ((2, 300, 5, 16), [1]),  # packs of two groups of columns
    ((2, 300, 5, 3), [1]),
    ((3, 4, 16, 8), [0, 2, 3]),  # groups: whole packs, no packs, columns
    ((70, 2, 2, 6), [0, 2, 3]),
    ((70, 2, 7, 7), [0, 2, 3]),
    ((9, 2, 6, 3), [0, 2]),
    ((3, 2, 4, 2, 5, 2, 3, 2), [0, 2, 4, 6]),
    ((3, 2, 4, 2, 5, 2, 3, 2), [1, 3, 5, 7]),
    ((1, 1), [0]),
    ((3, 1, 5), [1]),
]


@pytest.mark.parametrize(("shape", "axes"), REDUCTIONS, ids=str)
def test_a_sum_is_of_all_elements_once(gpu: Gpu, shape: tuple[int, ...], axes: list[int]) -> None:
    x = few(*shape)
    assert torch.equal(reduced(gpu, "ReduceSum", x, axes), x.sum(axes))


@pytest.mark.parametrize(("shape", "axes"), REDUCTIONS[:13:2], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_sums_in_every_dtype(gpu: Gpu, shape: tuple[int, ...], axes: list[int], dtype: torch.dtype) -> None:
    x = few(*shape, dtype=dtype)
    assert torch.equal(reduced(gpu, "ReduceSum", x, axes), x.double().sum(axes).to(dtype))


@pytest.mark.parametrize(("shape", "axes"), REDUCTIONS[:8], ids=str)
def test_an_extreme_is_that_of_any_place_and_nan_is_one(gpu: Gpu, shape: tuple[int, ...], axes: list[int]) -> None:
    x = random(*shape, dtype=torch.bfloat16)
    assert torch.equal(reduced(gpu, "ReduceMax", x, axes), x.amax(axes))
    assert torch.equal(reduced(gpu, "ReduceMin", x, axes), x.amin(axes))
    x.view(-1)[-2] = nan
    assert torch.equal(reduced(gpu, "ReduceMax", x, axes).isnan(), x.amax(axes).isnan())
    assert torch.equal(reduced(gpu, "ReduceMin", x, axes).isnan(), x.amin(axes).isnan())


def test_of_nothing_a_sum_is_0_and_a_mean_nan(gpu: Gpu) -> None:
    x = torch.empty(3, 0, 2)
    assert torch.equal(reduced(gpu, "ReduceSum", x, [1]), torch.zeros(3, 2))
    assert reduced(gpu, "ReduceMean", x, [1]).isnan().all()
    assert reduced(gpu, "ReduceSum", torch.empty(0, 3), [1]).shape == (0,)


@pytest.mark.parametrize(("rows", "columns", "launches"), [(1024, 776, 1), (2048, 48, 1), (2049, 48, 2), (4096, 16, 2)])
def test_sums_of_few_rows_take_one_launch(gpu: Gpu, rows: int, columns: int, launches: int) -> None:
    """Where lanes side by side leave enough of them to go along the rows."""
    x = few(rows, columns, dtype=torch.bfloat16)
    with gpu.launches() as found:
        assert torch.equal(reduced(gpu, "ReduceSum", x, [0]), x.double().sum(0).to(x.dtype))
    assert len(found) == launches


LINES = [((5, 37), -1), ((2, 1100), -1), ((2, 9001), -1), ((33, 5), -1), ((4, 50, 7), 1), ((2, 3, 40), 1), ((1,), 0)]


def softmax_grad(dy: Tensor, y: Tensor, axis: int) -> Tensor:
    return y * (dy - (dy * y).sum(axis, keepdim=True))


def log_softmax_grad(dy: Tensor, y: Tensor, axis: int) -> Tensor:
    return dy - y.exp() * dy.sum(axis, keepdim=True)


@pytest.mark.parametrize(("shape", "axis"), LINES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_and_its_gradient(gpu: Gpu, shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> None:
    x, dy = 3 * random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    for op, of, grad_of in (
        ("Softmax", torch.softmax, softmax_grad),
        ("LogSoftmax", torch.log_softmax, log_softmax_grad),
    ):
        (y,) = gpu.forward(graph(f"{op}(%x0) {{axis={axis}}}", [x]), [x])
        torch.testing.assert_close(y, of(x.double(), axis).to(dtype))
        (dx,) = gpu.forward(graph(f"{op}Grad(%x0, %x1) {{axis={axis}}}", [dy, y]), [dy, y])
        torch.testing.assert_close(dx, grad_of(dy.double(), y.double(), axis).to(dtype))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("n", "axis"), [(40, 1), (9001, 1), (40, 0)], ids=str)  # a warp, a block, columns
def test_what_is_not_finite_in_a_softmax(gpu: Gpu, op: str, n: int, axis: int) -> None:
    x = torch.zeros(8, n)
    x[0], x[1, 3], x[2, 3], x[3, 3], x[4, ::2] = -inf, inf, -inf, nan, -inf
    x[5, :-1], x[6, ::3], x[7, n // 2] = -inf, inf, 100.0
    x = x if axis else x.T.contiguous()
    of = torch.softmax if op == "Softmax" else torch.log_softmax
    text = graph(f"{op}(%x0) {{axis={axis}}}", [x])
    torch.testing.assert_close(gpu.forward(text, [x])[0], of(x, axis), equal_nan=True)


@pytest.mark.parametrize("rises", [True, False])
def test_the_largest_of_a_long_row_may_be_met_at_any_time(gpu: Gpu, rises: bool) -> None:
    """In rows that rise each element is larger than all before, in those that fall none is."""
    x = torch.linspace(-400, 400, 2 * 9001).view(2, 9001)
    x = x if rises else x.flip(1)
    (y,) = gpu.forward(graph("Softmax(%x0)", [x]), [x])
    torch.testing.assert_close(y, torch.softmax(x.double(), -1).float(), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("shape", "axis"), [((0, 5), 1), ((5, 0), 1), ((9, 0), 0), ((3, 9, 0), 1)])
def test_lines_of_nothing_are_not_launched(gpu: Gpu, op: str, shape: tuple[int, ...], axis: int) -> None:
    before = gpu.counted().launches
    x = torch.empty(shape)
    assert gpu.forward(graph(f"{op}(%x0) {{axis={axis}}}", [x]), [x])[0].shape == shape
    assert gpu.counted().launches == before


def assert_as_on_the_cpu(gpu: Gpu, call: str, inputs: list[Tensor], outputs: int) -> list[Tensor]:
    """What the CPU gives, within rounding of what is stored."""
    text = graph(call, inputs, outputs)
    wanted = gpu.on_the_cpu(text, inputs, outputs=outputs)
    for got, want in zip(gpu.forward(text, inputs, outputs=outputs), wanted, strict=True):
        scale = 1 if want.numel() == 0 else want.double().abs().nan_to_num(posinf=1).max().clamp(min=1).item()
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(want.dtype, 1e-2)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    return wanted


# The last are of whole packs: more rows than warps, some elements, as many as there are registers for, more.
ROWS = [
    *((5, 37), (3, 1100), (2, 9001), (33, 5), (900, 20), (7, 1), (0, 5), (1, 4)),
    *((1700, 16), (0, 16), (1, 264), (6, 1024), (2, 1032)),
]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize(("dtype", "wide"), [*((d, d) for d in FLOATS), (torch.bfloat16, torch.float32)], ids=str)
def test_norms_of_rows_and_their_gradients(
    gpu: Gpu, shape: tuple[int, int], dtype: torch.dtype, wide: torch.dtype
) -> None:
    """`wide` is what gamma and beta are stored as."""
    x, dy = 2 * random(*shape, dtype=dtype) + 1, random(*shape, dtype=dtype, seed=1)
    gamma, beta = random(shape[1], dtype=wide, seed=2), random(shape[1], dtype=wide, seed=3)
    _, mean, rstd = assert_as_on_the_cpu(gpu, "LayerNormalization(%x0, %x1, %x2)", [x, gamma, beta], 3)
    assert_as_on_the_cpu(gpu, "LayerNormGrad(%x0, %x1, %x2, %x3, %x4)", [dy, x, gamma, mean, rstd], 3)
    assert_as_on_the_cpu(gpu, "LayerNormGrad(%x0, %x1, _, %x2, %x3)", [dy, x, mean, rstd], 1)
    _, rstd = assert_as_on_the_cpu(gpu, "RmsNorm(%x0, %x1)", [x, gamma], 2)
    assert_as_on_the_cpu(gpu, "RmsNormGrad(%x0, %x1, %x2, %x3)", [dy, x, gamma, rstd], 2)


GROUPS = [(2, 6, 35, 3), (1, 4, 1100, 2), (2, 4, 9001, 4), (3, 33, 5, 11), (30, 20, 2, 4), (3, 8, 1, 2), (2, 4, 600, 1)]


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize(("dtype", "wide"), [*((d, d) for d in FLOATS), (torch.bfloat16, torch.float32)], ids=str)
def test_norms_of_groups_and_their_gradients(
    gpu: Gpu, sizes: tuple[int, int, int, int], dtype: torch.dtype, wide: torch.dtype
) -> None:
    *shape, groups = sizes
    x, dy = 2 * random(*shape, dtype=dtype) + 1, random(*shape, dtype=dtype, seed=1)
    gamma, beta = random(shape[1], dtype=wide, seed=2), random(shape[1], dtype=wide, seed=3)
    said = f"{{num_groups={groups}}}"
    _, mean, rstd = assert_as_on_the_cpu(gpu, f"GroupNorm(%x0, %x1, %x2) {said}", [x, gamma, beta], 3)
    assert_as_on_the_cpu(gpu, f"GroupNorm(%x0) {said}", [x], 3)
    assert_as_on_the_cpu(gpu, f"GroupNormGrad(%x0, %x1, %x2, %x3, %x4) {said}", [dy, x, gamma, mean, rstd], 3)
    assert_as_on_the_cpu(gpu, f"GroupNormGrad(%x0, %x1, _, %x2, %x3) {said}", [dy, x, mean, rstd], 1)


def test_a_layer_norm_is_pytorchs(gpu: Gpu) -> None:
    x, gamma = random(6, 515), random(515, seed=2)
    (y,) = gpu.forward(graph("LayerNormalization(%x0, %x1) {axis=-1, epsilon=0.25}", [x, gamma]), [x, gamma])
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, [515], gamma, eps=0.25))


LOGITS = [
    ((5, 37), "mean"),
    ((3, 1100), "sum"),
    ((2, 9001), "none"),
    ((4, 7, 6), "mean"),
    ((40000, 3), "mean"),
    ((9,), "sum"),
]


@pytest.mark.parametrize(("shape", "reduction"), LOGITS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_their_gradients(
    gpu: Gpu, shape: tuple[int, ...], reduction: str, dtype: torch.dtype, smoothing: float, weighted: bool
) -> None:
    """The second target is ignored."""
    classes = shape[1] if len(shape) > 1 else shape[0]
    rows = [d for i, d in enumerate(shape) if i != 1 and len(shape) > 1]
    x = 3 * random(*shape, dtype=dtype)
    t = torch.randint(0, classes, rows, generator=torch.Generator().manual_seed(2))
    t.view(-1)[1:2] = 1
    w = [random(classes, dtype=dtype, seed=3).abs()] if weighted else []
    how = f'reduction="{reduction}", ignore_index=1'
    dloss = random(*(rows if reduction == "none" else []), dtype=dtype, seed=4)
    call = f"CrossEntropy(%x0, %x1{', %x2' if w else ''}) {{{how}, label_smoothing={smoothing}}}"
    _, top, log_sum, total = assert_as_on_the_cpu(gpu, call, [x, t, *w], 4)
    of = [dloss, x, t, top, log_sum, total, *w]
    names = ", ".join(f"%x{i}" for i in range(len(of)))
    assert_as_on_the_cpu(gpu, f"CrossEntropyGrad({names}) {{{how}, label_smoothing={smoothing}}}", of, 1)
    if smoothing:
        return
    call = f"NegativeLogLikelihoodLoss(%x0, %x1{', %x2' if w else ''}) {{{how}}}"
    _, total = assert_as_on_the_cpu(gpu, call, [x, t, *w], 2)
    call = f"NegativeLogLikelihoodLossGrad(%x0, %x1, %x2{', %x3' if w else ''}) {{{how}, shape={list(shape)}}}"
    assert_as_on_the_cpu(gpu, call, [dloss, t, total, *w], 1)


def test_a_cross_entropy_is_pytorchs_where_logits_are_not_finite(gpu: Gpu) -> None:
    x = torch.zeros(6, 40)
    x[0], x[1, 3], x[2, 3], x[3, 3], x[4, ::2] = -inf, inf, -inf, nan, -inf
    t = torch.full((6,), 3)
    (loss,) = gpu.forward(graph('CrossEntropy(%x0, %x1) {reduction="none"}', [x, t]), [x, t])
    want = torch.nn.functional.cross_entropy(x, t, reduction="none")
    torch.testing.assert_close(loss, want, equal_nan=True)


@pytest.mark.at_once
def test_a_target_that_is_no_class_is_told_with_its_node(gpu: Gpu) -> None:
    x, t = random(4, 5), torch.tensor([0, 4, -100, 5])
    with pytest.raises((IndexError, gpu.core.DeviceError), match=r"CrossEntropy.*index 5 is out of range, there are 5"):
        gpu.forward(graph("CrossEntropy(%x0, %x1)", [x, t]), [x, t])
    t[3] = 0
    gpu.forward(graph("CrossEntropy(%x0, %x1)", [x, t]), [x, t])


@pytest.mark.at_once
def test_a_probability_above_1_is_told(gpu: Gpu) -> None:
    x = torch.tensor([0.0, 0.5, 1.5])
    with pytest.raises(RuntimeError, match="outside of its domain"):
        gpu.forward(graph("UnitInterval(%x0)", [x]), [x])


BATCHES = [
    (70, 2, 7, 7),
    (70, 3, 2, 6),
    (3, 4, 16, 8),
    (2, 2, 30000),
    (300, 40),  # rows of whole packs, of some dtypes
    (900, 20),
    (2, 8),
    (70, 264),
    (5, 37, 1),
    (0, 3, 4),
    (9, 1),
    (1, 3, 5),
]


@pytest.mark.parametrize("shape", BATCHES, ids=str)
@pytest.mark.parametrize(("dtype", "wide"), [*((d, d) for d in FLOATS), (torch.bfloat16, torch.float32)], ids=str)
def test_norms_of_channels_and_their_gradients(
    gpu: Gpu, shape: tuple[int, ...], dtype: torch.dtype, wide: torch.dtype
) -> None:
    """`wide` is what parameters and running statistics are stored as."""
    x, dy = 2 * random(*shape, dtype=dtype) + 1, random(*shape, dtype=dtype, seed=1)
    of_channels = [random(shape[1], dtype=wide, seed=2 + i).abs() for i in range(4)]
    call = "BatchNorm(%x0, %x1, %x2, %x3, %x4) {momentum=0.25}"
    _, mean, rstd, *_ = assert_as_on_the_cpu(gpu, call, [x, *of_channels], 5)
    assert_as_on_the_cpu(gpu, "BatchNorm(%x0)", [x], 3)
    of = [dy, x, of_channels[0], mean, rstd]
    assert_as_on_the_cpu(gpu, "BatchNormGrad(%x0, %x1, %x2, %x3, %x4)", of, 3)
    assert_as_on_the_cpu(gpu, "BatchNormGrad(%x0, %x1, _, %x2, %x3)", [dy, x, mean, rstd], 1)
    shift = random(shape[1], dtype=mean.dtype, seed=6)
    assert_as_on_the_cpu(gpu, "BatchNormGrad(%x0, %x1, %x2, %x3, %x4, %x5) {relu=1}", [*of, shift], 3)


@pytest.mark.parametrize("shape", BATCHES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("attrs", ["", " {relu=1}"])
def test_what_is_added_to_a_norm_of_channels(gpu: Gpu, shape: tuple[int, ...], dtype: torch.dtype, attrs: str) -> None:
    x, added = 2 * random(*shape, dtype=dtype) + 1, random(*shape, dtype=dtype, seed=1)
    gamma, beta = (random(shape[1], dtype=dtype, seed=2 + i) for i in range(2))
    assert_as_on_the_cpu(gpu, f"BatchNorm(%x0, %x1, %x2, _, _, %x3){attrs}", [x, gamma, beta, added], 3)
    statistics = [t.float() for t in (gamma, beta)] if dtype.itemsize == 2 else [gamma, beta]
    call = f"BatchNorm(%x0, _, %x1, %x2, %x3){attrs}"
    outputs = assert_as_on_the_cpu(gpu, call, [x, statistics[1], *statistics], 6)
    assert torch.equal(outputs[5], statistics[1])


def test_a_variance_keeps_its_digits_beside_a_large_mean(gpu: Gpu) -> None:
    x = random(2, 1, 60000) + 1000
    (_, mean, rstd) = gpu.forward(graph("BatchNorm(%x0) {epsilon=0.0}", [x], 3), [x], outputs=3)
    torch.testing.assert_close(mean.double(), x.double().mean()[None], rtol=1e-7, atol=0)
    torch.testing.assert_close(rstd.double() ** -2, x.double().var(correction=0)[None], rtol=1e-5, atol=0)


AS_IF_STORED = """
%q, %qm, %qr = BatchNorm(%x, %gamma, %beta)
%y, %m, %r, _, _, %s = BatchNorm(%x, %gamma, %beta) {relu=1}
%sum, %sm, %sr = BatchNorm(%x, %gamma, %beta, _, _, %added)
%cut, %cm, %cr = BatchNorm(%x, %gamma, %beta, _, _, %added) {relu=1}
%dz = ReluGrad(%dy, %y)
%dx, %dg, %db = BatchNormGrad(%dz, %x, %gamma, %m, %r)
%ex, %eg, %eb = BatchNormGrad(%dy, %x, %gamma, %m, %r, %s) {relu=1}
return %q, %y, %sum, %cut, %dz, %dx, %dg, %db, %ex, %eg, %eb
"""


@pytest.mark.parametrize("scale", [1.0, 2.0**-24])
@pytest.mark.parametrize("shape", [(64, 8), (5, 67), (9, 3, 1, 1), (5, 3, 7), (4, 8, 32)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_comes_after_a_norm_of_channels_is_as_if_that_were_stored(
    gpu: Gpu, shape: tuple[int, ...], dtype: torch.dtype, scale: float
) -> None:
    """To the bit, where many elements of y are near 0, or are rounded to it."""
    acc, channels = torch.float64 if dtype == torch.float64 else torch.float32, shape[1]
    x, dy, added = (few(*shape, dtype=dtype) for _ in range(3))
    x, added = x * 3 + random(*shape, dtype=dtype).round(), added.flip(0)
    gamma = scale * random(channels, dtype=acc, seed=1)
    _, mean, rstd = gpu.forward(graph("BatchNorm(%x0)", [x], 3), [x], outputs=3)
    beta = -(x.transpose(0, 1).reshape(channels, -1)[:, 0].to(acc) - mean) * (rstd * gamma)
    given = {"x": x, "gamma": gamma, "beta": beta, "dy": dy, "added": added}
    text = "\n".join(f"input %{name} : {type_text(t)}" for name, t in given.items()) + AS_IF_STORED
    q, y, total, cut, _, *grads = gpu.forward(text, [*given.values()], outputs=11)
    assert torch.equal(y, q.relu())
    assert torch.equal(total, q + added) and torch.equal(cut, (q + added).relu())
    assert all(torch.equal(a, b) for a, b in zip(grads[:3], grads[3:], strict=True))


@pytest.mark.parametrize("n", [3, 7, 33, 3000])
def test_channels_of_one_value_have_no_variance(gpu: Gpu, n: int) -> None:
    """Also where the sum of its elements is rounded, and squares of what that takes are infinite."""
    x = torch.tensor([1.1, 123456.7, -7e30]).repeat(n, 1)
    y, mean, rstd = gpu.forward(graph("BatchNorm(%x0) {epsilon=0.25}", [x], 3), [x], outputs=3)
    assert torch.equal(y, torch.zeros_like(x)) and torch.equal(mean, x[0])
    assert torch.equal(rstd, torch.full((3,), 2.0))


POOLS = [
    ("AveragePool", "kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], ceil_mode=1, count_include_pad={i}"),
    ("AveragePool", "kernel_shape=[7, 9], divisor_override={i}"),
    ("AveragePool", "kernel_shape=[3, 4], strides=[1, 2147483647]"),  # indices of 64 bits
    ("AdaptiveAvgPool", "output_size=[3, 4]"),
    ("AdaptiveAvgPool", "output_size=[1, 1]"),
    ("AdaptiveAvgPool", "output_size=[10, 2]"),
]


@pytest.mark.parametrize(("op", "attributes"), POOLS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("planes", [(2, 3), (0,)], ids=str)
def test_averages_and_their_gradients(
    gpu: Gpu, op: str, attributes: str, dtype: torch.dtype, planes: tuple[int, ...]
) -> None:
    x = random(*planes, 7, 9, dtype=dtype)
    for i in (0, 1):
        how = attributes.format(i=i)
        (y,) = assert_as_on_the_cpu(gpu, f"{op}(%x0) {{{how}}}", [x], 1)
        dy = random(*y.shape, dtype=dtype, seed=1)
        assert_as_on_the_cpu(gpu, f"{op}Grad(%x0) {{{how}, shape={list(x.shape)}}}", [dy], 1)


@pytest.mark.parametrize("shape", [(5, 3, 1, 1), (5, 3, 1, 3), (2, 3, 7, 7), (1, 1, 40, 50)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_of_averages_of_planes(gpu: Gpu, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    dy = random(*shape[:2], 1, 1, dtype=dtype)
    assert_as_on_the_cpu(gpu, f"AdaptiveAvgPoolGrad(%x0) {{output_size=[1, 1], shape={list(shape)}}}", [dy], 1)


MAXIMA = [
    ((2, 3, 5, 7, 9), "kernel_shape=[2, 3, 3], strides=[1, 2, 1], pads=[1, 1, 1, 0, 1, 1], dilations=[1, 1, 2]"),
    ((2, 3, 9, 17), "kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]"),
    ((1, 2, 5, 40), "kernel_shape=[2, 7]"),  # many windows of an element
    ((2, 3, 4), "kernel_shape=[2], strides=[2], ceil_mode=1"),
    ((2, 3, 9), "kernel_shape=[3], strides=[2147483647]"),  # indices of 64 bits
    ((1, 2, 600), "kernel_shape=[300], strides=[3]"),  # taps of 32 bits
]


@pytest.mark.parametrize(("shape", "how"), MAXIMA, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_of_maxima(gpu: Gpu, shape: tuple[int, ...], how: str, dtype: torch.dtype) -> None:
    """Windows overlap, so that an element may be the largest of several."""
    x = random(*shape, dtype=dtype)
    y, _, taps = assert_as_on_the_cpu(gpu, f"MaxPool(%x0) {{{how}}}", [x], 3)
    dy = random(*y.shape, dtype=dtype, seed=1)
    call = f"MaxPoolGrad(%x0, %x1) {{{how}, shape={list(x.shape)}}}"
    assert_as_on_the_cpu(gpu, call, [dy, taps], 1)


@pytest.mark.at_once
def test_a_tap_that_is_none_of_its_window_is_told(gpu: Gpu) -> None:
    dy = random(2, 1, 2, 2)
    taps = torch.tensor([0, 3, 1, 2], dtype=torch.uint8).expand(2, 1, 4).view(2, 1, 2, 2).contiguous()
    taps[1, 0, 1, 1] = 4
    call = "MaxPoolGrad(%x0, %x1) {kernel_shape=[2, 2], shape=[2, 1, 3, 3]}"
    with pytest.raises((IndexError, gpu.core.DeviceError), match="index 4 is out of range, there are 4"):
        gpu.forward(graph(call, [dy, taps]), [dy, taps])
