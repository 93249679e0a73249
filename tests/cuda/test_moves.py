"""Ops that move, pick and scan elements on the emulated GPU: sizes that tiles, vectors and digits do not divide."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor

from case import DTYPE_TEXT
from cases_elementwise import ONNX_CODE

SIZES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)  # of 1, 2, 4, 8 bytes
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FOLDED_BYTES = 1 << 20  # constants that are larger are computed on the device


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=g).to(dtype)
    return torch.randint(0, 100, shape, generator=g, dtype=dtype)


def node(call: str, inputs: Sequence[Tensor], constants: str = "") -> str:
    """The graph of one node, whose inputs are %x0, %x1 and on."""
    lines = [f"input %x{i} : {DTYPE_TEXT[t.dtype]}[{','.join(map(str, t.shape))}]" for i, t in enumerate(inputs)]
    return "\n".join([*lines, constants, f"%y = {call}", "return %y", ""])


def assert_as_on_the_cpu(gpu: Gpu, text: str, inputs: list[Tensor], exactly: bool = True) -> Tensor:
    (got,), (want,) = gpu.forward(text, inputs), gpu.on_the_cpu(text, inputs)
    assert got.dtype == want.dtype and got.shape == want.shape
    if exactly:
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want)
    return got


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize(
    ("shape", "perm"),
    [
        ((70, 131), [1, 0]),  # several tiles, the last of them partial
        ((3, 64, 2, 32), [0, 2, 1, 3]),  # rows of 16 bytes and more
        ((3, 5, 2, 6), [0, 2, 1, 3]),  # of 2 at least
        ((4, 3, 66, 5), [0, 3, 1, 2]),
        ((1, 1, 7), [2, 1, 0]),
    ],
)
def test_transpose(gpu: Gpu, dtype: torch.dtype, shape: tuple[int, ...], perm: list[int]) -> None:
    x = numbers(*shape, dtype=dtype)
    assert_as_on_the_cpu(gpu, node(f"Transpose(%x0) {{perm={perm}}}", [x]), [x])


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("cut", [(1, 65, 1), (16, 48, 1), (64, -100, -1), (60, 1, -7), (4, 4, 1)], ids=str)
def test_slice_and_back(gpu: Gpu, dtype: torch.dtype, cut: tuple[int, int, int]) -> None:
    x = numbers(7, 65, dtype=dtype)
    (start, end, step), names = cut, ("a", "b", "c", "d")
    constants = "\n".join(f"const %{n} : i64[1] = [{v}]" for n, v in zip(names, (start, end, 1, step), strict=True))
    arguments = ", ".join(f"%{n}" for n in names)
    y = assert_as_on_the_cpu(gpu, node(f"Slice(%x0, {arguments})", [x], constants), [x])
    back = node(f"SliceGrad(%x0, {arguments}) {{shape=[7, 65]}}", [y], constants)
    assert_as_on_the_cpu(gpu, back, [y])


@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_padding_is_the_given_value(gpu: Gpu, dtype: torch.dtype) -> None:
    x, value = numbers(5, 9, dtype=dtype), numbers(dtype=dtype, seed=1)
    text = node("Pad(%x0, %p, %x1)", [x, value], "const %p : i64[4] = [1, -2, 0, 7]")
    assert_as_on_the_cpu(gpu, text, [x, value])


@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_joining_and_repeating(gpu: Gpu, dtype: torch.dtype) -> None:
    a, b = numbers(3, 5, 8, dtype=dtype), numbers(3, 0, 8, dtype=dtype)
    assert_as_on_the_cpu(gpu, node("Concat(%x0, %x1, %x0) {axis=1}", [a, b]), [a, b])
    assert_as_on_the_cpu(gpu, node("Tile(%x0, %r)", [a], "const %r : i64[3] = [2, 1, 3]"), [a])


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("inner", [1, 8, 700])  # units of all sizes; more than a block of some parts
def test_many_parts_are_joined_by_few_launches(gpu: Gpu, dtype: torch.dtype, axis: int, inner: int) -> None:
    lengths = [(3 * i) % 5 for i in range(60)]  # none, of some
    parts = [
        numbers(*(n if d == axis else s for d, s in enumerate((2, 3, inner))), dtype=dtype, seed=i)
        for i, n in enumerate(lengths)
    ]
    before = gpu.counted().launches
    call = f"Concat({', '.join(f'%x{i}' for i in range(60))}) {{axis={axis}}}"
    whole = assert_as_on_the_cpu(gpu, node(call, parts), parts)
    assert torch.equal(whole, torch.cat(parts, axis))
    assert gpu.counted().launches == before + 2


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_parts_are_taken_apart_by_few_launches(gpu: Gpu, dtype: torch.dtype, axis: int) -> None:
    shape = [67 if d == axis else 40 for d in range(3)]
    x, lengths = numbers(*shape, dtype=dtype), [(3 * i) % 5 for i in range(33)] + [3]
    outputs = ", ".join(f"%y{i}" for i in range(len(lengths)))
    text = "\n".join(
        [
            f"input %x : {DTYPE_TEXT[dtype]}{shape}",
            f"const %n : i64[{len(lengths)}] = {lengths}",
            f"{outputs} = Split(%x, %n) {{axis={axis}}}",
            f"return {outputs}\n",
        ]
    )
    before = gpu.counted().launches
    for got, want in zip(gpu.forward(text, [x], outputs=len(lengths)), x.split(lengths, axis), strict=True):
        assert torch.equal(got, want)
    assert gpu.counted().launches == before + 1


@pytest.mark.parametrize(("source", "to"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
def test_casts_of_many_tensors_are_few_launches(gpu: Gpu, source: torch.dtype, to: torch.dtype) -> None:
    """Of none, of some, of parts of a block, of several blocks; 128 have room in a launch."""
    tensors = [numbers(997 * i % 5000, dtype=source, seed=i) for i in range(130)]
    names = [", ".join(f"%{letter}{i}" for i in range(130)) for letter in "xy"]
    inputs = [f"input %x{i} : {DTYPE_TEXT[source]}[{len(t)}]" for i, t in enumerate(tensors)]
    cast = f"{names[1]} = Casts({names[0]}) {{to={ONNX_CODE[to]}}}"
    before = gpu.counted().launches
    found = gpu.forward("\n".join([*inputs, cast, f"return {names[1]}\n"]), tensors, outputs=130)
    assert all(map(torch.equal, found, (t.to(to) for t in tensors)))
    assert gpu.counted().launches == before + 2


WEIGHTS = [f"%w{i}" for i in range(4)]
DEEP = "\n".join(
    [
        "input %x : f32[8,128] grad\ninput %a : f32[64,1024]\nconst %d : i64[] = [1]",
        *[f"input {w} : f32[128,128] grad" for w in WEIGHTS],
        "%c = Cast(%x) {to=16}\n%c0 = Cast(%w0) {to=16}\n%h0 = MatMul(%c, %c0)",
        "%b = CumSum(%a, %d)\n%m = ReduceMax(%b) {keepdims=0}\n%n = Cast(%m) {to=16}\n%g0 = Mul(%h0, %n)",
        *[f"%c{i} = Cast(%w{i}) {{to=16}}\n%g{i} = MatMul(%g{i - 1}, %c{i})" for i in range(1, 4)],
        "return %g3\n",
    ]
)


def test_casts_of_weights_are_one_node_unless_memory_is_counted(gpu: Gpu) -> None:
    """Where forward takes most memory, three of them are yet to be made."""
    given = [gpu.put(numbers(*shape)) for shape in [(8, 128), (64, 1024), *[(128, 128)] * 4]]
    free, counted = (
        gpu.core.Session(DEEP, {}, provider=gpu.name, **budget).plan(given, [t != 1 for t in range(6)], [True])
        for budget in ({}, {"memory_share": 0.0})
    )
    assert "Casts(" in free.text() and "Casts(" not in counted.text()
    assert counted.live_bytes == free.live_bytes - 3 * 128 * 128 * 2


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("lengths", "kernels"),
    [
        ([8, 8, 3], ["copies_4"]),  # little is not worth a launch of its own
        ([1 << 18, 1 << 18, 3], ["copies_16", "copies_4"]),
        ([8, 3, 1 << 19], ["copies_4"]),  # which lies behind the odd one
        ([1 << 18, 0, 5, 1], ["copies_16", "copies_4"]),
        ([0, 0], []),
    ],
    ids=str,
)
def test_an_odd_part_does_not_slow_down_large_ones(
    gpu: Gpu, lengths: list[int], kernels: list[str], apart: bool
) -> None:
    whole, names = numbers(sum(lengths)), [f"%p{i}" for i in range(len(lengths))]
    parts, listed = [*whole.split(lengths)], ", ".join(names)
    if apart:
        taken = f"const %n : i64[{len(lengths)}] = {lengths}\n{listed} = Split(%x0, %n) {{axis=0}}\nreturn {listed}\n"
        text, inputs, want = f"input %x0 : f32[{len(whole)}]\n{taken}", [whole], parts
    else:
        given = "\n".join(f"input {name} : f32[{n}]" for name, n in zip(names, lengths, strict=True))
        text, inputs, want = f"{given}\n%y = Concat({listed}) {{axis=0}}\nreturn %y\n", parts, [whole]
    with gpu.launches() as launches:
        found = gpu.forward(text, inputs, outputs=len(want))
    assert all(map(torch.equal, found, want))
    assert [name for name, _ in launches] == kernels


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize(("k", "upper"), [(0, 1), (-3, 0), (100, 1), (-100, 1)])
def test_triangles(gpu: Gpu, dtype: torch.dtype, k: int, upper: int) -> None:
    x = numbers(2, 19, 33, dtype=dtype)
    assert_as_on_the_cpu(gpu, node(f"Trilu(%x0, %k) {{upper={upper}}}", [x], f"const %k : i64[1] = [{k}]"), [x])


@pytest.mark.parametrize(
    ("dtype", "step"), [(torch.int64, -3), (torch.int32, 5), (torch.float32, 0.1), (torch.float64, -0.1)], ids=str
)
def test_a_range_too_large_to_be_kept(gpu: Gpu, dtype: torch.dtype, step: float) -> None:
    n, text = FOLDED_BYTES // dtype.itemsize + 5, DTYPE_TEXT[dtype]
    given = {"start": 7, "limit": 7 + (n - 0.5 if dtype.is_floating_point else n) * step, "delta": step}
    constants = "\n".join(f"const %{name} : {text}[] = [{value}]" for name, value in given.items())
    one = torch.ones(1, dtype=dtype)
    assert_as_on_the_cpu(gpu, node("Mul(%r, %x0)", [one], f"{constants}\n%r = Range(%start, %limit, %delta)"), [one])


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_a_constant_too_large_to_be_kept(gpu: Gpu, dtype: torch.dtype) -> None:
    n, onnx = FOLDED_BYTES // dtype.itemsize + 5, {torch.bool: 9, torch.bfloat16: 16, torch.float32: 1, torch.int64: 7}
    constants = f"const %n : i64[1] = [{n}]\n%c = ConstantOfShape(%n) {{value=3, dtype={onnx[dtype]}}}"
    x, before = torch.zeros(3, dtype=dtype), gpu.counted().launches
    assert_as_on_the_cpu(gpu, node("Concat(%x0, %c) {axis=0}", [x], constants), [x])
    assert gpu.counted().launches == before + 2


# ---- by index ----

ROWS, INNER = 700, 3  # rows are known by two digits; ids fill several tiles


def ids(n: int, rows: int = ROWS) -> Tensor:
    return torch.randint(0, rows, (n,), generator=torch.Generator().manual_seed(3))


MANY_IDS = {
    "spread": ids(1000),
    "few rows": ids(1000, 2) + 511,
    "one row": torch.full((1000,), 3),
    "one": torch.tensor([699]),
    "none": ids(0),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index", MANY_IDS.values(), ids=MANY_IDS)
@pytest.mark.parametrize("by_freq", [0, 1])
def test_gradients_of_rows_are_summed_in_one_order(gpu: Gpu, dtype: torch.dtype, index: Tensor, by_freq: int) -> None:
    dy = numbers(len(index), INNER, dtype=dtype)
    call = f"EmbeddingGrad(%x0, %x1) {{shape=[{ROWS}, {INNER}], scale_grad_by_freq={by_freq}, padding_idx=511}}"
    text = node(call, [dy, index])
    (got,), (again,) = gpu.forward(text, [dy, index]), gpu.forward(text, [dy, index])
    assert torch.equal(got, again)
    want = torch.zeros(ROWS, INNER, dtype=torch.float64).index_add_(0, index, dy.double())
    if by_freq:
        want /= index.bincount(minlength=ROWS).clamp(min=1)[:, None]
    want[511] = 0
    torch.testing.assert_close(got, want.to(dtype))  # what is summed is not rounded to 16 bits


def test_a_gradient_is_added_to_what_there_is(gpu: Gpu) -> None:
    inputs = [numbers(100, 4), ids(100), numbers(ROWS, 4, seed=1)]
    text = node(f"EmbeddingGrad(%x0, %x1, %x2) {{shape=[{ROWS}, 4]}}", inputs)
    assert_as_on_the_cpu(gpu, text, inputs, exactly=False)


def test_gradients_of_several_outer_rows(gpu: Gpu) -> None:
    inputs = [numbers(2, 300, 3), ids(300, 20)]
    text = node("GatherGrad(%x0, %x1) {axis=1, shape=[2, 20, 3]}", inputs)
    assert_as_on_the_cpu(gpu, text, inputs, exactly=False)


def test_gradients_of_single_elements(gpu: Gpu) -> None:
    dy, index = numbers(3, 300, 2), torch.randint(0, 40, (3, 300, 2), generator=torch.Generator().manual_seed(1))
    text = node("GatherElementsGrad(%x0, %x1) {axis=1, shape=[3, 40, 2]}", [dy, index])
    assert_as_on_the_cpu(gpu, text, [dy, index], exactly=False)


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("inner", [1, 3, 8, 64])
def test_rows_of_all_lengths(gpu: Gpu, dtype: torch.dtype, inner: int) -> None:
    table, index = numbers(2, 30, inner, dtype=dtype), ids(77, 30) - 30
    assert_as_on_the_cpu(gpu, node("Gather(%x0, %x1) {axis=1}", [table, index]), [table, index])


@pytest.mark.at_once
@pytest.mark.parametrize(
    ("call", "inputs", "failure", "message"),
    [
        ("Gather(%x0, %x1)", [numbers(5, 3), torch.tensor([1, 5])], IndexError, "Gather.*index 5 .* there are 5"),
        ("Gather(%x0, %x1)", [numbers(5, 3), torch.tensor([-6])], IndexError, "Gather.*index -6 .* there are 5"),
        ("Embedding(%x0, %x1)", [numbers(5, 3), torch.tensor([-1])], IndexError, "Embedding.*index -1 .* there are 5"),
        ("GatherND(%x0, %x1)", [numbers(5, 3), torch.tensor([[4, 3]])], IndexError, "index 3 .* there are 3"),
        (
            "GatherElements(%x0, %x1) {strict=1}",
            [numbers(5), torch.tensor([7])],
            RuntimeError,
            "index 7 .* there are 5",
        ),
        (
            "EmbeddingGrad(%x0, %x1) {shape=[5, 3]}",
            [numbers(2, 3), torch.tensor([9, 0])],
            IndexError,
            "EmbeddingGrad.*index 9 .* there are 5",
        ),
        ("SegmentSum(%x0, %x1)", [numbers(5, 3), torch.tensor([0, 4, 2])], IndexError, "SegmentSum.*index 2 "),
        ("SegmentSum(%x0, %x1)", [numbers(5, 3), torch.tensor([1])], IndexError, "SegmentSum.*index 1 "),
    ],
)
def test_an_index_out_of_range_is_told_once_with_its_node(
    gpu: Gpu, call: str, inputs: list[Tensor], failure: type[Exception], message: str
) -> None:
    text = node(call, inputs)
    with pytest.raises((failure, gpu.core.DeviceError), match=message):
        gpu.forward(text, inputs)
    valid = [*inputs[:1], torch.zeros_like(inputs[1])]
    assert_as_on_the_cpu(gpu, text, valid)


# ---- along an axis ----


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(2, 2500, 1), (3, 33, 1), (300, 10, 1), (2, 30, 300), (3, 1, 1), (2, 0, 4)], ids=str)
@pytest.mark.parametrize(("reverse", "exclusive"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_running_sums(gpu: Gpu, dtype: torch.dtype, shape: tuple[int, ...], reverse: int, exclusive: int) -> None:
    x = numbers(*shape, dtype=dtype)
    call = f"CumSum(%x0, %axis) {{reverse={reverse}, exclusive={exclusive}}}"
    assert_as_on_the_cpu(gpu, node(call, [x], "const %axis : i64[] = [1]"), [x], exactly=not dtype.is_floating_point)


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(3, 1000, 1), (300, 32, 1), (2, 33, 1), (2, 30, 300), (3, 1, 1)], ids=str)
def test_the_first_of_the_extremes(gpu: Gpu, op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = numbers(*shape, dtype=dtype).clamp(-1, 1)  # ties
    if dtype.is_floating_point and shape[1] > 1:
        x[1, 20:25] = float("nan")
    assert_as_on_the_cpu(gpu, node(f"{op}(%x0) {{axis=1}}", [x]), [x])


@pytest.mark.parametrize(("n", "kernel", "blocks"), [(32, "arg_columns", 2), (33, "arg_rows", 300)])
def test_short_rows_have_no_block_each(gpu: Gpu, n: int, kernel: str, blocks: int) -> None:
    x = numbers(300, n).round()
    with gpu.launches() as launches:
        (found,) = gpu.forward(node("ArgMax(%x0) {axis=1}", [x]), [x])
    assert torch.equal(found[:, 0], x.argmax(1)) and launches == [(kernel, blocks)]


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("shape", "k", "kernel", "blocks"),
    [((300, 8, 1), 2, "topk_short", 2), ((3, 8, 7), 8, "topk_short", 1), ((3, 64, 1), 9, "topk", 3)],
    ids=str,
)
def test_the_first_of_short_lines(
    gpu: Gpu, shape: tuple[int, ...], k: int, kernel: str, blocks: int, dtype: torch.dtype, largest: int
) -> None:
    x = numbers(*shape, dtype=dtype)
    x = x.round() if dtype.is_floating_point else x % 5  # ties
    if dtype.is_floating_point:
        x[1, 2:4], x[2, 0], x[2, 5] = float("nan"), float("inf"), -0.0
    lines = ["const %k : i64[1] = [" + str(k) + "]", f"%y, %i = TopK(%x0, %k) {{axis=1, largest={largest}}}"]
    text = "\n".join([f"input %x0 : {DTYPE_TEXT[dtype]}{[*shape]}".replace(", ", ","), *lines, "return %y, %i\n"])
    with gpu.launches() as launches:
        found = gpu.forward(text, [x], outputs=2)
    for got, want in zip(found, gpu.on_the_cpu(text, [x], outputs=2), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert launches == [(kernel, blocks)]
