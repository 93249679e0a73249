"""What goes through ``torch.compile(..., backend="ortmodule_c")``, held to eager."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ortmodule_c.dynamo.backend import backend
from ortmodule_c.flatten import flatten
from wrapped import close, float_sum


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend=backend, **kwargs)


def counted(function: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    """The function compiled, and a list of the graphs that are made of it."""
    made: list[Any] = []

    def counting(graph: Any, examples: Any) -> Any:
        made.append(graph)
        return backend(graph, examples)

    return torch.compile(function, backend=counting, **kwargs), made


def assert_same(
    function: Callable[..., Any], *args: Any, runs: int = 2, rtol: float = 1e-4, **kwargs: Any
) -> list[str]:
    """Results, gradients and what is done to arguments are those of eager; gives the warnings."""
    ours = compiled(function, **kwargs)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(runs):
            given = [[_leaf(a) for a in args] for _ in range(2)]
            results = [function(*[_start(a) for a in given[0]]), ours(*[_start(a) for a in given[1]])]
            (expected, spec), (got, our_spec) = map(flatten, results)
            assert our_spec == spec
            for a, b in zip(expected, got, strict=True):
                close(b, a, rtol=rtol)
                assert (b.requires_grad, b.dtype, b._is_view()) == (a.requires_grad, a.dtype, a._is_view())
            if any(t.requires_grad for t in expected):
                float_sum(expected).backward()
                float_sum(got).backward()
            for a, b in zip(*given, strict=True):
                if isinstance(a, Tensor):
                    close(b.detach(), a.detach(), rtol=rtol)
                    assert (a.grad is None) == (b.grad is None)
                    if a.grad is not None:
                        close(b.grad, a.grad, rtol=rtol)
    return [str(w.message) for w in told if "ortmodule_c" in str(w.message)]


def _leaf(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _start(value: Any) -> Any:
    """An argument that may be changed in place."""
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4))).requires_grad_()
