"""What moves elements: slices, parts, padding, blocks."""

import torch

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results, torch_dtype


def slice_1(t: Importer, node: Given, x: Val) -> Results:
    lists = [node.attributes[k] for k in ("starts", "ends")]
    axes = node.attributes.get("axes") or list(range(len(lists[0])))
    return t.emit("Slice", x, *[t.const(v) for v in (*lists, axes)])


def split(t: Importer, node: Given, x: Val, sizes: Val | None = None) -> Results:
    axis = node.attributes.get("axis", 0) % x.rank
    given = node.attributes.get("split")
    if sizes is None:
        n = node.attributes.get("num_outputs", node.outputs)
        each = -(-int(x.dims[axis]) // n)
        sizes = t.const(given or [*[each] * (n - 1), int(x.dims[axis]) - each * (n - 1)])
    out = t.emit("Split", x, sizes, outputs=t.known(sizes, "the sizes").numel(), axis=axis)
    return out


def pad_2(t: Importer, node: Given, x: Val) -> Results:
    return pad(t, node, x, t.const(node.attributes["pads"]), t.like(x, node.attributes["value"]))


def pad(t: Importer, node: Given, x: Val, pads: Val, value: Val | None = None, axes: Val | None = None) -> Results:
    if axes is not None:
        given = t.known(pads, "the padding").tolist()
        chosen = [a % x.rank for a in t.known(axes, "the axes").tolist()]
        full = [0] * (2 * x.rank)
        for i, axis in enumerate(chosen):
            full[axis], full[x.rank + axis] = given[i], given[len(chosen) + i]
        pads = t.const(full)
    mode = node.attributes["mode"]
    return t.emit("Pad", x, pads, value) if mode == "constant" else _repeated(t, x, t.known(pads, "the padding"), mode)


def _repeated(t: Importer, x: Val, pads: torch.Tensor, mode: str) -> Val:
    """Padded with elements of its own."""
    y = t.emit("Identity", x)
    for axis, (before, after) in enumerate(pads.reshape(2, -1).T.tolist()):
        n = int(x.dims[axis])
        places = torch.arange(-before, n + after)
        if not before and not after:
            continue
        if n == 0:
            raise Unsupported("an axis without elements is padded with its own")
        if mode == "reflect":
            period = max(2 * (n - 1), 1)
            places = (places % period).minimum(-places % period)
        places = places.clamp(0, n - 1) if mode == "edge" else places % n
        y = t.emit("Gather", y, t.tensor(places), axis=axis)
    return y


def gather(t: Importer, node: Given, x: Val, ids: Val) -> Results:
    return t.emit(node.op, x, ids, **node.attributes)


def blocks(t: Importer, node: Given, x: Val) -> Results:
    """DepthToSpace and SpaceToDepth."""
    n, c, h, w = (int(d) for d in x.dims)
    b, last = node.attributes["blocksize"], node.attributes.get("mode", "DCR") == "DCR"
    if node.op == "SpaceToDepth":
        perm = [0, 3, 5, 1, 2, 4] if last else [0, 1, 3, 5, 2, 4]
        shape, out = [n, c, h // b, b, w // b, b], [n, c * b * b, h // b, w // b]
    else:
        shape = [n, b, b, c // b**2, h, w] if last else [n, c // b**2, b, b, h, w]
        perm, out = [0, 3, 4, 1, 5, 2] if last else [0, 1, 4, 2, 5, 3], [n, c // b**2, h * b, w * b]
    moved = t.emit("Transpose", t.emit("Reshape", x, t.const(shape)), perm=perm)
    return t.emit("Reshape", moved, t.const(out))


def transpose(t: Importer, node: Given, x: Val) -> Results:
    return t.emit("Transpose", x, perm=node.attributes.get("perm", list(range(x.rank))[::-1]))


def eye_like(t: Importer, node: Given, x: Val) -> Results:
    rows, columns = (int(d) for d in x.dims)
    dtype = torch_dtype(node.attributes["dtype"]) if "dtype" in node.attributes else x.dtype
    k = node.attributes["k"]
    return t.tensor(torch.ones(rows, columns).triu(k).tril(k).to(dtype))


def tensor_scatter(t: Importer, node: Given, past: Val, update: Val, starts: Val | None = None) -> Results:
    """Elements along an axis in the place of those from where each sample of a batch begins."""
    axis = node.attributes["axis"] % past.rank
    size, n = int(past.dims[axis]), int(update.dims[axis])
    if n == 0:
        return t.emit("Identity", past)
    at = t.tensor(torch.arange(size).reshape([-1 if i == axis else 1 for i in range(past.rank)]))
    if starts is not None:
        at = t.emit("Sub", at, t.emit("Reshape", starts, t.const([-1] + [1] * (past.rank - 1))))
    if node.attributes["mode"] == "circular":
        at = t.emit("Mod", at, t.const(size))
    inside = t.emit("And", t.emit("GreaterOrEqual", at, t.const(0)), t.emit("Less", at, t.const(n)))
    ids = t.emit("Expand", t.emit("Where", inside, at, t.const(0)), t.const([int(d) for d in past.dims]))
    return t.emit("Where", inside, t.emit("GatherElements", update, ids, axis=axis), past)
