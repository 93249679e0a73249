"""Sequences of tensors: lists that are known when a graph is made, of values that are not; and optional values."""

from collections.abc import Sequence

import torch

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import NOTHING, Given, Importer, Results, Value


def construct(t: Importer, node: Given, *items: Val) -> Results:
    """SequenceEmpty too."""
    return list(items)


def optional(t: Importer, node: Given, x: Value | None = None) -> Results:
    return NOTHING if x is None else x


def has_element(t: Importer, node: Given, x: Value | None = None) -> Results:
    return t.const(x is not None and x is not NOTHING, torch.bool)


def element(t: Importer, node: Given, x: Value) -> Results:
    if x is NOTHING:
        raise Unsupported("the optional has no element")
    return x


def insert(t: Importer, node: Given, items: list[Val], x: Val, at: Val | None = None) -> Results:
    """Before the item at a place, or at the end."""
    place = len(items) if at is None else _place(t, at, len(items), end=True)
    return [*items[:place], x, *items[place:]]


def erase(t: Importer, node: Given, items: list[Val], at: Val | None = None) -> Results:
    place = len(items) - 1 if at is None else _place(t, at, len(items))
    return [*items[:place], *items[place + 1 :]]


def item(t: Importer, node: Given, items: list[Val], at: Val) -> Results:
    return t.emit("Identity", items[_place(t, at, len(items))])


def length(t: Importer, node: Given, items: list[Val]) -> Results:
    return t.const(len(items))


def joined(t: Importer, node: Given, items: list[Val]) -> Results:
    axis = node.attributes["axis"]
    if not node.attributes["new_axis"]:
        return t.emit("Concat", *items, axis=axis)
    return stacked(t, items, axis)


def stacked(t: Importer, items: Sequence[Val], axis: int) -> Val:
    """Side by side along an axis of their own."""
    if not items:
        raise ValueError("there is nothing to stack")
    axis %= items[0].rank + 1
    return t.emit("Concat", *[t.emit("Unsqueeze", v, t.const([axis])) for v in items], axis=axis)


def split(t: Importer, node: Given, x: Val, sizes: Val | None = None) -> Results:
    """Without sizes into parts of 1, whose dim may go."""
    axis = node.attributes["axis"] % x.rank
    n = int(x.dims[axis])
    given = t.known(sizes, "the sizes") if sizes is not None else None
    if given is None:
        each = [1] * n
    elif given.dim():
        each = given.tolist()
    else:
        size = int(given)
        each = [size] * (n // size) + ([n % size] if n % size else [])
    if not each:
        return []
    parts = t.emit("Split", x, t.const(each), outputs=len(each), axis=axis)
    parts = [parts] if len(each) == 1 else list(parts)
    if given is None and not node.attributes["keepdims"]:
        return [t.emit("Squeeze", v, t.const([axis])) for v in parts]
    return parts


def _place(t: Importer, at: Val, n: int, end: bool = False) -> int:
    place = int(t.known(at, "the position"))
    if not -n <= place < n + end:
        raise ValueError(f"position {place} of {n}")
    return place + n if place < 0 else place
