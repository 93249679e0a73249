"""Recurrent layers: for each layer and direction a product for all steps at once, then the steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...capture.autocast_region import casts_to
from ...errors import Unsupported
from ..builder import Builder
from ..draft import Val
from .nn import dropout
from .registry import aten, translates


def _layers(
    b: Builder,
    cells: str,
    x: Val,
    states: Sequence[Val],
    params: Sequence[Val],
    options: Sequence[Any],
    **attributes: Any,
) -> tuple[Val, ...]:
    """The results of an op that runs these cells."""
    has_biases, num_layers, p, train, bidirectional, batch_first = options
    dtypes = {v.dtype for v in (x, *states, *params)}
    if len(dtypes) > 1 and (not b.region or torch.float64 in dtypes):  # which autocast casts nothing to, nor from
        raise Unsupported("a recurrent layer of several dtypes")
    x, *params = _lowered(b, [x, *params])
    directions, per_direction = 1 + bidirectional, 4 if has_biases else 2
    if any(state.example[0] != num_layers * directions for state in states):
        raise Unsupported(f"a recurrent layer whose states are not of {num_layers} layers, {directions} directions")
    if len(params) != num_layers * directions * per_direction:
        raise Unsupported("a recurrent layer with projections")
    x = b.transpose(x, (1, 0, 2)) if batch_first else x
    first = [_of_each(b, state) for state in states]
    last: list[list[Val]] = [[] for _ in states]
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            w, r, *biases = params[k * per_direction : (k + 1) * per_direction]
            given, recurrent = biases or (None, None)
            gates = b.emit("FusedMatMul", b.cast(x, w.dtype), w, given, transB=1)
            begun = [each[k] for each in first]
            y, *ends = b.emit_all(cells, gates, r, recurrent, *begun, reverse=direction or None, **attributes)
            y.shape = (*x.dims[:2], r.example[1])
            outputs.append(y)
            for each, end, begin in zip(last, ends, begun, strict=False):
                end.shape = begin.shape
                each.append(end)
        x = _side_by_side(b, outputs)
        x = dropout(b, x, p, train) if layer < num_layers - 1 else x
        x.shape = (*outputs[0].dims[:2], directions * r.example[1])
    x = b.transpose(x, (1, 0, 2)) if batch_first else x
    results = (x, *[_stacked(b, each) for each in last])
    expected = [t.dtype for t in pytree.tree_leaves(b.result) if isinstance(t, Tensor)]
    if [v.dtype for v in results] != expected:
        raise Unsupported(f"a recurrent layer that gives {expected}")
    return results


def _of_each(b: Builder, states: Val) -> list[Val]:
    """Those of each layer and direction, of [layers * directions, batch, hidden]."""
    n = states.example[0]
    if n == 1:
        return [b.squeeze(states, 0)]
    parts = b.emit_all("Split", states, b.ints([1] * n), outputs=n, axis=0)
    for part in parts:
        part.shape = (1, *states.dims[1:])
    return [b.squeeze(part, 0) for part in parts]


def _stacked(b: Builder, states: Sequence[Val]) -> Val:
    parts = [b.unsqueeze(state, 0) for state in states]
    return parts[0] if len(parts) == 1 else b.emit("Concat", *parts, axis=0)


def _side_by_side(b: Builder, outputs: Sequence[Val]) -> Val:
    return outputs[0] if len(outputs) == 1 else b.emit("Concat", *outputs, axis=2)


def _lowered(b: Builder, values: Sequence[Val]) -> list[Val]:
    """What autocast makes of operands of products in the region of the op, if it is in one."""
    to = casts_to(b.region, "cpu")
    return [v if to is None or v.dtype == torch.float64 else b.cast(v, to) for v in values]


@translates(aten.lstm.input)
def lstm(b: Builder, x: Val, states: Sequence[Val], params: Sequence[Val], *options: Any) -> tuple[Val, ...]:
    if casts_to(b.region, "cpu") == torch.float16:
        raise Unsupported("an LSTM under autocast to float16, which PyTorch refuses on many machines")
    return _layers(b, "LstmCells", x, _lowered(b, states), params, options)


@translates(aten.gru.input)
def gru(b: Builder, x: Val, state: Val, params: Sequence[Val], *options: Any) -> tuple[Val, ...]:
    """Of its states autocast casts copies, which are multiplied."""
    return _layers(b, "GruCells", x, [state], params, options)


@translates(aten.rnn_tanh.input, aten.rnn_relu.input)
def rnn(b: Builder, x: Val, state: Val, params: Sequence[Val], *options: Any) -> tuple[Val, ...]:
    relu = 1 if b.aten_name == "rnn_relu" else None
    return _layers(b, "RnnCells", x, _lowered(b, [state]), params, options, relu=relu)


def _cell(
    b: Builder, cells: str, x: Val, states: Sequence[Val], params: Sequence[Val | None], **attributes: Any
) -> tuple[Val, ...]:
    """The states after one step."""
    if casts_to(b.region, "cpu") is not None:
        raise Unsupported("a recurrent cell under autocast")
    if len({v.dtype for v in (x, *states, *params) if v is not None}) > 1:
        raise Unsupported("a recurrent cell of several dtypes")
    w, r, given, recurrent = params
    gates = b.unsqueeze(b.emit("FusedMatMul", x, w, given, transB=1), 0)
    ends = b.emit_all(cells, gates, r, recurrent, *states, **attributes)[1 : 1 + len(states)]
    for end, state in zip(ends, states, strict=True):
        end.shape = state.shape
    return tuple(ends)


@translates(aten.lstm_cell.default)
def lstm_cell(
    b: Builder, x: Val, states: Sequence[Val], w: Val, r: Val, given: Val | None = None, recurrent: Val | None = None
) -> tuple[Val, ...]:
    return _cell(b, "LstmCells", x, states, (w, r, given, recurrent))


@translates(aten.gru_cell.default)
def gru_cell(
    b: Builder, x: Val, state: Val, w: Val, r: Val, given: Val | None = None, recurrent: Val | None = None
) -> Val:
    return _cell(b, "GruCells", x, [state], (w, r, given, recurrent))[0]


@translates(aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default)
def rnn_cell(
    b: Builder, x: Val, state: Val, w: Val, r: Val, given: Val | None = None, recurrent: Val | None = None
) -> Val:
    relu = 1 if b.aten_name == "rnn_relu_cell" else None
    return _cell(b, "RnnCells", x, [state], (w, r, given, recurrent), relu=relu)[0]
