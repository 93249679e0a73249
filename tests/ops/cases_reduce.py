"""Rows of the reduce and scan families."""

import torch
from torch import inf, nan, tensor

from case import Case
from cases_movement import F64, x

FUNCTIONS = {
    "ReduceSum": torch.sum,
    "ReduceMean": torch.mean,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
}


def reduce(op: str, a: torch.Tensor, axes: list[int] | None, keepdims: int = 1) -> Case:
    def f(t: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        dims = list(range(t.dim())) if axes is None else axes
        return FUNCTIONS[op](t, dim=dims, keepdim=bool(keepdims))

    inputs = [a] if axes is None else [a, tensor(axes)]
    return Case(op, inputs, f, {"keepdims": keepdims}, consts=[] if axes is None else [1])


SHAPES = [
    ((7, 9), [1], 1), ((7, 9), [0], 0), ((130, 67), [0], 1), ((3, 130), [1], 0), ((2, 3, 5, 7), [0, 2, 3], 0),
    ((2, 3, 5, 7), [1], 1), ((2, 3, 5, 7), [0, 2], 1), ((5, 4), None, 0), ((2, 3, 4), [-1], 1), ((1, 6), [0], 0), ((1000, 33), [0], 0),
]  # fmt: skip

NUMBERS = tensor([0.0, -0.0, 1, 1, -1, nan, inf, -inf, 1e-45, -nan, 3e38, 2])
TIED = NUMBERS[torch.randint(0, len(NUMBERS), (3, 333), generator=torch.Generator().manual_seed(1))]
RISING = torch.arange(2 * 333.0).reshape(2, 333)


ZEROS = tensor(
    [[2.0, 0, 3, 4, 0, 5], [0, 1, 2, -3, 1, 0.5], [1, 2, 3, 4, 5, 0], [1, -1, 0.5, 2, 3, 4], [0, 0, 0, 0, 0, 0]]
)
EXTREMES = tensor([[1.0, inf, 2, 3], [0, inf, 1, 2], [nan, 0, 1, 2], [3, 0, nan, 1], [2, 2, 2, -inf]])


def cumprod_grad(dy: torch.Tensor, axis: torch.Tensor, a: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        a = a.detach().requires_grad_()
        return torch.autograd.grad(a.cumprod(int(axis)), a, dy)[0]


def topk(a: torch.Tensor, axis: int, k: int, largest: int) -> Case:
    """PyTorch does not say which of equal elements it takes, but where it sorts and keeps their order."""

    def f(t: torch.Tensor, *_: torch.Tensor) -> list[torch.Tensor]:
        return [part.narrow(axis, 0, k) for part in t.sort(dim=axis, descending=bool(largest), stable=True)]

    finite, attrs = bool(a.isfinite().all()), {"axis": axis, "largest": largest}
    return Case("TopK", [a, tensor([k])], f, attrs, consts=[1], outputs=2, differentiable=1, derivative=finite)


CASES = [
    *[reduce(op, x(*s), axes, keep) for op in FUNCTIONS for s, axes, keep in SHAPES],
    *[reduce(op, x(4, 5, 6, dtype=F64), [0, 2], 0) for op in ("ReduceSum", "ReduceMean")],
    *[reduce(op, x(4, 5, dtype=torch.int64), [1], 1) for op in ("ReduceSum", "ReduceMax", "ReduceMin")],
    reduce("ReduceSum", x(0, 3), [0], 0),
    reduce("ReduceMax", tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), [1], 0),
    Case("ReduceProd", [x(4, 5), tensor([1])], lambda a, _: a.prod(1), {"keepdims": 0}, consts=[1]),
    Case("ReduceProd", [x(2, 3, dtype=torch.int64), tensor([0])], lambda a, _: a.prod(0), {"keepdims": 0}, consts=[1]),
    *[
        Case(
            "ArgMax",
            [x(*s)],
            lambda a, axis=axis, keep=keep: a.argmax(axis, bool(keep)),
            {"axis": axis, "keepdims": keep},
        )
        for s, axis, keep in [((4, 7), 1, 0), ((4, 7), 0, 1), ((2, 3, 5), -1, 0)]
    ],
    Case("ArgMax", [tensor([[1.0, 5.0, 5.0]])], lambda a: tensor([1]), {"axis": 1, "keepdims": 0}),
    Case("ArgMin", [tensor([[3, -(2**63), 2**63 - 1, -(2**63)]])], lambda a: a.argmin(1), {"axis": 1, "keepdims": 0}),
    Case("ArgMin", [tensor([[1.0, nan, -inf, nan]])], lambda a: a.argmin(1), {"axis": 1, "keepdims": 0}),
    Case("ArgMin", [x(70, 5, 130)], lambda a: a.argmin(0), {"axis": 0, "keepdims": 0}),
    Case("ArgMax", [x(50_000, 3, 0)], lambda a: a.argmax(1), {"axis": 1, "keepdims": 0}),
    Case("ReduceProd", [x(3, 1, 4, 5), tensor([0, 2])], lambda a, _: a.prod(2).prod(0), {"keepdims": 0}, consts=[1]),
    Case("ReduceProd", [x(3, 0, 4), tensor([1])], lambda a, _: a.prod(1), {"keepdims": 0}, consts=[1]),
    Case(
        "OtherProducts",
        [tensor([[2.0, 0.0, 3.0], [2.0, 5.0, 7.0], [0.0, 0.0, 1.0]])],
        lambda a: tensor([[0.0, 6.0, 0.0], [35.0, 14.0, 10.0], [0.0, 0.0, 0.0]]),
        {"axis": 1},
        grads=[],
    ),
    Case("ArgMin", [x(7, 300)], lambda a: a.argmin(1, True), {"axis": 1}),
    *[
        Case("CumSum", [x(*s, dtype=d), tensor(axis)], lambda a, _, axis=axis: a.cumsum(axis), consts=[1])
        for s, axis, d in [
            ((4, 7), 1, torch.float32),
            ((4, 7), 0, F64),
            ((2, 3, 5), 1, torch.int64),
            ((9,), 0, torch.float32),
        ]
    ],
    *[
        Case("CumProd", [a, tensor(axis)], lambda a, _, axis=axis: a.cumprod(axis), consts=[1])
        for a, axis in [
            (x(4, 7), 1),
            (x(4, 7, dtype=F64), 0),
            (x(2, 3, 5), 1),
            (x(9), 0),
            (x(1, 5), 0),
            (x(0, 3), 0),
            (x(3, 0), 1),
            (x(2, 9, 70), 1),
            (x(2, 3, 5, dtype=torch.int64), 1),
            (ZEROS, 1),
            (ZEROS, 0),
            (ZEROS[:1], 1),
            (EXTREMES, 1),
        ]
    ],
    *[
        Case("CumProdGrad", [x(*a.shape), tensor(axis), a, a.cumprod(axis)], cumprod_grad, consts=[1])
        for a in (ZEROS, x(4, 4))
        for axis in (0, 1)
    ],
    *[
        topk(x(*s), axis, k, largest)
        for s, axis, k in [
            ((4, 7), 1, 2),
            ((4, 7), 0, 4),
            ((2, 3, 5), 1, 0),
            ((9,), 0, 9),
            ((1, 1), -1, 1),
            ((0, 3), 1, 2),
            ((3, 0), 1, 0),
            ((2, 1000), 1, 5),
            ((3, 1000), 1, 16),
            ((3, 1003), 1, 17),
            ((2, 1000), 1, 1000),
            ((2, 130, 19), 1, 40),
            ((5, 5, 5), 0, 5),
            ((2, 700, 3), 1, 3),
            ((2, 70, 70), 2, 70),
            ((300, 4), 0, 300),
        ]
        for largest in (0, 1)
    ],
    *[topk(x(3, 70, dtype=d), 1, k, largest) for d in (F64, torch.int64) for k in (3, 20, 70) for largest in (0, 1)],
    *[topk(a, -1, k, largest) for a in (TIED, RISING, -RISING) for k in (2, 16, 50, a.shape[1]) for largest in (0, 1)],
    Case("TopK", [x(3, 5, dtype=F64), tensor([2])], lambda a, _: a.topk(2), consts=[1], outputs=2, differentiable=1),
    topk(TIED.double(), 1, 100, 1),
    topk(TIED.to(torch.int64), 1, 100, 1),
    topk(tensor([[2**63 - 1, -(2**63), 0, -1]]), 1, 3, 0),
    Case("CumSum", [x(3, 5), tensor(1)], lambda a, _: a.flip(1).cumsum(1).flip(1), {"reverse": 1}, consts=[1]),
]
