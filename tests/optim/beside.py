"""Parameters and gradients, and how an optimizer is held to another one."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# One, none and several blocks of the core, vectors that are not whole, no dims, no elements.
SHAPES: Sequence[tuple[int, ...]] = [(3, 5), (1000,), (), (1,), (0, 4), (129, 257), (17, 1, 3)]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)

# Of parameters and states after twenty steps, in epsilons of the dtype, relative and absolute (values are around 1):
# PyTorch contracts what is past a tensor's last whole vector otherwise than the rest.
EPSILONS = 4


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """The same values at each call."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]


def give_gradients(*lists: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    """The same ones to each list."""
    for params in lists:
        g = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = (torch.randn(p.shape, generator=g) * scale).to(p.dtype)


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        tolerance = EPSILONS * torch.finfo(b.dtype).eps
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same_state(ours: Optimizer, theirs: Optimizer) -> None:
    """The same parameters have state, under the same names."""
    a, b = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert a.keys() == b.keys()
    for key in b:
        assert a[key].keys() == b[key].keys()
        assert_close(list(a[key].values()), [b[key][name] for name in a[key]])


def train(optimizer: Optimizer, steps: int, seed: int = 1, **gradients: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i in range(steps):
        give_gradients(params, seed=seed + i, **gradients)
        optimizer.step()
