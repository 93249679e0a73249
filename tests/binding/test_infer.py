"""What the core answers when asked about one node, and that a session says the same."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Mapping, Sequence

import pytest
import torch
from heap import allocated
from torch import Tensor

from ortmodule_c import _C

Type = tuple[str, tuple[int, ...]]


def f32(*dims: int) -> Type:
    return "f32", dims


def i64(*dims: int) -> Type:
    return "i64", dims


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("op", "types", "attributes", "answer"),
    [
        ("Exp", [f32(2, 3)], {}, [f32(2, 3)]),
        ("Exp", [f32()], None, [f32()]),
        ("Add", [f32(2, 1), f32(3)], {}, [f32(2, 3)]),
        ("Equal", [f32(2), f32(2)], {}, [("bool", (2,))]),
        ("Cast", [f32(2)], {"to": 7}, [i64(2)]),
        ("MatMul", [f32(5, 2, 3), f32(3, 4)], {}, [f32(5, 2, 4)]),
        ("Concat", [f32(2), f32(3)], {"axis": 0}, [f32(5)]),
        ("Transpose", [f32(2, 3)], {"perm": [1, 0]}, [f32(3, 2)]),
        ("Transpose", [f32(2, 3)], {"perm": (1, 0)}, [f32(3, 2)]),
        ("Transpose", [f32()], {"perm": []}, [f32()]),
        ("Conv", [f32(1, 2, 5, 5), f32(3, 2, 2, 2)], {"strides": [2, 1]}, [f32(1, 3, 2, 4)]),
        ("Conv", [f32(1, 2, 5, 5), f32(3, 2, 2, 2), None], {}, [f32(1, 3, 4, 4)]),
        ("LeakyRelu", [f32(2)], {"alpha": 1}, [f32(2)]),
        ("Gelu", [f32(2)], {"approximate": "tanh"}, [f32(2)]),
        ("Shape", [f32(2, 3)], {"start": 1}, [i64(1)]),
        ("MaxPool", [f32(1, 4)], {"kernel_shape": [2]}, [f32(1, 3), i64(1, 3), ("u8", (1, 3))]),
        ("Exp", [f32(0, 3)], {}, [f32(0, 3)]),
    ],
)
def test_types_of_outputs(op: str, types: Sequence[Type], attributes: Mapping[str, object], answer: list[Type]) -> None:
    assert _C.infer(op, types, attributes) == answer


def test_an_input_that_sets_a_shape_is_given_as_a_constant() -> None:
    types = [f32(2, 3), i64(2)]
    assert _C.infer("Reshape", types, constants={1: ints(3, -1)}) == [f32(3, 2)]
    with pytest.raises(ValueError, match=r"f32\[2,3\].*(4|fit)"):
        _C.infer("Reshape", types, constants={1: ints(4, -1)})
    with pytest.raises(NotImplementedError, match="Reshape: input 1 sets a shape and is not a constant"):
        _C.infer("Reshape", types)
    with pytest.raises(ValueError, match=r"input 1: .*the constant is i64\[1\], its type i64\[2\]"):
        _C.infer("Reshape", types, constants={1: ints(6)})
    with pytest.raises(TypeError, match=r"input 1: expected a torch.Tensor"):
        _C.infer("Reshape", types, constants={1: [6, 1]})


def test_how_many_outputs() -> None:
    x = [f32(1, 4)]
    assert _C.infer("MaxPool", x, {"kernel_shape": [2]}, outputs=1) == [f32(1, 3)]
    assert _C.infer("Split", [f32(6), i64(2)], {"axis": 0}, {1: ints(2, 4)}, outputs=2) == [f32(2), f32(4)]
    with pytest.raises(ValueError, match="Exp: 2 outputs, not 1 to 1"):
        _C.infer("Exp", x, outputs=2)
    for n in (0, -1, 1 << 40):
        with pytest.raises(ValueError, match=f"{n} outputs"):
            _C.infer("Exp", x, outputs=n)


@pytest.mark.parametrize(("op", "dtype"), [("AveragePool", "f32"), ("MaxPool", "f64")])
def test_planes_of_more_elements_than_32_bits_count(op: str, dtype: str) -> None:
    types = [(dtype, (1, 1 << 31))]
    assert _C.infer(op, types, {"kernel_shape": [2], "strides": [1 << 20]}, outputs=1) == [(dtype, (1, 1 << 11))]


@pytest.mark.parametrize(
    ("op", "types", "attributes", "error", "message"),
    [
        ("Nonsense", [f32(2)], {}, NotImplementedError, "no op is named 'Nonsense'"),
        ("ReduceSum", [("bool", (2,))], {}, NotImplementedError, "ReduceSum: cpu has no kernel for bool"),
        ("Exp", [i64(2)], {}, TypeError, "Exp: input 0 is i64, not floating point"),
        ("Add", [f32(2), ("f64", (2,))], {}, TypeError, "Add: input 1 is f64, not f32"),
        ("Where", [f32(2), f32(2), f32(2)], {}, TypeError, "Where: input 0 is f32, not bool"),
        ("Add", [f32(2), f32(3)], {}, ValueError, r"Add.*\[2\].*\[3\]"),
        ("MatMul", [f32(2, 3), f32(4, 2)], {}, ValueError, r"MatMul.*\[2,3\].*\[4,2\]"),
        ("Softmax", [f32(2, 3)], {"axis": 2}, ValueError, "Softmax.*2"),
        ("Add", [f32(2)], {}, ValueError, "Add: 1 inputs, not 2 to 2"),
        ("Add", [f32(2), None], {}, ValueError, "Add: input 1 is left out"),
        (
            "Conv",
            [f32(1, 2, 5), f32(3, 2, 2)],
            {"strides": [0]},
            ValueError,
            "Conv: attribute 'strides' is 0, not from 1",
        ),
        ("Conv", [f32(1, 2, 5), f32(3, 2, 2)], {"strides": 2}, ValueError, "'strides' is 2, of kind int, not ints"),
        ("Conv", [f32(1, 2, 5), f32(3, 2, 2)], {"auto_pad": "SAME"}, NotImplementedError, "no attribute 'auto_pad'"),
        ("Gelu", [f32(2)], {"approximate": "erf"}, NotImplementedError, '\'approximate\' is "erf", not "none" or'),
        ("Cast", [f32(2)], {}, ValueError, "Cast: attribute 'to' is missing"),
        (
            "MaxPool",
            [f32(1, 1 << 17, 1 << 17)],
            {"kernel_shape": [1 << 16] * 2},
            NotImplementedError,
            "a window of 1 x 65536 x 65536",
        ),
        ("TorchCall", [f32(2)], {"index": 0}, NotImplementedError, "nobody to ask"),
        ("Exp", [f32(*[2**20] * 4)], {}, ValueError, "f32"),
    ],
)
def test_reason_why_not(
    op: str, types: Sequence[Type], attributes: Mapping[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _C.infer(op, types, attributes)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((7, []), TypeError, "must be str"),
        (("E\0xp", []), ValueError, "embedded null"),
        (("Exp",), TypeError, "argument"),
        (("Exp", 7), TypeError, "iterable"),
        (("Exp", ["f32[2]"]), TypeError, r"input 0: expected a type such as \('f32', \(2, 3\)\), got 'f32\[2\]'"),
        (("Exp", [("f32",)]), TypeError, "input 0"),
        (("Exp", [("q32", (2,))]), ValueError, "input 0: not a type"),
        (("Exp", [("f32", (-1,))]), ValueError, "input 0: negative dim"),
        (("Exp", [("f32", (2,) * 9)]), ValueError, "input 0: not a type"),
        (("Exp", [("f32", (2**80,))]), OverflowError, "input 0"),
        (("Exp", [("f32", (2,))], 7), AttributeError, "items"),
        (("Exp", [("f32", (2,))], {7: 7}), TypeError, "must be str"),
        (("Exp", [("f32", (2,))], {"a": None}), TypeError, "attribute 'a': expected a number or a string"),
        (("Exp", [("f32", (2,))], {"a": torch.ones(())}), TypeError, "attribute 'a': expected a number or a string"),
        (("Exp", [("f32", (2,))], {"a": [[1]]}), TypeError, "attribute 'a': expected a number or a string"),
        (("Exp", [("f32", (2,))], {"a": [1, 2.0]}), TypeError, "attribute 'a': .*a list that mixes kinds"),
        (("Exp", [("f32", (2,))], {"a": 2**80}), OverflowError, "attribute 'a'"),
        (("Exp", [("f32", (2,))], {"a": "x\0y"}), ValueError, "attribute 'a': a string with a zero"),
        (("Exp", [("f32", (2,))], {"a\0": 1}), ValueError, "a string with a zero"),
        (("Exp", [("f32", (2,))], None, 7), AttributeError, "keys"),
        (("Exp", [("f32", (2,))], None, None, "2"), TypeError, "integer"),
        (("Exp", [("f32", (2,))], None, None, None, "abacus"), ValueError, "no provider is named 'abacus'"),
    ],
)
def test_arguments_are_looked_at(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _C.infer(*arguments)


# What a session makes of the same node, for every op and dtype: one input, two, and what else it takes to be typed.
DTYPES = ["f32", "f64", "f16", "bf16", "i64", "i32", "bool", "u8"]
ATTRIBUTES = {
    "Cast": "to=7",
    "Concat": "axis=0",
    "Split": "axis=0",
    "MaxPool": "kernel_shape=[1]",
    "AveragePool": "kernel_shape=[1]",
    "AdaptiveAvgPool": "output_size=[2]",
}


def refusal(error: Exception, op: str) -> tuple[str, str]:
    """Its kind, and its message from the node on."""
    return type(error).__name__, re.sub(rf"^.*?(?={op}: )", "", str(error))


def said_by_session(op: str, types: Sequence[str], attributes: str) -> tuple[str, str]:
    """The refusal of a plan of the node alone, or two empty strings."""
    names = [f"%x{i}" for i in range(len(types))]
    text = "".join(f"input {n} : {t}[2,2]\n" for n, t in zip(names, types, strict=True))
    text += (
        f"%y = {op}({', '.join(names)}) {{{attributes}}}\nreturn %y\n"
        if attributes
        else (f"%y = {op}({', '.join(names)})\nreturn %y\n")
    )
    dtypes = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
    dtypes |= {"i64": torch.int64, "i32": torch.int32, "bool": torch.bool, "u8": torch.uint8}
    given = [torch.zeros(2, 2, dtype=dtypes[t]) for t in types]
    try:
        _C.Session(text, {}).plan(given, [False] * len(given), [False], plain=True)
    except (ValueError, TypeError, NotImplementedError) as e:
        return refusal(e, op)
    return "", ""


@pytest.mark.parametrize("op", sorted(op for op in _C.ops() if op not in ("FusedElementwise", "TorchCall")))
def test_a_session_says_the_same(op: str) -> None:
    attributes = ATTRIBUTES.get(op, "")
    values = {}
    for name, _, value in (a.partition("=") for a in attributes.split() if a):
        values[name] = [int(v) for v in value.strip("[]").split(",")] if value[0] == "[" else int(value)
    for n in (1, 2, 3):
        for dtype in DTYPES:
            types = [dtype] * n
            try:
                _C.infer(op, [(t, (2, 2)) for t in types], values, outputs=1)
                answer = "", ""
            except (ValueError, TypeError, NotImplementedError) as e:
                answer = refusal(e, op)
            assert answer == said_by_session(op, types, attributes), types


def test_nothing_is_kept() -> None:
    shape = ints(3, 2)
    kept = sys.getrefcount(shape)

    def ask() -> None:
        _C.infer("Reshape", [f32(2, 3), i64(2)], {"allowzero": 1}, {1: shape})
        for wrong in ({"a": [1, "b"]}, {"a": None}, {"axis": 9}):
            with pytest.raises((TypeError, ValueError, NotImplementedError)):
                _C.infer("Softmax", [f32(2, 3)], wrong)

    for _ in range(200):
        ask()
    gc.collect()
    before = allocated()
    for _ in range(2000):
        ask()
    gc.collect()
    assert sys.getrefcount(shape) == kept
    assert allocated() < before + 2**18
