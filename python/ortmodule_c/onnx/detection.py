"""RoiAlign and NonMaxSuppression: boxes in images."""

from functools import reduce

import torch
from torch import Tensor

from ..lowering.draft import Val
from .importer import Given, Importer, Results
from .sampling import Taps, linear, weighted


def roi_align_10(t: Importer, node: Given, x: Val, boxes: Val, images: Val) -> Results:
    return _roi_align(t, node, x, boxes, images, 0.0)


def roi_align(t: Importer, node: Given, x: Val, boxes: Val, images: Val) -> Results:
    half = node.attributes["coordinate_transformation_mode"] == "half_pixel"
    return _roi_align(t, node, x, boxes, images, 0.5 if half else 0.0)


def _roi_align(t: Importer, node: Given, x: Val, boxes: Val, images: Val, shift: float) -> Results:
    """Boxes have no gradient. How many elements are taken along an axis may follow from the size of each box.

    Computed in float32 at least: 16 bits do not tell which elements a place lies between.
    """
    dtype, x = x.dtype, t.cast(x, torch.promote_types(x.dtype, torch.float32))
    each, count = node.attributes["sampling_ratio"], int(boxes.dims[0])
    if each:
        return t.cast(_aligned(t, node, x, boxes, images, shift, [each, each]), dtype)
    given = t.known(boxes, "the boxes").float() * node.attributes["spatial_scale"]
    spans = given[:, 2:] - given[:, :2]
    spans = spans if shift else spans.clamp(min=1)
    wanted = torch.tensor([node.attributes["output_width"], node.attributes["output_height"]])
    found = []
    for i, (along, down) in enumerate((spans / wanted).ceil().long().tolist()):
        box, image = (t.emit("Slice", v, *[t.const([k]) for k in (i, i + 1, 0)]) for v in (boxes, images))
        found.append(_aligned(t, node, x, box, image, shift, [down, along]))
    return t.cast(t.emit("Concat", *found, axis=0) if count > 1 else found[0], dtype)


def _aligned(t: Importer, node: Given, x: Val, boxes: Val, images: Val, shift: float, each: list[int]) -> Val:
    said, (_, channels, *sizes), count = node.attributes, [int(d) for d in x.dims], int(boxes.dims[0])
    parts = [said["output_height"], said["output_width"]]
    if min(each) < 1:  # of a box without a size nothing is taken
        return t.tensor(torch.zeros(count, channels, *parts, dtype=x.dtype))
    edges = t.emit("Mul", t.cast(t.emit("Detach", boxes), x.dtype), t.like(x, said["spatial_scale"]))
    edges = t.emit("Sub", edges, t.like(edges, shift))
    shape = [count, parts[0], parts[1], each[0], each[1]]
    total = parts[0] * parts[1] * each[0] * each[1]
    axes: list[Taps] = []
    for i, size in enumerate(sizes):
        start, end = (t.emit("Gather", edges, t.tensor(torch.tensor([k])), axis=1) for k in (1 - i, 3 - i))
        span = t.emit("Sub", end, start)
        if not shift:
            span = t.emit("Max", span, t.like(span, 1))
        steps = (torch.arange(parts[i] * each[i]) + 0.5) / (parts[i] * each[i])
        place = t.emit("Add", t.emit("Mul", span, t.tensor(steps[None].to(x.dtype))), start)
        beside = [count, *(parts[i] if j == i else 1 for j in range(2)), *(each[i] if j == i else 1 for j in range(2))]
        spread = t.emit("Expand", t.emit("Reshape", place, t.const(beside)), t.const(shape))
        spread = t.emit("Reshape", spread, t.const([1, count * total]))
        axes.append(_held(t, spread, size))
    firsts = t.emit("Mul", t.cast(images, torch.int64), t.const(sizes[0] * sizes[1]))
    firsts = t.emit("Expand", t.emit("Unsqueeze", firsts, t.const([1])), t.const([count, total]))
    lines = t.emit("Reshape", t.emit("Transpose", x, perm=[0, 2, 3, 1]), t.const([1, -1, channels]))
    found = weighted(t, lines, axes, sizes, t.emit("Reshape", firsts, t.const([1, -1])))
    op, over = ("Max", "ReduceMax") if said["mode"] == "max" else ("Add", "ReduceMean")
    y = t.emit("Reshape", reduce(lambda a, b: t.emit(op, a, b), found), t.const([*shape, channels]))
    y = t.emit(over, y, t.const([3, 4]), keepdims=0)
    return t.emit("Transpose", y, perm=[0, 3, 1, 2])


def _held(t: Importer, place: Val, size: int) -> Taps:
    """Neighbours of places at most one element outside; others have none."""
    near = t.emit(
        "And", t.emit("GreaterOrEqual", place, t.like(place, -1)), t.emit("LessOrEqual", place, t.like(place, size))
    )
    inside = t.cast(near, place.dtype)
    taps = linear(t, t.emit("Clip", place, t.like(place, 0), t.like(place, size - 1)), size)
    return [(at, t.emit("Mul", weight, inside)) for at, weight in taps]


def non_max_suppression(
    t: Importer,
    node: Given,
    boxes: Val,
    scores: Val,
    most: Val | None = None,
    overlap: Val | None = None,
    least: Val | None = None,
) -> Results:
    """The best boxes of each class in each image, none of which has much in common with a better one."""
    count = 0 if most is None else int(t.known(most, "the number of boxes"))
    shared = 0.0 if overlap is None else float(t.known(overlap, "the overlap"))
    worth = t.known(scores, "the scores")
    corners = _corners(t.known(boxes, "the boxes"), bool(node.attributes["center_point_box"]))
    floor = None if least is None else float(t.known(least, "the lowest score"))
    chosen = [
        [image, kind, box]
        for image, kinds in enumerate(worth)
        for kind, each in enumerate(kinds)
        for box in _best(corners[image], each, count, shared, floor)
    ]
    return t.tensor(torch.tensor(chosen, dtype=torch.int64).reshape(-1, 3))


def _corners(boxes: Tensor, centred: bool) -> Tensor:
    """The lowest and the highest of both axes."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if centred:
        first, second = first - second / 2, first + second / 2
    return torch.cat([first.minimum(second), first.maximum(second)], -1)


def _best(corners: Tensor, scores: Tensor, count: int, shared: float, floor: float | None) -> list[int]:
    sizes = (corners[:, 2:] - corners[:, :2]).prod(1)
    kept: list[int] = []
    for box in scores.argsort(descending=True, stable=True).tolist():
        if len(kept) == count:
            break
        if floor is not None and not scores[box] > floor:
            continue
        others = corners[kept]
        common = (
            (corners[box, 2:].minimum(others[:, 2:]) - corners[box, :2].maximum(others[:, :2])).clamp(min=0).prod(1)
        )
        if not (common / (sizes[box] + sizes[kept] - common) > shared).any():
            kept.append(box)
    return kept
