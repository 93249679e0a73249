"""Boxes in images, and windows whose elements lie elsewhere: numbers and gradients are those of PyTorch's sampling."""

from __future__ import annotations

import pytest
import torch
from test_onnx_layers import compare, made
from torch import Tensor
from torch.nn import functional as F

import ortmodule_c
from ortmodule_c import NotExportable

BOXES = torch.tensor([[1.0, 2, 9, 11], [-3, 0, 4, 30], [5, 5, 5.5, 5.2], [40, 2, 44, 9]])
IMAGES = torch.tensor([0, 1, 1, 0])
SCALE, PARTS = 0.5, (3, 2)


def places(start: Tensor, span: Tensor, parts: int, each: int) -> Tensor:
    return start + span * (torch.arange(parts * each) + 0.5) / (parts * each)


def aligned(x: Tensor, box: Tensor, image: int, half: bool, each: tuple[int, int]) -> Tensor:
    """Averages of a box, by grid_sample, which has elements of the border beyond it."""
    h, w = x.shape[2:]
    left, top, right, bottom = (box * SCALE - (0.5 if half else 0)).unbind()
    spans = [v if half else v.clamp(min=1) for v in (bottom - top, right - left)]
    rows, columns = places(top, spans[0], PARTS[0], each[0]), places(left, spans[1], PARTS[1], each[1])
    near = [(at >= -1) & (at <= size) for at, size in ((rows, h), (columns, w))]
    grid = torch.stack(torch.meshgrid(columns * 2 / (w - 1) - 1, rows * 2 / (h - 1) - 1, indexing="xy"), -1)
    y = F.grid_sample(x[image : image + 1], grid[None], padding_mode="border", align_corners=True)
    y = y * (near[0][:, None] & near[1])
    return y.unflatten(3, (PARTS[1], each[1])).unflatten(2, (PARTS[0], each[0])).mean((3, 5))


@pytest.mark.parametrize("each", [0, 2])
@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
def test_averages_in_boxes(mode: str, each: int) -> None:
    """Of as many elements as are said, or as the box has."""
    said = f"output_height = {PARTS[0]}, output_width = {PARTS[1]}, sampling_ratio = {each}, spatial_scale = {SCALE}"
    node = f'y = RoiAlign<{said}, coordinate_transformation_mode = "{mode}">(x, boxes, images)'
    given = ", float[4, 4] boxes" if each else ""
    text = f"net (float[2, 3, 8, 9] x{given}) => (float[A, B, C, D] y) {{ {node} }}"
    constants = {"images": IMAGES} | ({} if each else {"boxes": BOXES})
    half = mode == "half_pixel"

    def eager(x: Tensor, boxes: Tensor = BOXES) -> Tensor:
        results = []
        for box, image in zip(boxes.detach(), IMAGES.tolist(), strict=True):
            span = (box[2:] - box[:2]) * SCALE
            down, along = (
                ((span if half else span.clamp(min=1)) / torch.tensor(PARTS[::-1])).flip(0).ceil().int().tolist()
            )
            results.append(aligned(x, box, image, half, (each, each) if each else (down, along)))
        return torch.cat(results)

    inputs = {"x": torch.randn(2, 3, 8, 9)} | ({"boxes": BOXES} if each else {})
    compare(made(text, constants), eager, inputs, 1e-4)


def test_the_highest_in_boxes_is_that_of_weighted_neighbours() -> None:
    text = """net (float[1, 1, 4, 4] x, float[1, 4] b) => (float[1, 1, 1, 1] y) {
      y = RoiAlign<mode = "max", sampling_ratio = 1, coordinate_transformation_mode = "output_half_pixel">(x, b, i)
    }"""
    module = ortmodule_c.onnx.load(made(text, {"i": torch.tensor([0])}))
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    y = module(x, torch.tensor([[0.75, 1.5, 1.75, 2.5]]))  # a place in the middle: row 2, column 1.25
    assert y.item() == max(9 * 0.75, 10 * 0.25)


def test_how_many_elements_a_box_has_must_be_known() -> None:
    text = "net (float[1, 1, 4, 4] x, float[A, 4] b, int64[A] i) => (float[A, 1, 1, 1] y) { y = RoiAlign(x, b, i) }"
    with pytest.raises(NotExportable, match=r"RoiAlign of domain ai.onnx, .*: the boxes must be known"):
        ortmodule_c.onnx.load(made(text, {}))(torch.ones(1, 1, 4, 4), torch.ones(99, 4), torch.zeros(99).long())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_windows_whose_elements_lie_elsewhere(parts: int, masked: bool) -> None:
    said = f"strides = [2, 1], pads = [1, 0, 0, 1], dilations = [1, 2], group = 2, offset_group = {parts}"
    inputs = {
        "x": torch.randn(2, 4, 7, 8),
        "w": torch.randn(6, 2, 3, 2),
        "offset": torch.randn(2, parts * 12, 3, 7) * 2,
        "b": torch.randn(6),
        "mask": torch.rand(2, parts * 6, 3, 7),
    }
    types = ", ".join(f"float{list(v.shape)} {name}" for name, v in inputs.items())
    node = f"y = DeformConv<{said}>(x, w, offset, b{', mask' if masked else ''})"

    def eager(x: Tensor, w: Tensor, offset: Tensor, b: Tensor, mask: Tensor) -> Tensor:
        shifts, weights = offset.unflatten(1, (parts, 6, 2)), mask.unflatten(1, (parts, 6))
        columns = []
        for k in range(6):
            rows = torch.arange(3)[:, None] * 2 - 1 + k // 2
            along = torch.arange(7) + k % 2 * 2
            groups = []
            for part, given in enumerate(x.chunk(parts, 1)):
                at = [along + shifts[:, part, k, 1], rows + shifts[:, part, k, 0]]
                grid = torch.stack([at[0] * 2 / 7 - 1, at[1] * 2 / 6 - 1], -1)
                y = F.grid_sample(given, grid, align_corners=True)
                groups.append(y * weights[:, part, k, None] if masked else y)
            columns.append(torch.cat(groups, 1))
        stacked = torch.stack(columns, 2).unflatten(1, (2, 2))
        y = torch.einsum("ngckhw,gfck->ngfhw", stacked, w.flatten(2).unflatten(0, (2, 3)))
        return y.flatten(1, 2) + b[:, None, None]

    compare(made(f"net ({types}) => (float[2, 6, 3, 7] y) {{ {node} }}", {}), eager, inputs, 1e-3)


@pytest.mark.parametrize("node", ["RoiAlign<sampling_ratio = 1>(x, b, i)", "DeformConv(x, w, o)"])
def test_places_far_from_the_origin_in_16_bits(node: str) -> None:
    """Of which float16 has every second from 2048 on."""
    text = "float16[1, 1, 1, 4000] x, float16[A, 4] b, int64[A] i, float16[1, 1, 1, 1] w, float16[1, 2, 1, 4000] o"
    module = ortmodule_c.onnx.load(made(f"net ({text}) => (float16[A, B, C, D] y) {{ y = {node} }}", {}))
    x = torch.arange(4000).remainder(2).half()[None, None, None]
    boxes = torch.tensor([[3000.0, 0, 3002, 1], [3002, 0, 3004, 1]]).half()
    offsets = torch.zeros(1, 2, 1, 4000).half()
    y = module(x, boxes, torch.zeros(2).long(), torch.ones(1, 1, 1, 1).half(), offsets).float().flatten()
    expected = x.float().flatten() if "Deform" in node else torch.tensor([0.5, 0.5])
    assert torch.equal(y, expected)


def test_a_box_that_has_much_in_common_with_a_better_one_goes() -> None:
    text = """net (float[1, 4, 4] boxes, float[1, 2, 4] scores) => (int64[N, 3] y) {
      y = NonMaxSuppression<center_point_box = CENTRED>(boxes, scores, most, overlap, least)
    }"""
    numbers = {"most": torch.tensor([2]), "overlap": torch.tensor([0.5]), "least": torch.tensor([0.2])}
    corners = torch.tensor([[[0.0, 0, 2, 2], [0, 2, 2, 0.2], [5, 5, 6, 6], [9, 9, 8, 8]]])
    scores = torch.tensor([[[0.8, 0.9, 0.1, 0.3], [0.5, 0.4, 0.6, 0.7]]])
    expected = [[0, 0, 1], [0, 0, 3], [0, 1, 3], [0, 1, 2]]
    assert ortmodule_c.onnx.load(made(text.replace("CENTRED", "0"), numbers))(corners, scores).tolist() == expected
    first, second = corners.chunk(2, -1)
    centred = torch.cat([(first + second) / 2, (second - first).abs()], -1)
    module = ortmodule_c.onnx.load(made(text.replace("CENTRED", "1"), numbers))
    assert module(centred, scores).tolist() == expected
    with pytest.raises(NotExportable, match=r"NonMaxSuppression of domain ai.onnx, .*: the scores must be known"):
        module(centred, scores.requires_grad_())
