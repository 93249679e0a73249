"""Einsum as products of matrices."""

import math
from collections import Counter
from collections.abc import Sequence

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results


def einsum(t: Importer, node: Given, *operands: Val) -> Results:
    left, arrow, right = node.attributes["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise Unsupported(f"{len(terms)} terms for {len(operands)} operands")
    labelled = [_labels(term, v.rank) for term, v in zip(terms, operands, strict=True)]
    free = sorted({label for labels in labelled for label in labels if label < 0})
    counts = Counter(label for labels in labelled for label in labels)
    once = sorted(label for label, n in counts.items() if n == 1 and label >= 0)
    wanted = _labels(right, len(right.replace("...", "")) + len(free)) if arrow else [*free, *once]
    parts = [_diagonal(t, v, labels) for v, labels in zip(operands, labelled, strict=True)]
    x, have = parts[0]
    for i, (y, others) in enumerate(parts[1:], start=2):
        later = {label for labels in labelled[i:] for label in labels} | set(wanted)
        x, have = _contracted(t, x, have, y, others, later)
    x, have = _summed(t, x, have, set(wanted))
    if sorted(have) != sorted(wanted):
        raise Unsupported(f"equation {node.attributes['equation']!r}")
    return t.emit("Transpose", x, perm=[have.index(label) for label in wanted])


def _labels(term: str, rank: int) -> list[int]:
    """A number for each dim: those of letters, and negative ones, the last being -1, for those of an ellipsis."""
    before, dots, after = term.partition("...")
    more = rank - len(before) - len(after)
    if more < 0 or (more and not dots):
        raise Unsupported(f"term {term!r} for {rank} dims")
    return [*map(ord, before), *range(-more, 0), *map(ord, after)]


def _diagonal(t: Importer, x: Val, labels: list[int]) -> tuple[Val, list[int]]:
    """Dims that have one label are one."""
    while repeated := next((label for label in labels if labels.count(label) > 1), None):
        a = labels.index(repeated)
        b = labels.index(repeated, a + 1)
        n, rest = int(x.dims[a]), [i for i in range(len(labels)) if i not in (a, b)]
        if int(x.dims[b]) != n:
            raise Unsupported(f"dims of {n} and {x.dims[b]} with one label")
        sizes = [int(x.dims[i]) for i in rest]
        lines = t.emit("Reshape", t.emit("Transpose", x, perm=[*rest, a, b]), t.const([*sizes, n * n]))
        ends = [t.const(v) for v in ([0], [n * n], [len(rest)], [n + 1])]
        x, labels = t.emit("Slice", lines, *ends), [*[labels[i] for i in rest], repeated]
    return x, labels


def _summed(t: Importer, x: Val, labels: list[int], kept: set[int]) -> tuple[Val, list[int]]:
    gone = [i for i, label in enumerate(labels) if label not in kept]
    if gone:
        x = t.emit("ReduceSum", x, t.const(gone), keepdims=0)
    return x, [label for label in labels if label in kept]


def _contracted(
    t: Importer, x: Val, have: list[int], y: Val, others: list[int], later: set[int]
) -> tuple[Val, list[int]]:
    """The product of two, summed over labels that nobody asks for later."""
    x, have = _summed(t, x, have, later | set(others))
    y, others = _summed(t, y, others, later | set(have))
    both = [label for label in have if label in others]
    batch = [label for label in both if label in later]
    inner = [label for label in both if label not in later]
    rows = [label for label in have if label not in both]
    columns = [label for label in others if label not in both]
    a, b = _spread(t, x, have, batch + inner, y, others), _spread(t, y, others, batch + inner, x, have)
    sizes = {label: int(d) for v, labels in ((a, have), (b, others)) for label, d in zip(labels, v.dims, strict=True)}

    def count(labels: Sequence[int]) -> int:
        return math.prod(sizes[label] for label in labels)

    def matrices(v: Val, labels: list[int], first: list[int], second: list[int]) -> Val:
        turned = t.emit("Transpose", v, perm=[labels.index(label) for label in batch + first + second])
        return t.emit("Reshape", turned, t.const([count(batch), count(first), count(second)]))

    product = t.emit("MatMul", matrices(a, have, rows, inner), matrices(b, others, inner, columns))
    result = batch + rows + columns
    return t.emit("Reshape", product, t.const([sizes[label] for label in result])), result


def _spread(t: Importer, x: Val, labels: list[int], shared: list[int], other: Val, others: list[int]) -> Val:
    """Dims of 1 of the labels that both have as the other has them."""
    dims = [int(d) for d in x.dims]
    wide = list(dims)
    for i, label in enumerate(labels):
        if label in shared and dims[i] == 1:
            wide[i] = int(other.dims[others.index(label)])
    return x if wide == dims else t.emit("Expand", x, t.const(wide))
