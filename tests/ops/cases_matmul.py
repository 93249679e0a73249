"""Rows of the matmul, conv and attention families."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from case import Case
from cases_movement import F64, x

MATMUL = [
    ((67, 33), (33, 129)), ((1, 5), (5, 1)), ((5,), (5, 3)), ((4, 5), (5,)), ((5,), (5,)), ((3, 7, 9), (9, 4)),
    ((3, 7, 9), (3, 9, 4)), ((2, 1, 5, 6), (3, 6, 4)), ((7, 0), (0, 3)), ((0, 4), (4, 3)), ((200, 301), (301, 103)),
]  # fmt: skip


def fused(a: Tensor, b: Tensor, bias: Tensor | None, ta: int, tb: int, alpha: float) -> Case:
    def f(p: Tensor, q: Tensor, c: Tensor | None = None) -> Tensor:
        y = alpha * (p.mT if ta else p) @ (q.mT if tb else q)
        return y if c is None else y + c

    inputs = [a, b] + ([bias] if bias is not None else [])
    return Case("FusedMatMul", inputs, f, {"transA": ta, "transB": tb, "alpha": alpha}, scale=2)  # K terms a sum


def conv(a: Tensor, w: Tensor, bias: bool, stride: list[int], pad: list[int], dilation: list[int], group: int) -> Case:
    def f(t: Tensor, k: Tensor, b: Tensor | None = None) -> Tensor:
        return (F.conv1d, F.conv2d, F.conv3d)[t.dim() - 3](t, k, b, stride, pad, dilation, group)

    inputs = [a, w] + ([x(w.shape[0], dtype=a.dtype, seed=9)] if bias else [])
    attrs = {"strides": stride, "pads": pad * 2, "dilations": dilation, "group": group}
    return Case("Conv", inputs, f, attrs, scale=4)  # sums of C·kh·kw terms, in another order


def attention(
    b: int,
    h: int,
    t: int,
    s: int,
    d: int,
    mask: str = "",
    causal: int = 0,
    kv: int = 0,
    dtype: torch.dtype = torch.float32,
    head_axes: Sequence[int] = (1, 1, 1, 1),
) -> Case:
    kv = kv or h
    q, k, v = x(b, h, t, d, dtype=dtype), x(b, kv, s, d, dtype=dtype, seed=1), x(b, kv, s, d, dtype=dtype, seed=2)
    scale = 1 / math.sqrt(d)
    masks = {
        "": None,
        "bool": x(b, 1, t, s, dtype=torch.bool, seed=3) | torch.eye(t, s, dtype=torch.bool),
        "dead": (torch.arange(t)[:, None] != 1).expand(1, 1, t, s).contiguous(),
        "keys": (torch.arange(s) < s - 2).expand(b, 1, 1, s).contiguous(),
        "float": x(1, h, t, s, dtype=dtype, seed=4),
        "window": (torch.arange(t)[:, None] - torch.arange(s)).abs() < 9,
        "lowest": torch.zeros(b, 1, 1, s, dtype=dtype).masked_fill(torch.arange(s) < s // 2, torch.finfo(dtype).min),
    }

    def f(q_: Tensor, k_: Tensor, v_: Tensor, m: Tensor | None = None) -> Tensor:
        q_, k_, v_ = (t.movedim(axis, 1) for t, axis in zip((q_, k_, v_), head_axes, strict=False))
        y = F.scaled_dot_product_attention(q_, k_, v_, m, is_causal=bool(causal), scale=scale, enable_gqa=kv != h)
        return y.movedim(1, head_axes[3])

    inputs = [t.movedim(1, axis) for t, axis in zip((q, k, v), head_axes, strict=False)]
    inputs += [masks[mask]] if mask else []
    attrs = {"scale": scale, "is_causal": causal, "p": 0.0, "subsequence": 0, "head_axes": list(head_axes)}
    return Case(
        "Attention", inputs, f, attrs, outputs=2, compare=1, grads=[0, 1, 2, 3] if mask == "float" else [0, 1, 2]
    )


def packed_attention(b: int, kv: int, group: int, t: int, d: int, mask: str = "", causal: int = 0) -> Case:
    """One tensor has the heads of q, k and v in turn."""
    h = kv * group
    seen = x(b, 1, t, t, dtype=torch.bool, seed=1) | torch.eye(t, dtype=torch.bool)

    def f(all_: Tensor, _k: None = None, _v: None = None, m: Tensor | None = None) -> Tensor:
        q, k, v = (part.movedim(2, 1) for part in all_.split([h, kv, kv], 2))
        y = F.scaled_dot_product_attention(q, k, v, m, is_causal=bool(causal), scale=0.3, enable_gqa=group > 1)
        return y.movedim(1, 2)

    inputs = [x(b, t, h + 2 * kv, d), *([None, None, seen] if mask else [])]
    attrs = {"scale": 0.3, "is_causal": causal, "head_axes": [1, 1, 1, 2], "kv_heads": kv}
    return Case("Attention", inputs if mask else [*inputs, None, None], f, attrs, outputs=2, compare=1, grads=[0])


def conv_transpose(
    a: Tensor,
    w: Tensor,
    bias: bool,
    stride: list[int],
    pad: list[int],
    dilation: list[int],
    group: int,
    extra: list[int],
) -> Case:
    def f(t: Tensor, k: Tensor, b: Tensor | None = None) -> Tensor:
        back = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[t.dim() - 3]
        return back(t, k, b, stride, pad, extra, group, dilation)

    inputs = [a, w] + ([x(w.shape[1] * group, dtype=a.dtype, seed=9)] if bias else [])
    attrs = {"strides": stride, "pads": pad * 2, "dilations": dilation, "group": group, "output_padding": extra}
    return Case("ConvTranspose", inputs, f, attrs, scale=4)  # sums of C·kh·kw terms, in another order


CASES = [
    *[Case("MatMul", [x(*a), x(*b, seed=1)], torch.matmul, scale=2) for a, b in MATMUL],  # K terms a sum
    *[Case("MatMul", [x(*a, dtype=F64), x(*b, dtype=F64, seed=1)], torch.matmul) for a, b in MATMUL[:8]],
    *[
        fused(x(*((k, m) if ta else (m, k))), x(*((n, k) if tb else (k, n)), seed=1), x(n, seed=2) if bias else None, ta, tb, alpha)
        for m, n, k in [(67, 129, 33), (5, 3, 2), (14, 32, 300), (97, 64, 1550), (1, 70, 41)]
        for ta, tb, bias, alpha in [(0, 0, True, 1.0), (1, 0, False, 0.5), (0, 1, True, 1.0), (1, 1, False, -2.0)]
    ],
    fused(x(2, 3, 5, 7), x(2, 3, 9, 7, seed=1), None, 0, 1, 0.25),
    fused(x(3, 7, 5), x(9, 5, seed=1), x(9, seed=2), 0, 1, 1.0),
    fused(x(6, 4, dtype=F64), x(5, 4, dtype=F64, seed=1), x(5, dtype=F64, seed=2), 0, 1, 1.5),
    conv(x(2, 3, 9, 11), x(5, 3, 3, 3, seed=1), True, [1, 1], [1, 1], [1, 1], 1),
    conv(x(2, 4, 12, 12), x(6, 4, 3, 3, seed=1), False, [2, 2], [1, 1], [1, 1], 1),
    conv(x(3, 8, 7, 7), x(16, 8, 1, 1, seed=1), False, [1, 1], [0, 0], [1, 1], 1),
    conv(x(3, 8, 7, 7), x(16, 8, 1, 1, seed=1), False, [2, 2], [0, 0], [1, 1], 1),
    conv(x(1, 3, 33, 35), x(7, 3, 7, 7, seed=1), False, [2, 2], [3, 3], [1, 1], 1),
    conv(x(2, 6, 10, 9), x(9, 2, 3, 3, seed=1), True, [1, 2], [2, 1], [2, 1], 3),
    conv(x(2, 5, 8, 8), x(5, 1, 3, 3, seed=1), True, [1, 1], [1, 1], [1, 1], 5),
    conv(x(2, 3, 17), x(4, 3, 5, seed=1), True, [2], [2], [1], 1),
    conv(x(1, 2, 6, 5, dtype=F64), x(3, 2, 3, 2, dtype=F64, seed=1), True, [2, 1], [1, 0], [1, 1], 1),
    conv(x(2, 3, 5, 6, 7), x(4, 3, 3, 3, 3, seed=1), True, [1, 1, 1], [1, 1, 1], [1, 1, 1], 1),
    conv(x(2, 4, 5, 7, 6), x(6, 2, 2, 3, 1, seed=1), False, [2, 1, 3], [1, 0, 2], [2, 3, 1], 2),
    conv(x(3, 4, 3, 4, 5), x(8, 4, 1, 1, 1, seed=1), False, [1, 1, 1], [0, 0, 0], [1, 1, 1], 1),
    conv(x(2, 3, 4, 5, 6), x(2, 3, 2, 1, 3, seed=1), True, [1, 2, 1], [0, 0, 0], [1, 1, 1], 1),
    conv(x(2, 5, 4, 4, 4), x(5, 1, 2, 2, 2, seed=1), True, [1, 1, 2], [1, 0, 1], [1, 2, 1], 5),
    conv(x(1, 2, 3, 4, 3, dtype=F64), x(3, 2, 2, 3, 2, dtype=F64, seed=1), True, [2, 1, 1], [1, 2, 1], [1, 2, 1], 1),
    conv(x(0, 2, 3, 4, 3), x(3, 2, 2, 2, 2, seed=1), True, [1, 1, 1], [0, 0, 0], [1, 1, 1], 1),
    conv(x(2, 6, 7, 75), x(4, 3, 3, 3, seed=1), True, [2, 2], [1, 1], [1, 1], 2),
    conv(x(2, 9, 6, 40), x(20, 9, 1, 1, seed=1), False, [2, 2], [0, 0], [1, 1], 1),
    conv(x(1, 7, 5, 70), x(15, 7, 2, 4, seed=1), False, [1, 2], [1, 3], [2, 1], 1),
    conv(x(1, 6, 3, 2), x(5, 6, 1, 2, seed=1), True, [1, 2], [0, 0], [1, 1], 1),
    conv(x(10, 35, 7, 6), x(35, 1, 3, 3, seed=1), True, [1, 1], [1, 1], [1, 1], 35),
    conv(x(2, 16, 9, 8), x(16, 1, 5, 3, seed=1), False, [2, 2], [2, 1], [1, 1], 16),
    conv(x(3, 17, 20), x(17, 1, 4, seed=1), True, [1], [2], [2], 17),
    conv(x(2, 18, 3, 4, 5), x(18, 1, 2, 3, 2, seed=1), True, [1, 2, 1], [0, 1, 1], [1, 1, 2], 18),
    conv(x(2, 16, 5, 5, dtype=F64), x(16, 1, 3, 3, dtype=F64, seed=1), True, [1, 1], [1, 1], [1, 1], 16),
    conv(x(0, 16, 5, 5), x(16, 1, 3, 3, seed=1), True, [1, 1], [1, 1], [1, 1], 16),
    conv(x(2, 3, 300), x(4, 3, 270, seed=1), False, [1], [3], [1], 1),
    conv(x(2, 20, 9, 8), x(33, 20, 3, 3, seed=1), True, [2, 2], [1, 1], [1, 1], 1),
    conv_transpose(x(2, 20, 5, 4), x(20, 1, 3, 3, seed=1), True, [2, 2], [1, 1], [1, 1], 20, [1, 0]),
    conv_transpose(x(2, 16, 6), x(16, 1, 2, seed=1), False, [3], [0], [1], 16, [1]),
    conv_transpose(x(2, 5, 4, 37), x(5, 6, 3, 3, seed=1), True, [2, 2], [1, 1], [1, 1], 1, [1, 0]),
    conv_transpose(x(1, 4, 3, 36), x(4, 15, 2, 2, seed=1), True, [1, 2], [0, 0], [1, 1], 1, [0, 1]),
    conv_transpose(x(2, 5, 6, 7), x(5, 4, 3, 3, seed=1), True, [1, 1], [1, 1], [1, 1], 1, [0, 0]),
    conv_transpose(x(2, 6, 5, 4), x(6, 4, 4, 4, seed=1), True, [2, 2], [1, 1], [1, 1], 1, [0, 0]),
    conv_transpose(x(3, 4, 5, 6), x(4, 3, 3, 2, seed=1), True, [2, 3], [1, 0], [2, 1], 2, [1, 2]),
    conv_transpose(x(2, 5, 8, 8), x(5, 1, 3, 3, seed=1), True, [2, 2], [1, 1], [1, 1], 5, [1, 1]),
    conv_transpose(x(3, 8, 7, 7), x(8, 16, 1, 1, seed=1), False, [1, 1], [0, 0], [1, 1], 1, [0, 0]),
    conv_transpose(x(2, 33, 15, 17), x(33, 36, 3, 3, seed=1), True, [1, 1], [1, 0], [1, 1], 1, [0, 0]),
    conv_transpose(x(2, 3, 9), x(3, 4, 5, seed=1), True, [3], [2], [1], 1, [2]),
    conv_transpose(x(2, 4, 3, 4, 3), x(4, 3, 2, 3, 2, seed=1), True, [2, 1, 3], [1, 0, 1], [1, 2, 1], 2, [1, 0, 2]),
    conv_transpose(x(1, 2, 3, 4, dtype=F64), x(2, 3, 3, 2, dtype=F64, seed=1), True, [2, 1], [1, 0], [1, 1], 1, [1, 0]),
    conv_transpose(x(1, 2, 2, 3, 2, dtype=F64), x(2, 2, 2, 1, 2, dtype=F64, seed=1), False, [1, 2, 1], [0, 0, 1], [1, 1, 1], 1, [0, 1, 0]),
    conv_transpose(x(0, 3, 4, 5), x(3, 4, 2, 2, seed=1), True, [2, 2], [0, 0], [1, 1], 1, [1, 0]),
    # Large enough for Winograd's transforms: odd sizes, uneven padding, channels in more than one block.
    conv(x(2, 32, 17, 19), x(35, 32, 3, 3, seed=1), True, [1, 1], [1, 1], [1, 1], 1),
    conv(x(3, 33, 14, 16), x(40, 33, 3, 3, seed=1), False, [1, 1], [2, 0], [1, 1], 1),
    conv(x(5, 800, 7, 7), x(32, 800, 3, 3, seed=1), True, [1, 1], [1, 1], [1, 1], 1),
    conv(x(2, 32, 18, 18, dtype=F64), x(32, 32, 3, 3, dtype=F64, seed=1), True, [1, 1], [0, 1], [1, 1], 1),
    attention(2, 3, 7, 7, 16), attention(1, 2, 70, 70, 64, causal=1), attention(2, 2, 9, 13, 8, "bool"), attention(1, 4, 5, 9, 8, "float"),
    attention(2, 2, 6, 6, 8, "dead"), attention(3, 2, 33, 33, 20, "keys"), attention(1, 6, 9, 9, 8, kv=2), attention(1, 4, 130, 130, 16, causal=1, kv=2),
    attention(1, 2, 5, 6, 4, "bool", dtype=F64), attention(1, 2, 6, 6, 4, causal=1, dtype=F64), attention(1, 1, 200, 150, 12, causal=1),
    attention(2, 4, 70, 70, 16, causal=1, kv=2, head_axes=(2, 2, 2, 2)), attention(2, 3, 7, 9, 8, "float", head_axes=(2, 1, 2, 1)),
    attention(2, 4, 130, 130, 12, "window", kv=2, head_axes=(2, 1, 2, 2)), attention(2, 2, 65, 140, 8, "lowest"), attention(1, 2, 70, 130, 5, "window", dtype=F64),
    attention(2, 2, 5, 0, 8, "keys"), attention(3, 2, 0, 5, 8, "keys"), attention(1, 2, 70, 90, 8, "lowest", kv=1),
    packed_attention(2, 3, 1, 7, 8), packed_attention(2, 2, 2, 40, 16, causal=1), packed_attention(1, 2, 3, 9, 5, "bool"), packed_attention(3, 3, 1, 3, 3),
    attention(2, 2, 5, 7, 4, "keys", head_axes=(1, 2, 1, 2)), attention(1, 2, 6, 6, 4, "bool", dtype=F64, head_axes=(2, 2, 2, 2)),
]  # fmt: skip
