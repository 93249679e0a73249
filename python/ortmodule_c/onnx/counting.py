"""What of several things there is, and how often."""

from functools import reduce

import torch

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results


def unique(t: Importer, node: Given, x: Val) -> Results:
    """Values, where each is first, which of them each element is, and how many elements are each."""
    data, axis = t.known(x, "the operand"), node.attributes.get("axis")
    if data.dtype.is_floating_point and data.isnan().any():
        raise Unsupported("elements that are not equal to themselves")
    if axis is None:
        data, axis = data.flatten(), 0
    values, which, counts = torch.unique(data, dim=axis, return_inverse=True, return_counts=True)
    n = values.shape[axis]
    places = torch.arange(len(which))
    firsts = torch.full((n,), len(which)).scatter_reduce(0, which, places, "amin")
    if not node.attributes["sorted"]:
        order = firsts.argsort()
        values, firsts, counts, which = (
            values.index_select(axis, order),
            firsts[order],
            counts[order],
            order.argsort()[which],
        )
    return tuple(t.tensor(v) for v in (values, firsts, which, counts))


def tf_idf(t: Importer, node: Given, x: Val) -> Results:
    """How often each of several runs of numbers is there, also with gaps of a same size between its numbers."""
    said = node.attributes
    pool, indexes, starts = (said.get(k, []) for k in ("pool_int64s", "ngram_indexes", "ngram_counts"))
    weights, lengths = said.get("weights", []), range(said["min_gram_length"], said["max_gram_length"] + 1)
    if not pool:
        raise Unsupported("strings")
    if weights and indexes != list(range(len(indexes))):
        raise Unsupported("weights of what is counted in another order")
    rows = t.emit("Reshape", t.cast(x, torch.int64), t.const([1, -1] if x.rank < 2 else [int(d) for d in x.dims]))
    total: Val = t.tensor(torch.zeros(int(rows.dims[0]), max(indexes) + 1))
    done = 0
    for size, (start, end) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        count = (end - start) // size
        if count and size in lengths:
            runs = torch.tensor(pool[start:end]).reshape(count, size)
            places = torch.tensor(indexes[done : done + count])
            for apart in range(1, 2 + (said["max_skip_count"] if size > 1 else 0)):
                total = _with_runs(t, total, rows, runs, places, apart)
        done += count
    if said["mode"] != "TF":
        counts = t.cast(t.cast(total, torch.bool), total.dtype) if said["mode"] == "IDF" else total
        total = t.emit("Mul", counts, t.const(weights, torch.float32)) if weights else counts
    return t.emit("Reshape", total, t.const([-1])) if x.rank < 2 else total


def _with_runs(t: Importer, total: Val, rows: Val, runs: torch.Tensor, places: torch.Tensor, apart: int) -> Val:
    """Counts, and those of runs whose numbers are so far apart."""
    size = runs.shape[1]
    n = int(rows.dims[1]) - (size - 1) * apart
    if n <= 0:
        return total
    same = []
    for k in range(size):
        part = t.emit("Slice", rows, *[t.const([v]) for v in (k * apart, k * apart + n, 1)])
        same.append(t.emit("Equal", t.emit("Unsqueeze", part, t.const([2])), t.tensor(runs[:, k])))
    hits = t.cast(reduce(lambda a, b: t.emit("And", a, b), same), total.dtype)
    found = t.emit("ReduceSum", hits, t.const([1]), keepdims=0)
    where = torch.nn.functional.one_hot(places, int(total.dims[1])).to(total.dtype)
    return t.emit("Add", total, t.emit("MatMul", found, t.tensor(where)))
