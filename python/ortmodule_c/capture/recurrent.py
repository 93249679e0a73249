"""Traces recurrent layers without going through their time: a graph holds for every length."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._decomp  # registers what is exchanged below
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload

from ..lowering.translations.registry import aten

TAKEN_APART = (aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)  # by PyTorch, always
OPS = (aten.lstm.input, *TAKEN_APART)


class _Here(threading.local):
    one_step = False  # whether this thread takes one step for all
    onednn = True  # whether PyTorch uses oneDNN, which torch.export turns off


_here = _Here()


def _lowered(op: OpOverload, given: Tensor, state: Any) -> bool:
    """Whether autocast casts a layer as a whole: an LSTM of oneDNN's."""
    return (
        torch.is_autocast_enabled("cpu")
        and op is aten.lstm.input
        and _here.onednn
        and given.device.type == "cpu"
        and given.dtype in (torch.float32, torch.bfloat16)
        and 0 not in given.shape
        and state[0].shape[2] == state[1].shape[2]
    )


def _of_one_step(op: OpOverload, compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute`; where one step is to do, results of its shapes, strides and ancestry, whose values are not right."""

    def kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        output, *states = (one_step if _here.one_step else compute)(*args, **kwargs)
        # PyTorch 2.11 leaves an axis of one step in the states of an LSTM.
        return (output, *[state.squeeze(1) if state.dim() > 3 else state for state in states])

    def one_step(given: Tensor, state: Any, parameters: Any, *options: Any) -> tuple[Tensor, ...]:
        *others, batch_first = options
        steps = given.transpose(0, 1) if batch_first else given
        output, *states = compute(steps[:1], state, parameters, *others, False)
        if _lowered(op, given, state):
            output, *states = (t.to(torch.get_autocast_dtype("cpu")) for t in (output, *states))
        output = output.expand(steps.shape[0], -1, -1).clone(memory_format=torch.contiguous_format)
        return (output.transpose(0, 1) if batch_first else output, *states)

    return kernel


for _op in OPS:  # for good: threads that trace or plan at the same time would put back each other's
    _op.py_kernels.update({key: _of_one_step(_op, compute) for key, compute in _op.py_kernels.items()})
    _op._dispatch_cache.clear()


def is_of_all_lengths() -> bool:
    """Whether this thread traces a graph that holds for every length."""
    return _here.one_step


@contextlib.contextmanager
def one_step_for_all() -> Iterator[None]:
    """Within it tensors without elements take one step through a layer, in this thread: that tells all there is."""
    before, _here.one_step = _here.one_step, True
    if not before:
        _here.onednn = bool(torch.backends.mkldnn.enabled)
    try:
        with enable_python_dispatcher():
            yield
    finally:
        _here.one_step = before


def recurrent_layers(module: nn.Module) -> Iterator[nn.RNNBase]:
    """Those in a module."""
    return (m for m in module.modules() if isinstance(m, nn.RNNBase))


def computes_with_its_parameters(layer: nn.RNNBase) -> bool:
    """Whether a layer multiplies by its parameters as they are, which TorchDynamo takes for granted."""
    if type(layer) not in (nn.LSTM, nn.GRU, nn.RNN) or layer._forward_pre_hooks:
        return False
    own = [layer._parameters.get(name) for name in layer._flat_weights_names]
    return [*map(id, own)] == [*map(id, layer._flat_weights)]
