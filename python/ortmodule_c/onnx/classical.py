"""Of ai.onnx.ml: features, linear models and trees of decisions."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results, tensor_of


def features(t: Importer, node: Given, x: Val, ids: Val) -> Results:
    rows = t.emit("Reshape", x, t.const([1, -1])) if x.rank == 1 else x
    return t.emit("Gather", rows, t.emit("Reshape", ids, t.const([-1])), axis=-1)


def binarizer(t: Importer, node: Given, x: Val) -> Results:
    wide = x if x.dtype.is_floating_point else t.cast(x, torch.float64)
    return t.cast(t.emit("Greater", wide, t.like(wide, node.attributes["threshold"])), x.dtype)


def scaler(t: Importer, node: Given, x: Val) -> Results:
    """A number for all features, or one for each."""
    offset, scale = (t.const(node.attributes[k], torch.float32) for k in ("offset", "scale"))
    return t.emit("Mul", t.emit("Sub", t.cast(x, torch.float32), offset), scale)


def linear_regressor(t: Importer, node: Given, x: Val) -> Results:
    said = node.attributes
    if said["post_transform"] != "NONE":
        raise Unsupported(f"post_transform={said['post_transform']!r}")
    rows = torch.tensor(said["coefficients"]).reshape(said["targets"], -1)
    y = t.emit("MatMul", t.cast(x, torch.float32), t.tensor(rows.T))
    return t.emit("Add", y, t.const(said["intercepts"], torch.float32)) if said.get("intercepts") else y


_MEMBER = 6
_COMPARED = {0: "LessOrEqual", 1: "Less", 2: "GreaterOrEqual", 3: "Greater", 4: "Equal", 5: "NotEqual"}
_AVERAGE, _SUM = 0, 1
_AFTER: dict[int, Callable[[Importer, Val], Any]] = {
    0: lambda t, y: y,
    1: lambda t, y: t.emit("Softmax", y, axis=1),
    2: lambda t, y: t.emit("Sigmoid", y),
}


class _Trees:
    """Nodes of all trees by number, and after them leaves, from which no way leads on."""

    def __init__(self, said: dict[str, Any]) -> None:
        leaves = len(said["leaf_targetids"])
        self.n = len(said["nodes_featureids"])
        self.roots = torch.tensor(said["tree_roots"])
        own = torch.arange(self.n, self.n + leaves)

        def ways(side: str) -> Tensor:
            to, is_leaf = (torch.tensor(said[f"nodes_{side}{k}"]) for k in ("nodeids", "leafs"))
            return torch.cat([to + is_leaf * self.n, own])

        def of_nodes(values: Tensor) -> Tensor:
            return torch.cat([values, values.new_zeros(leaves)])

        self.yes, self.no = ways("true"), ways("false")
        self.feature = of_nodes(torch.tensor(said["nodes_featureids"]))
        self.split = of_nodes(tensor_of(said["nodes_splits"]))
        self.mode = of_nodes(tensor_of(said["nodes_modes"]).long())
        self.missing = of_nodes(torch.tensor(said.get("nodes_missing_value_tracks_true") or [0] * self.n).bool())
        self.members = self._members(tensor_of(said["membership_values"]) if "membership_values" in said else None)

    @property
    def depth(self) -> int:
        """Steps after which each way has come to a leaf."""
        at, steps = self.roots, 0
        while bool((at < self.n).any()) and steps <= self.n:
            at, steps = torch.cat([self.yes[at], self.no[at]]).unique(), steps + 1
        if steps > self.n:
            raise Unsupported("a tree whose ways come back")
        return steps

    def _members(self, given: Tensor | None) -> Tensor:
        """A row for each, NaN where there are no more."""
        sets, one = [], list[float]()
        for value in [] if given is None else given.tolist():
            if math.isnan(value):
                sets.append(one)
                one = []
            else:
                one.append(value)
        sets += [one] if one else []
        rows = torch.full((len(self.mode), max(map(len, sets), default=0) or 1), torch.nan).to(self.split.dtype)
        for at, values in zip((self.mode == _MEMBER).nonzero().flatten().tolist(), sets, strict=True):
            rows[at, : len(values)] = torch.tensor(values, dtype=rows.dtype)
        return rows


def tree_ensemble(t: Importer, node: Given, x: Val) -> Results:
    said = node.attributes
    trees, aggregate = _Trees(said), said["aggregate_function"]
    if aggregate not in (_AVERAGE, _SUM) or said["post_transform"] not in _AFTER:
        raise Unsupported(f"aggregate_function={aggregate}, post_transform={said['post_transform']}")
    at: Val = t.tensor(trees.roots.expand(int(x.dims[0]), -1))
    for _ in range(trees.depth):
        yes, no = (t.emit("Gather", t.tensor(ways), at, axis=0) for ways in (trees.yes, trees.no))
        at = t.emit("Where", _decided(t, trees, x, at), yes, no)
    leaf = t.emit("Sub", at, t.const(trees.n))
    weights = t.emit("Gather", t.tensor(tensor_of(said["leaf_weights"]).to(x.dtype)), leaf, axis=0)
    target = t.emit("Gather", t.const(said["leaf_targetids"]), leaf, axis=0)
    of = t.emit("Equal", t.emit("Unsqueeze", target, t.const([2])), t.tensor(torch.arange(said["n_targets"])))
    y = t.emit(
        "ReduceSum",
        t.emit("Where", of, t.emit("Unsqueeze", weights, t.const([2])), t.like(x, 0)),
        t.const([1]),
        keepdims=0,
    )
    y = t.emit("Div", y, t.like(y, len(trees.roots))) if aggregate == _AVERAGE else y
    return _AFTER[said["post_transform"]](t, y)


def _decided(t: Importer, trees: _Trees, x: Val, at: Val) -> Val:
    def of_node(table: Tensor) -> Val:
        return t.emit("Gather", t.tensor(table), at, axis=0)

    value = t.emit("GatherElements", x, of_node(trees.feature), axis=1)
    split, mode = of_node(trees.split.to(x.dtype)), of_node(trees.mode)
    answers = []
    for code in trees.mode[: trees.n].unique().tolist():
        if code == _MEMBER:
            same = t.emit("Equal", t.emit("Unsqueeze", value, t.const([2])), of_node(trees.members.to(x.dtype)))
            found = t.cast(t.emit("ReduceMax", t.cast(same, torch.int64), t.const([2]), keepdims=0), torch.bool)
        else:
            found = t.emit(_COMPARED[code], value, split)
        answers.append(t.emit("And", t.emit("Equal", mode, t.const(code)), found))
    answer = reduce(lambda a, b: t.emit("Or", a, b), answers)
    return t.emit("Where", t.emit("IsNaN", value), of_node(trees.missing), answer)
