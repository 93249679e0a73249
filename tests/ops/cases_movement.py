"""Rows of the movement, trilu, view, constant and gather families."""

import torch
from torch import inf, nan, tensor
from torch.nn import functional as F

from case import Case


def x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(-50, 50, shape, generator=g, dtype=dtype)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def ids(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


F64 = torch.float64


def transpose(a: torch.Tensor, perm: list[int]) -> Case:
    return Case("Transpose", [a], lambda t: t.permute(perm).contiguous(), {"perm": perm})


def table(dense: torch.Tensor) -> list[torch.Tensor]:
    """Where the numbers of each row are that are not 0, and these; -1 beyond the last."""
    most = int((dense != 0).sum(1).max())
    places, weights = torch.full((len(dense), most), -1), dense.new_zeros(len(dense), most)
    for i, row in enumerate(dense):
        at = row.nonzero()[:, 0]
        places[i, : len(at)], weights[i, : len(at)] = at, row[at]
    return [places, weights]


def resample(a: torch.Tensor, axis: int, to: int) -> Case:
    """Of which one element is made of nothing, and another of all."""
    dense = x(to, a.shape[axis], dtype=F64 if a.dtype == F64 else torch.float32, seed=3)
    dense = dense * (dense > 0.5)
    dense[0], dense[-1] = 0, 0.5

    def f(t: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return (dense.to(t) @ t.movedim(axis, -2)).movedim(-2, axis) if t.dim() > 1 else dense.to(t) @ t

    return Case("Resample", [a, *table(dense), *table(dense.T)], f, {"axis": axis}, consts=(1, 2, 3, 4))


REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}


def joined(a: torch.Tensor, axis: int, index: torch.Tensor, put: torch.Tensor, reduction: str) -> Case:
    def f(t: torch.Tensor, i: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return t.scatter_reduce(axis, i, p, REDUCTIONS[reduction])

    return Case("ScatterElements", [a, index, put], f, {"axis": axis, "reduction": reduction})


def cut(a: torch.Tensor, *dims: tuple[int, int, int, int]) -> Case:
    """Slice by (axis, start, end, step)."""

    def f(t: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        for axis, start, end, step in dims:
            n = t.shape[axis]
            index = list(range(n))[slice(start, None if end < -n else end, step)]
            t = t.index_select(axis, torch.tensor(index, dtype=torch.int64))
        return t

    columns = [tensor([d[k] for d in dims]) for k in (1, 2, 0, 3)]
    return Case("Slice", [a, *columns], f, consts=[1, 2, 3, 4])


def embedding(weight: torch.Tensor, index: torch.Tensor, padding: int, by_freq: bool) -> Case:
    return Case(
        "Embedding",
        [weight, index],
        lambda w, i: F.embedding(i, w, padding if padding >= 0 else None, scale_grad_by_freq=by_freq),
        {"padding_idx": padding, "scale_grad_by_freq": int(by_freq)},
        derivative=not by_freq,
    )


CASES = [
    *[transpose(x(*s), p) for s, p in [
        ((5, 7), [1, 0]), ((3, 5, 7), [0, 2, 1]), ((2, 5, 3, 17), [0, 2, 1, 3]), ((2, 3, 4, 5), [3, 2, 1, 0]),
        ((1, 6, 1, 9), [2, 3, 0, 1]), ((33, 65), [1, 0]), ((0, 4), [1, 0]), ((3,), [0]), ((130, 257), [1, 0]),
    ]],
    *[transpose(x(3, 5, 7, dtype=d), [2, 0, 1]) for d in (F64, torch.int64, torch.bool, torch.int32)],
    *[transpose(x(70, 131, dtype=d), [1, 0]) for d in (torch.float32, F64, torch.bool)],
    *[Case("Expand", [x(*s), tensor(t)], lambda a, t: (a + torch.zeros(t.tolist())).to(a.dtype), consts=[1]) for s, t in [
        ((3, 1), [3, 5]), ((1,), [4]), ((), [2, 3]), ((2, 1, 5), [2, 7, 5]), ((1, 3, 1), [4, 3, 6]), ((3,), [2, 3]),
    ]],
    Case("Expand", [x(2, 1, 5, dtype=F64), tensor([2, 7, 5])], lambda a, t: a.expand(2, 7, 5).contiguous(), consts=[1]),
    *[Case("Concat", [x(*s, seed=i) for i, s in enumerate(shapes)], lambda *t, axis=axis: torch.cat(t, axis), {"axis": axis})
      for axis, shapes in [(0, [(2, 3), (1, 3)]), (1, [(2, 3), (2, 0), (2, 5)]), (-1, [(2, 3, 7), (2, 3, 1)]), (1, [(3, 4)])]],
    Case("Concat", [x(2, 3, dtype=torch.int64), x(2, 1, dtype=torch.int64)], lambda *t: torch.cat(t, 1), {"axis": 1}),
    *[Case("Concat", [x(*s, 1, dtype=d), x(*s, 1, dtype=d, seed=1)], lambda *t: torch.cat(t, -1), {"axis": -1})
      for s, d in [((7, 37), torch.float32), ((130, 257), torch.float32), ((1,), torch.float32), ((0, 3), torch.float32),
                   ((7, 37), F64), ((7, 37), torch.int64), ((7, 37), torch.bool)]],
    *[Case("Split", [x(*s), tensor(sizes)], lambda a, z, axis=axis: [t.contiguous() for t in a.split(z.tolist(), axis)],
           {"axis": axis}, consts=[1], outputs=len(sizes))
      for s, axis, sizes in [((6, 5), 0, [1, 2, 3]), ((2, 9), 1, [4, 5]), ((3, 7, 12), -1, [4, 4, 4]), ((2, 3), 1, [0, 3]), ((5, 37, 2), -1, [1, 1])]],
    cut(x(7, 9), (0, 1, 5, 1)), cut(x(7, 9), (1, 0, 9, 2)), cut(x(7, 9), (0, -3, 7, 1), (1, 8, 2, -3)),
    *[cut(x(5, 77, dtype=d), (1, start, 77, 2)) for start in (0, 1) for d in (torch.float32, F64, torch.int64, torch.bool)],
    cut(x(4, 5, 6), (1, 2, 3, 1)), cut(x(4, 5, 6), (2, 100, -100, -1)), cut(x(5, dtype=F64), (0, 1, 4, 2)), cut(x(5), (0, 3, 3, 1)),
    *[Case("Pad", [x(*s), tensor(p), v], lambda a, p, *v, t=t: F.pad(a, t, value=float(v[0]) if v and v[0] is not None else 0.0), consts=[1, 2] if v is not None else [1])
      for s, p, t, v in [((3, 4), [0, 1, 2, 3], (1, 3, 0, 2), None), ((3, 4), [1, 0, -1, 0], (0, 0, 1, -1), None),
                         ((2, 3, 4), [0, 0, 2, 0, 0, 1], (2, 1), tensor(1.5)), ((5,), [-1, -2], (-1, -2), None)]],
    *[Case("Tile", [x(*s), tensor(r)], lambda a, r: a.repeat(*r.tolist()), consts=[1]) for s, r in [((2, 3), [2, 1]), ((4,), [3]), ((2, 1, 3), [1, 4, 2])]],
    *[Case("Trilu", [x(*s), *([tensor(k)] if k is not None else [])],
           lambda a, *k, up=up: (torch.triu if up else torch.tril)(a, int(k[0]) if k else 0), {"upper": up}, consts=[1] if k is not None else [])
      for s, k, up in [((5, 5), None, 1), ((3, 4, 6), 1, 1), ((3, 4, 6), -1, 0), ((6, 4), 0, 0)]],
    *[Case("Reshape", [x(*s), tensor(t)], lambda a, t, r=r: a.reshape(r), consts=[1]) for s, t, r in [
        ((4, 6), [3, 8], (3, 8)), ((4, 6), [-1], (24,)), ((4, 6), [0, 2, -1], (4, 2, 3)), ((1,), [1, 1], (1, 1))]],
    Case("Flatten", [x(2, 3, 5)], lambda a: a.reshape(6, 5), {"axis": 2}),
    Case("Flatten", [x(2, 3, 5)], lambda a: a.reshape(1, 30), {"axis": 0}),
    Case("Squeeze", [x(1, 3, 1), tensor([0])], lambda a, _: a.squeeze(0), consts=[1]),
    Case("Unsqueeze", [x(3, 4), tensor([1, -1])], lambda a, _: a.unsqueeze(1).unsqueeze(-1), consts=[1]),
    Case("Identity", [x(3, 4)], lambda a: a),
    Case("WithGradientOf", [x(3, 4), x(3, 4, seed=1)], lambda a, b: a.detach() + (b - b.detach()), derivative=False),
    Case("Detach", [x(3, 4)], lambda a: a.detach()),
    Case("Shape", [x(3, 4, 5)], lambda a: tensor([3, 4, 5])),
    Case("Shape", [x(3, 4, 5)], lambda a: tensor([4]), {"start": 1, "end": 2}),
    Case("Size", [x(3, 4)], lambda a: tensor(12)),
    *[Case("Range", [tensor(a), tensor(b), tensor(c)], torch.arange, consts=[0, 1, 2]) for a, b, c in [(0, 7, 1), (5, -4, -2), (3, 3, 1)]],
    Case("Range", [tensor(0.0), tensor(1.0), tensor(0.25)], torch.arange, consts=[0, 1, 2]),
    Case("ConstantOfShape", [tensor([2, 3])], lambda s: torch.full((2, 3), 1.5), {"value": 1.5, "dtype": 1}, consts=[0]),
    Case("ConstantOfShape", [tensor([4])], lambda s: torch.full((4,), 3), {"value": 3.0, "dtype": 7}, consts=[0]),
    # gather
    *[Case("Gather", [x(*s), i], lambda a, i, axis=axis: a.index_select(axis, i.flatten() % a.shape[axis]).reshape(
        (*a.shape[:axis], *i.shape, *a.shape[axis + 1:])), {"axis": axis})
      for s, i, axis in [((5, 3), ids(5, 4), 0), ((2, 7, 3), ids(7, 2, 3), 1), ((2, 3, 9), ids(9, 5), 2), ((6, 2), ids(6), 0), ((4, 3), ids(4, 0), 0),
                         ((3, 7, 5), ids(7, 41), 1), ((7, 150), ids(7, 16) - 7, 0), ((7, 0), ids(7, 41), 0)]],
    Case("Gather", [x(5, 3, dtype=F64), tensor([4, 4, 0])], lambda a, i: a[i], {"axis": 0}),
    Case("Gather", [x(5, 3), tensor([-1, 2, -5])], lambda a, i: a[i], {"axis": 0}),
    Case("Gather", [x(5, 3, dtype=torch.int64), tensor([1, 2], dtype=torch.int32)], lambda a, i: a[i.long()], {"axis": 0}),
    *[Case("GatherElements", [x(*s), ids(s[axis], *t)], lambda a, i, axis=axis: a.gather(axis, i), {"axis": axis})
      for s, t, axis in [((4, 5), (4, 3), 1), ((4, 5), (2, 5), 0), ((3, 4, 6), (3, 4, 9), 2)]],
    Case("GatherElements", [x(4, 5, dtype=F64), ids(5, 4, 3)], lambda a, i: a.gather(1, i), {"axis": 1}),
    *[Case("GatherND", [x(*s), i], lambda a, i: a[tuple(i.unbind(-1))])
      for s, i in [((5, 6, 7), torch.stack([ids(5, 4), ids(6, 4, seed=1)], -1)), ((5, 6), torch.stack([ids(5, 2, 3), ids(6, 2, 3, seed=1)], -1))]],
    Case("GatherND", [x(5, 6, dtype=F64), tensor([[1, 1], [1, 1], [0, 5]])], lambda a, i: a[tuple(i.unbind(-1))]),
    *[Case("GatherND", [x(*s), i], lambda a, i, axis=axis: a[(*[slice(None)] * axis, *i.unbind(-1))], {"axis": axis})
      for s, axis, i in [((9, 5, 6), 1, torch.stack([ids(5, 4), ids(6, 4, seed=1)], -1)), ((2, 3, 5, 6, 7), 2, torch.stack([ids(5, 2, 3), ids(6, 2, 3, seed=1)], -1)),
                         ((4, 4), 1, tensor([[3], [-4]])), ((0, 5, 6), 1, tensor([[1, 2]])), ((3, 5, 6), 1, torch.zeros(0, 2, dtype=torch.int64))]],
    # adding by index
    *[Case("GatherGrad", [x(*d), i, x(*s, seed=1)], lambda dy, i, a, axis=axis: a.index_add(axis, i % a.shape[axis], dy), {"axis": axis})
      for s, d, i, axis in [((5, 3), (4, 3), ids(5, 4), 0), ((2, 7, 33), (2, 9, 33), ids(7, 9), 1), ((2, 3, 9), (2, 3, 5), ids(9, 5), 2),
                            ((6,), (2,), tensor([-1, 5]), 0), ((4, 3), (0, 3), ids(4, 0), 0), ((4, 4), (4, 4), ids(4, 4), 1)]],
    Case("GatherGrad", [x(3, 2, dtype=F64), tensor([1, 1, 0]), x(4, 2, dtype=F64)], lambda dy, i, a: a.index_add(0, i, dy), {"axis": 0}),
    *[Case("GatherElementsGrad", [x(*t), ids(s[axis], *t), x(*s, seed=1)], lambda dy, i, a, axis=axis: a.scatter_add(axis, i, dy), {"axis": axis})
      for s, t, axis in [((4, 5), (4, 3), 1), ((4, 5), (2, 5), 0), ((3, 4, 6), (3, 4, 9), 2), ((5,), (33,), 0), ((4, 4), (4, 4), 0)]],
    Case("GatherElementsGrad", [x(4, 3, dtype=F64), ids(5, 4, 3), x(4, 5, dtype=F64)], lambda dy, i, a: a.scatter_add(1, i, dy), {"axis": 1}),
    *[joined(x(*s), axis, ids(s[axis], *t), x(*t, seed=1), how) for how in REDUCTIONS
      for s, t, axis in [((4, 5), (4, 3), 1), ((4, 5), (2, 5), 0), ((3, 4, 6), (3, 4, 9), 2), ((5,), (333,), 0), ((4, 4), (4, 4), 0),
                         ((0, 3), (0, 2), 1), ((3, 4), (0, 4), 0), ((7, 5, 20), (7, 90, 20), 1)]],
    *[joined(x(4, 5, dtype=F64), 1, ids(5, 4, 9), x(4, 9, dtype=F64, seed=1), how) for how in REDUCTIONS],
    *[joined(x(4, 5, dtype=torch.int64), 1, ids(5, 4, 9), x(4, 9, dtype=torch.int64, seed=1), how) for how in REDUCTIONS],
    *[joined(x(4, 5).round(), 1, ids(5, 4, 9), x(4, 9, seed=1).round(), how) for how in REDUCTIONS],
    *[joined(tensor([1.0, nan, -inf, 2.0, inf]), 0, ids(5, 9), tensor([1.0, 2, inf, -3, nan, -inf, 1, 3, 0]), how) for how in REDUCTIONS],
    Case("GatherElementsGrad", [x(4, 9, dtype=torch.int64), ids(5, 4, 9), x(4, 5, dtype=torch.int64)], lambda dy, i, a: a.scatter_add(1, i, dy), {"axis": 1}),
    Case("GatherNDGrad", [x(4, 7), torch.stack([ids(5, 4), ids(6, 4, seed=1)], -1), x(5, 6, 7, seed=1)],
         lambda dy, i, a: a.index_put(tuple(i.unbind(-1)), dy, accumulate=True)),
    *[Case("GatherNDGrad", [x(9, n, *rest), torch.stack([ids(5, n), ids(6, n, seed=1)], -1), x(9, 5, 6, *rest, seed=1)],
           lambda dy, i, a: torch.ops.aten.index_put(a, [None, *i.unbind(-1)], dy, True), {"axis": 1}) for n in (4, 41) for rest in ((), (3,), (33,))],
    resample(x(3, 5), 1, 7), resample(x(3, 5), 0, 2), resample(x(2, 7, 33), 1, 15), resample(x(4, 4), 0, 4), resample(x(6), 0, 9),
    resample(x(2, 3, 130), 2, 61), resample(x(2, 3, 4, dtype=F64), 1, 5), resample(x(0, 3, 2), 1, 4), resample(x(900, 9), 1, 3),
    embedding(x(11, 6), ids(11, 4, 3), -1, False), embedding(x(11, 6), tensor([1, 1, 2, 3]), 1, False),
    embedding(x(11, 6, dtype=F64), tensor([[1, 1], [2, 3]]), -1, True), embedding(x(30, 129), ids(30, 77), 5, True),
]  # fmt: skip
