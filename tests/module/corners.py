"""What the tests of corners share: the corners of each dtype, and the comparison with eager PyTorch there.

The corners are zeros of both signs, infinities, NaN, denormals, the least and the largest numbers,
ties, and where a function bends. NaN, infinities and signs of zeros must be those of PyTorch; other
numbers may differ by the row's `ulps`, of the number itself or of `floor` if that is larger. The
sign of a gradient of zero is nobody's.

Where PyTorch's vectors and the scalar loop over the elements that do not fill one part, at NaN and
where a quotient overflows, its vectors are what is compared with: operands are repeated to fill them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ortmodule_c import ORTModule
from wrapped import Function, pair

INF, NAN = torch.inf, torch.nan
FLOATS = (torch.float32, torch.float64)
VECTOR = 64  # a multiple of the elements that PyTorch works on at once
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Row:
    """A function of some operands and how exact it is.

    Parameters
    ----------
    function
        What is computed by eager PyTorch and by us.
    operands
        How many tensors it takes: one of all corners, or all pairs, or some triples of them.
    ulps, floor
        How far results may be from PyTorch's: in units in the last place, of a number of at least `floor`.
    signed_zeros
        Whether zeros among the outputs have to have PyTorch's signs.
    values
        What makes the operands, if not these.
    dtypes
        Those in which it is compared.
    broken
        Whether no one graph holds it: it is compared alone.
    """

    function: Callable[..., Any]
    operands: int = 1
    ulps: float = 4
    floor: float = 0
    signed_zeros: bool = True
    values: Callable[[torch.dtype], Sequence[Tensor]] | None = None
    dtypes: Sequence[torch.dtype] = FLOATS
    broken: bool = False


def corners(dtype: torch.dtype) -> Tensor:
    """Zeros, ones, halves, bends, infinities, NaN, denormals, extremes."""
    if not dtype.is_floating_point:
        i = torch.iinfo(dtype)
        both = [0, 1, 2, 3, 7, i.max, i.max - 1, i.min, i.min + 1, i.max // 2]
        return torch.tensor([*both, *([-1, -2, -3, -7] if i.min else [])], dtype=dtype)
    f = torch.finfo(dtype)
    sizes = [0.0, 1, 0.5, 2, 3, 6, 2.5, 1 + f.eps, 20.5, 104, 1e-3, 1e4, f.smallest_normal, f.smallest_normal / 4]
    sizes += [f.smallest_normal * f.eps, f.max, f.max / 2, f.max**0.5, INF]
    return torch.tensor([*sizes, *(-s for s in sizes), NAN], dtype=dtype)


def few(dtype: torch.dtype) -> Tensor:
    tiny = torch.finfo(dtype).smallest_normal / 4
    return torch.tensor([0.0, -0.0, 1, -1, 0.5, 3, INF, -INF, NAN, tiny, 1e4], dtype=dtype)


def moderate(dtype: torch.dtype) -> Tensor:
    """Corners that are neither large nor small."""
    return torch.tensor([0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, -3, 2.5, 20.5, -20.5, INF, -INF, NAN], dtype=dtype)


def probabilities(dtype: torch.dtype) -> list[Tensor]:
    f = torch.finfo(dtype)
    return [torch.tensor([0, 1, 0.5, 0.1, f.tiny, f.tiny / 4, 1e-13, f.eps, 1 - f.eps], dtype=dtype)]


def pairs(values: Tensor) -> list[Tensor]:
    return [t.contiguous() for t in torch.cartesian_prod(values, values).unbind(1)]


def lists(dtype: torch.dtype) -> list[Tensor]:
    """Rows of four numbers: constant, tied, with infinities, NaN, zeros, denormals, extremes."""
    f = torch.finfo(dtype)
    return [
        torch.tensor(
            [
                [1.0, 2, 3, 4],
                [2, 2, 2, 2],
                [0, 0, 0, 0],
                [0, 1, 2, 0],
                [0, 1, 2, 3],
                [3, 3, 1, -3],
                [-1, -1, -2, -1],
                [NAN, 1, 2, 3],
                [1, NAN, 5, NAN],
                [INF, 1, 2, 3],
                [INF, INF, 1, 2],
                [INF, -INF, 1, 2],
                [-INF, -INF, -INF, -INF],
                [-INF, 1, 1, 0],
                [INF, INF, INF, INF],
                [0, INF, 1, 2],
                [0, NAN, 1, 2],
                [f.max, f.max, 1, 0],
                [-f.max, f.max, 1, 0],
                [f.tiny / 4, f.tiny / 2, 0, -f.tiny / 8],
                [-0.0, -0.0, -0.0, -0.0],
                [0.0, -0.0, 0.0, -0.0],
                [1e4, -1e4, 1e4, 0],
                [f.tiny, f.tiny, f.tiny, 1],
            ],
            dtype=dtype,
        )
    ]


def operands(row: Row, dtype: torch.dtype) -> list[Tensor]:
    if row.values is not None:
        return [t.clone() for t in row.values(dtype)]
    if row.operands == 1:
        return [corners(dtype)]
    if row.operands == 2:
        return pairs(corners(dtype))
    triples = torch.tensor(list(itertools.product(few(dtype).tolist(), repeat=3)), dtype=dtype)
    return [t.contiguous() for t in triples.unbind(1)]


def filled(x: Tensor, times: int) -> Tensor:
    """`x` repeated so that no element lies outside of PyTorch's vectors, and that as often."""
    if x.dim() != 1:
        return x
    n = math.ceil(len(x) / VECTOR) * VECTOR
    return x.repeat(math.ceil(n / len(x)))[:n].repeat(times)


def tame(dtype: torch.dtype) -> list[Tensor]:
    """Those lists whose numbers can be squared and added up."""
    (x,) = lists(dtype)
    return [torch.where(x.isfinite() & (x.abs() > 1e30), 7, x)]


def finite(dtype: torch.dtype) -> list[Tensor]:
    """Tame lists without infinities."""
    return [x.masked_fill(x.isinf(), 5) for x in tame(dtype)]


def pieces(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def spaced(x: Tensor) -> Tensor:
    """The distance from each number to the next."""
    x = x.abs().nan_to_num(0, 0, 0)
    return torch.nextafter(x, torch.full_like(x, INF)).nan_to_num(0, 0, 0) - x


def difference(got: Tensor, want: Tensor, row: Row, signed_zeros: bool) -> str:
    """The first elements that are not what PyTorch has; empty if there is none."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)} is not {want.dtype} {tuple(want.shape)}"
    if not got.is_floating_point():
        bad = got != want
    else:
        unit = spaced(want.abs().nan_to_num(0, 0, 0).clamp(min=row.floor))
        finite = got.isfinite() & want.isfinite()
        near = finite & ((got.double() - want.double()).abs() <= row.ulps * unit.double())
        same = (got == want) | (got.isnan() & want.isnan())
        bad = ~(near | same)
        if signed_zeros:
            bad |= (want == 0) & (got == 0) & (got.signbit() != want.signbit())
    at = bad.nonzero()[:4].tolist()
    return "; ".join(f"{tuple(i)}: {got[tuple(i)].item()!r} not {want[tuple(i)].item()!r}" for i in at)


def step(
    module: Any, xs: list[Tensor], upstream: Sequence[float] = (0.75, -1.5, 2)
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and gradients for these gradients of the outputs, in turn."""
    leaves = [x.clone().requires_grad_() for x in xs]
    outputs = module(*leaves)
    trained = [y for y in outputs if y.requires_grad]
    weights = [torch.tensor(upstream, dtype=y.dtype).repeat(y.numel())[: y.numel()].view(y.shape) for y in trained]
    grads = torch.autograd.grad(trained, leaves, weights, allow_unused=True)
    return list(outputs), list(grads)


# Gradients of outputs, in turn: ordinary ones; none, infinite or no number; as large as numbers are.
UPSTREAM: dict[str, Callable[[torch.dtype], Sequence[float]]] = {
    "ordinary": lambda _: (0.75, -1.5, 2),
    "special": lambda _: (0.0, INF, NAN, -0.0, -INF),
    "largest": lambda t: (torch.finfo(t).max,),
}


def broken(module: ORTModule) -> bool:
    """Whether more than single ops runs in PyTorch."""
    return not all(r.name.startswith("aten.") for r in module.fallback_report())


class Comparison:
    """Functions compared with eager PyTorch, a dozen in one module: to export each alone would take most of the time.

    Parameters
    ----------
    rows
        The functions, by their names.
    upstream
        The gradients of their outputs, a key of `UPSTREAM`.
    """

    def __init__(self, rows: dict[str, Row], upstream: str) -> None:
        self._rows, self._upstream = rows, UPSTREAM[upstream]
        names = [name for name, row in rows.items() if not row.broken]
        self._batches = [names[i : i + 12] for i in range(0, len(names), 12)]
        self._batches += [[name] for name, row in rows.items() if row.broken]
        self._found: dict[tuple[str, torch.dtype], str] = {}

    def differences(self, name: str, dtype: torch.dtype) -> str:
        """What differs of a function; empty if nothing does."""
        if (name, dtype) not in self._found:
            self._compare(next(names for names in self._batches if name in names), dtype)
        return self._found[name, dtype]

    def _compare(self, names: list[str], dtype: torch.dtype) -> None:
        batch = {name: self._rows[name] for name in names if dtype in self._rows[name].dtypes}
        upstream = self._upstream(dtype)
        most = max(1, *(abs(v) for v in upstream if math.isfinite(v)))
        inputs = {name: [filled(x, len(upstream)) for x in operands(row, dtype)] for name, row in batch.items()}
        counts = {name: len(pieces(row.function(*inputs[name]))) for name, row in batch.items()}

        def forward(_: Any, *xs: Tensor) -> tuple[Tensor, ...]:
            left = list(xs)
            outputs: list[Tensor] = []
            for name, row in batch.items():
                n = len(inputs[name])
                outputs += pieces(row.function(*left[:n]))
                left = left[n:]
            return tuple(outputs)

        xs = [x for name in batch for x in inputs[name]]
        eager, module = pair(Function(forward))
        want, want_grads = step(eager, xs, upstream)
        got, got_grads = step(module, xs, upstream)
        assert broken(module) == any(row.broken for row in batch.values()), module.fallback_report()
        for name, row in batch.items():
            said = {}
            for k in range(counts[name]):
                ours, expected = got.pop(0).detach(), want.pop(0).detach()
                said[f"output {k}"] = difference(ours, expected, row, row.signed_zeros)
            slope = replace(row, floor=min(row.floor * most, torch.finfo(dtype).max / 2))
            for k in range(len(inputs[name])):
                dx, dx_eager = got_grads.pop(0), want_grads.pop(0)
                if dx is None or dx_eager is None:
                    said[f"gradient {k}"] = "" if dx is dx_eager else "is None on one side"
                else:
                    said[f"gradient {k}"] = difference(dx, dx_eager, slope, False)
            self._found[name, dtype] = "\n".join(f"{what}: {text}" for what, text in said.items() if text)


def cases(**rows: dict[str, Row]) -> list[Any]:
    """What tells of each function, in each dtype, what differs, for `parametrize`.

    Parameters
    ----------
    **rows
        By the gradients that come back, keys of `UPSTREAM`, the functions that are compared for them.
    """
    return [
        pytest.param(functools.partial(comparison.differences, name, dtype), id=f"{name}-{dtype}-{upstream}")
        for upstream, functions in rows.items()
        for comparison in [Comparison(functions, upstream)]
        for name, row in functions.items()
        for dtype in row.dtypes
    ]
