"""Rows of the cells of recurrent layers, beside their steps written out."""

from collections.abc import Callable

import torch
from torch import Tensor

from case import Case
from cases_movement import F64, x

Step = Callable[..., tuple[Tensor, ...]]


def lstm_step(given: Tensor, product: Tensor, _h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = (given + product).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(given: Tensor, product: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    (r, z, n), (pr, pz, pn) = given.chunk(3, 1), product.chunk(3, 1)
    n = torch.tanh(n + (r + pr).sigmoid() * pn)
    return ((h - n) * (z + pz).sigmoid() + n,)


def tanh_step(given: Tensor, product: Tensor, _h: Tensor) -> tuple[Tensor, ...]:
    return (torch.tanh(given + product),)


def relu_step(given: Tensor, product: Tensor, _h: Tensor) -> tuple[Tensor, ...]:
    return (torch.relu(given + product),)


STEPS: dict[str, tuple[Step, int, int]] = {  # of each op: its step, gates and outputs
    "LstmCells": (lstm_step, 4, 5),
    "GruCells": (gru_step, 3, 4),
    "RnnCells": (tanh_step, 1, 2),
}


def cells(
    op: str, steps: int, batch: int, hidden: int, bias: bool = True, dtype: torch.dtype = torch.float32, **attrs: int
) -> Case:
    step, gates, outputs = STEPS[op]
    step = relu_step if attrs.get("relu") else step
    n_states = 2 if op == "LstmCells" else 1

    def f(given: Tensor, r: Tensor, b: Tensor | None, *states: Tensor) -> list[Tensor]:
        y = [given] * steps
        for t in reversed(range(steps)) if attrs.get("reverse") else range(steps):
            h = states[0]
            states = step(given[t], h @ r.t() if b is None else h @ r.t() + b, *states)
            y[t] = states[0]
        return [torch.stack(y), *states]

    width = gates * hidden
    inputs = [
        x(steps, batch, width, dtype=dtype) / 2,  # where tanh is flat, its slope is what 16 bits leave of 1 - y * y
        x(width, hidden, dtype=dtype, seed=1) / max(hidden, 1) ** 0.5,
        x(width, dtype=dtype, seed=2) if bias else None,
        *[x(batch, hidden, dtype=dtype, seed=3 + i).tanh() for i in range(n_states)],
    ]
    # What a step of 16 bits rounds, all that follow it are computed from.
    return Case(op, inputs, f, attrs, outputs=outputs, compare=1 + n_states, differentiable=1 + n_states, scale=3.0)


# Steps, batch and hidden units: of one element each, coinciding, beside whole vectors and panels, of several parts of
# the batch.
SIZES = [(1, 1, 1), (3, 3, 3), (4, 2, 17), (2, 5, 33), (5, 1, 64), (2, 70, 3), (2, 0, 3), (3, 15, 130)]

CASES = [
    *[cells(op, *sizes) for op in STEPS for sizes in SIZES],
    *[cells(op, 3, 2, 5, dtype=F64) for op in STEPS],
    *[cells(op, 3, 2, 19, bias=False, reverse=1) for op in STEPS],
    *[cells(op, 4, 3, 5, reverse=1, dtype=F64) for op in STEPS],
    cells("RnnCells", 3, 2, 35, relu=1),
    cells("RnnCells", 3, 2, 5, relu=1, reverse=1, dtype=F64),
]
