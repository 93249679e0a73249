"""Ops of ai.onnx.ml that need no strings."""

from __future__ import annotations

import math

import pytest
import torch
from onnx import ModelProto, helper, numpy_helper
from torch import Tensor

import ortmodule_c
from ortmodule_c import NotExportable

ML = "ai.onnx.ml"


def of_node(op: str, inputs: list[str], **said: object) -> ModelProto:
    node = helper.make_node(op, inputs, ["y"], domain=ML, **said)
    infos = [helper.make_empty_tensor_value_info(name) for name in [*inputs, "y"]]
    graph = helper.make_graph([node], "net", infos[:-1], infos[-1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(ML, 5)])


def test_features_are_taken_by_number() -> None:
    module = ortmodule_c.onnx.load(of_node("ArrayFeatureExtractor", ["x", "i"]))
    x = torch.randn(3, 4, requires_grad=True)
    y = module(x, torch.tensor([3, 0, 3]))
    assert torch.equal(y, x[:, [3, 0, 3]])
    y.sum().backward()
    assert x.grad.tolist() == [[1, 0, 0, 2]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_above_a_threshold(dtype: torch.dtype) -> None:
    module = ortmodule_c.onnx.load(of_node("Binarizer", ["x"], threshold=0.5))
    x = torch.tensor([-1.0, 0, 0.5, 1, 2]).to(dtype)
    assert torch.equal(module(x), (x > 0.5).to(dtype))


def test_linear_models() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    w, b = torch.randn(2, 3), torch.randn(2)
    said = {"coefficients": w.flatten().tolist(), "intercepts": b.tolist(), "targets": 2}
    y = ortmodule_c.onnx.load(of_node("LinearRegressor", ["x"], **said))(x)
    torch.testing.assert_close(y, x @ w.T + b)
    y.sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(5, 3))
    scaled = ortmodule_c.onnx.load(of_node("Scaler", ["x"], offset=[*b.tolist(), 1.0], scale=[2.0]))(x)
    torch.testing.assert_close(scaled, (x - torch.cat([b, torch.ones(1)])) * 2)
    with pytest.raises(NotExportable, match=r"LinearRegressor of domain ai.onnx.ml, .*: post_transform='SOFTMAX'"):
        ortmodule_c.onnx.load(of_node("LinearRegressor", ["x"], post_transform="SOFTMAX", **said))(x)


# Nodes: feature, way of comparing, what with, whether NaN goes on as if so, and then and else: a node, or "leaf n".
NODES = [
    (0, 0, 0.5, False, 1, 2),
    (1, 3, -0.25, True, "leaf 0", 3),
    (2, 6, 0.0, False, "leaf 1", "leaf 2"),
    (1, 5, 0.75, True, "leaf 3", 4),
    (0, 2, -1.0, False, "leaf 4", "leaf 5"),
    (2, 1, 0.0, True, "leaf 6", "leaf 7"),
]
ROOTS, SETS = [0, 5], {2: [0.25, 0.75]}
LEAVES = [(0, 1.0), (1, 2.0), (2, 3.0), (0, 4.0), (1, 5.0), (2, 6.0), (0, 7.0), (1, 8.0)]
WAYS = [
    lambda a, b: a <= b,
    lambda a, b: a < b,
    lambda a, b: a >= b,
    lambda a, b: a > b,
    lambda a, b: a == b,
    lambda a, b: a != b,
]


def forest(**more: int) -> ModelProto:
    """The op of these nodes."""

    def tensor(name: str, values: Tensor) -> object:
        return numpy_helper.from_array(values.numpy(), name)

    features, modes, splits, missing, yes, no = zip(*NODES, strict=True)
    sides = {}
    for side, ways in (("true", yes), ("false", no)):
        sides[f"nodes_{side}leafs"] = [int(isinstance(way, str)) for way in ways]
        sides[f"nodes_{side}nodeids"] = [int(str(way).split()[-1]) for way in ways]
    return of_node(
        "TreeEnsemble",
        ["x"],
        n_targets=3,
        tree_roots=ROOTS,
        nodes_featureids=features,
        nodes_modes=tensor("nodes_modes", torch.tensor(modes, dtype=torch.uint8)),
        nodes_splits=tensor("nodes_splits", torch.tensor(splits)),
        nodes_missing_value_tracks_true=[int(m) for m in missing],
        membership_values=tensor("membership_values", torch.tensor([*SETS[2], math.nan])),
        leaf_targetids=[target for target, _ in LEAVES],
        leaf_weights=tensor("leaf_weights", torch.tensor([weight for _, weight in LEAVES])),
        **sides,
        **more,
    )


def score(x: Tensor) -> Tensor:
    """By going from node to node."""
    y = torch.zeros(len(x), 3)
    for row, given in enumerate(x.tolist()):
        for at in ROOTS:
            while not isinstance(at, str):
                feature, way, split, missing, yes, no = NODES[at]
                value = given[feature]
                met = value in SETS[at] if way == 6 else WAYS[way](value, split)
                at = yes if (missing if math.isnan(value) else met) else no  # noqa: PLW2901
            target, weight = LEAVES[int(at.split()[1])]
            y[row, target] += weight
    return y


def test_trees_are_gone_down_to_their_leaves() -> None:
    values = torch.tensor([-2.0, -1, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 2, math.nan])
    x = torch.cartesian_prod(values, values, values)
    y = score(x)
    torch.testing.assert_close(ortmodule_c.onnx.load(forest())(x), y)
    torch.testing.assert_close(ortmodule_c.onnx.load(forest(aggregate_function=0))(x), y / 2)
    torch.testing.assert_close(ortmodule_c.onnx.load(forest(post_transform=1))(x), y.softmax(1))
    torch.testing.assert_close(ortmodule_c.onnx.load(forest(post_transform=2))(x), y.sigmoid())


@pytest.mark.parametrize("said", [{"aggregate_function": 2}, {"post_transform": 4}])
def test_other_sums_are_refused(said: dict[str, int]) -> None:
    with pytest.raises(NotExportable, match=r"TreeEnsemble of domain ai.onnx.ml, .*: aggregate_function=\d, post"):
        ortmodule_c.onnx.load(forest(**said))(torch.ones(1, 3))
