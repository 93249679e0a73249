"""Sequences and optional values, as inputs, as outputs and in between."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from test_onnx_layers import made

import ortmodule_c
from ortmodule_c import NotExportable
from ortmodule_c.backend import run_model

MAP = """net (seq(float[N]) items, float[2] w) => (seq(float[N]) y, seq(int64[1]) n) {
  y, n = SequenceMap (items, w) <
    body = each (float[N] x, float[2] v) => (float[N] z, int64[1] k) {
      s = ReduceSum<keepdims = 0>(v)
      z = Mul(x, s)
      k = Shape(x)
    }
  >
}"""


def test_a_sequence_is_given_and_made_item_by_item() -> None:
    module = ortmodule_c.onnx.load(made(MAP, {}))
    items = [torch.randn(n, requires_grad=True) for n in (3, 1, 4)]
    w = torch.randn(2, requires_grad=True)
    y, n = module(items, w)
    assert [t.tolist() for t in n] == [[3], [1], [4]]
    torch.testing.assert_close(y, [x * w.sum() for x in items])
    sum(t.sum() for t in y).backward()
    torch.testing.assert_close([x.grad for x in items], [w.sum().detach().expand_as(x) for x in items])
    torch.testing.assert_close(w.grad, sum(x.detach().sum() for x in items).expand(2))
    assert module([], w) == ([], [])
    with pytest.raises(TypeError, match="input 'items' is a Tensor, not a list of tensors"):
        module(w, w)
    with pytest.raises(TypeError, match="input 'items' is a float, not a tensor"):
        module([1.0], w)


def test_items_whose_values_a_graph_has_to_know() -> None:
    text = """net (seq(int64[K]) shapes, float[6] x) => (float[A, B] y) {
      s = SequenceAt(shapes, one)
      y = Reshape(x, s)
    }"""
    module = ortmodule_c.onnx.load(made(text, {"one": torch.tensor(1)}))
    for shape in ([2, 3], [3, 2]):
        assert module([torch.tensor([6]), torch.tensor(shape)], torch.arange(6.0)).tolist() == (
            torch.arange(6.0).reshape(shape).tolist()
        )


def optional(op: str, made_of: onnx.TypeProto, result: onnx.TypeProto) -> onnx.ModelProto:
    """A node of an optional value."""
    node = helper.make_node(op, ["x"], ["y"])
    infos = (
        [helper.make_value_info("x", helper.make_optional_type_proto(made_of))],
        [helper.make_value_info("y", result)],
    )
    graph = helper.make_graph([node], "net", *infos)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, [3])
FLAG = helper.make_tensor_type_proto(TensorProto.BOOL, [])


def test_whether_an_optional_value_is_there() -> None:
    asked = ortmodule_c.onnx.load(optional("OptionalHasElement", FLOATS, FLAG))
    assert asked(torch.ones(3)).item() is True and asked(None).item() is False
    taken = ortmodule_c.onnx.load(optional("OptionalGetElement", FLOATS, FLOATS))
    x = torch.randn(3, requires_grad=True)
    taken(x).sum().backward()
    assert torch.equal(taken(x), x) and torch.equal(x.grad, torch.ones(3))
    with pytest.raises(NotExportable, match=r"OptionalGetElement of domain ai.onnx, .*: the optional has no element"):
        taken(None)
    passed = ortmodule_c.onnx.load(optional("Identity", FLOATS, helper.make_optional_type_proto(FLOATS)))
    assert passed(None) is None and torch.equal(passed(x), x)
    with pytest.raises(ValueError, match=r"input 'x' has shape \[2\], the model takes \[3\]"):
        taken(torch.ones(2))


def test_the_backend_has_lists_of_arrays_and_none() -> None:
    items = [np.ones(2, np.float32), np.ones(3, np.float32)]
    y, n = run_model(made(MAP, {}), [items, np.full(2, 0.5, np.float32)])
    assert [a.tolist() for a in y] == [a.tolist() for a in items] and [a.tolist() for a in n] == [[2], [3]]
    passed = optional("Identity", FLOATS, helper.make_optional_type_proto(FLOATS))
    assert run_model(passed, [None]) == (None,)


def test_a_batch_of_scans_before_version_9() -> None:
    text = """net (float[2, 3] s, float[2, 4, 3] x) => (float[2, 3] last, float[2, 4, 3] y) {
      last, y = Scan<num_scan_inputs = 1, directions = [1],
        body = step (float[3] a, float[3] v) => (float[3] b, float[3] c) { b = Add(a, v) c = Identity(b) }>(, s, x)
    }"""
    s, x = torch.randn(2, 3), torch.randn(2, 4, 3)
    last, y = ortmodule_c.onnx.load(made(text, {}, opset=8))(s, x)
    torch.testing.assert_close(y, s[:, None] + x.flip(1).cumsum(1))
    torch.testing.assert_close(last, y[:, -1])


def test_one_output_that_is_a_sequence_is_a_list() -> None:
    text = "net (float[4] x) => (seq(float[1]) y) { y = SplitToSequence(x) }"
    x = torch.randn(4)
    assert [t.tolist() for t in ortmodule_c.onnx.load(made(text, {}))(x)] == x[:, None].tolist()
