"""Ops of opsets before 7, when one operand was broadcast only if a node said so, and from which axis on."""

from ..lowering.draft import Val
from .importer import Given, Importer, Results


def along(t: Importer, v: Val, axis: int, rank: int) -> Val:
    """The dims of an operand as those of `rank` from an axis on."""
    dims = [int(d) for d in v.dims]
    return t.emit("Reshape", v, t.const([1] * axis + dims + [1] * (rank - axis - len(dims))))


def broadcast(t: Importer, node: Given, a: Val, b: Val) -> Results:
    if node.attributes.get("broadcast"):
        axis = node.attributes.get("axis")
        b = along(t, b, a.rank - b.rank if axis is None else axis % a.rank, a.rank)
    return t.emit(node.op, a, b)


def by_channel(t: Importer, v: Val, x: Val) -> Val:
    """One number, or one of each channel, as an operand beside `x`."""
    return along(t, v, 1, x.rank) if v.rank == 1 and x.rank > 1 else v
