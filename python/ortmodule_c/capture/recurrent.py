"""Traces recurrent layers without going through their time: a graph holds for every length."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher

from ..lowering.translations.registry import aten

OPS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def _of_one_step(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Results of the shapes, strides and ancestry that `compute` gives; their values are not right."""

    def kernel(given: Tensor, state: Any, parameters: Any, *options: Any) -> tuple[Tensor, ...]:
        *others, batch_first = options
        steps = given.transpose(0, 1) if batch_first else given
        output, *states = compute(steps[:1], state, parameters, *others, False)
        output = output.expand(steps.shape[0], -1, -1).clone(memory_format=torch.contiguous_format)
        return (output.transpose(0, 1) if batch_first else output, *states)

    return kernel


@contextlib.contextmanager
def one_step_for_all() -> Iterator[None]:
    """Within it tensors without elements take one step through a layer, which tells all there is to know of them."""
    kept = [(op, dict(op.py_kernels)) for op in OPS]
    for op, kernels in kept:
        op.py_kernels.update({key: _of_one_step(compute) for key, compute in kernels.items()})
        op._dispatch_cache.clear()
    try:
        with enable_python_dispatcher():
            yield
    finally:
        for op, kernels in kept:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
