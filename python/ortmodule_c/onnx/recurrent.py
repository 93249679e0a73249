"""LSTM, GRU and RNN: the core's cells where they are what PyTorch has, else step by step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import Unsupported
from ..lowering.draft import Val
from .compose import GATES
from .importer import Given, Importer, Results
from .sequences import stacked

# By op: its functions.
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_CELLS = {"LSTM": "LstmCells", "GRU": "GruCells", "RNN": "RnnCells"}

Step = Callable[[Val, list[Val]], list[Val]]  # of what the input gives to the gates, and of the states: the states


def recurrent(
    t: Importer,
    node: Given,
    x: Val,
    w: Val,
    r: Val,
    bias: Val | None = None,
    lengths: Val | None = None,
    *others: Val | None,
) -> Results:
    said, lstm = node.attributes, node.op == "LSTM"
    by_batch = bool(said.get("layout"))
    states, peepholes = list(others[: 2 if lstm else 1]), others[2] if len(others) > 2 else None
    if by_batch:
        x, states = _turned(t, x), [v and _turned(t, v) for v in states]
    states += [None] * (1 + lstm - len(states))
    directions, hidden, batch = int(w.dims[0]), int(r.dims[2]), int(x.dims[1])
    names = said.get("activations") or _DEFAULTS[node.op] * directions
    each = len(names) // directions
    outputs, last = [], []
    for k in range(directions):

        def of(v: Val | None, k: int = k) -> Val | None:
            return None if v is None else t.emit("Gather", v, t.const(k), axis=0)

        begun = [of(v) or t.tensor(torch.zeros(batch, hidden, dtype=x.dtype)) for v in states]
        backwards = k == 1 or said["direction"] == "reverse"
        layer = _Layer(t, node, of(w), of(r), of(bias), of(peepholes), names[k * each : (k + 1) * each])
        y, *ends = layer.run(x, begun, lengths, backwards)
        outputs.append(y)
        last.append(ends)
    results = [stacked(t, outputs, 1), *[stacked(t, ends, 0) for ends in zip(*last, strict=True)]]
    if by_batch:
        results = [t.emit("Transpose", results[0], perm=[2, 0, 1, 3]), *[_turned(t, v) for v in results[1:]]]
    return tuple(results)


def _turned(t: Importer, v: Val) -> Val:
    return t.emit("Transpose", v, perm=[1, 0, *range(2, v.rank)])


class _Layer:
    """One direction: its weights without the dim of directions."""

    def __init__(
        self,
        t: Importer,
        node: Given,
        w: Val | None,
        r: Val | None,
        bias: Val | None,
        peepholes: Val | None,
        functions: Sequence[str],
    ) -> None:
        assert w is not None and r is not None
        self.t, self.op, self.said, self.w, self.r = t, node.op, node.attributes, w, r
        if self.said.get("activation_alpha") or self.said.get("activation_beta"):
            raise Unsupported("functions with parameters of their own")
        self.functions, self.peepholes = list(functions), peepholes
        self.gates = len(GATES[node.op])
        self.given: Val | None = None
        self.added: Val | None = None
        if bias is not None:
            self.given, self.added = self._parts(bias, 2)

    def run(self, x: Val, states: list[Val], lengths: Val | None, backwards: bool) -> list[Val]:
        """What all steps give, and the last states."""
        relu = self.op == "RNN" and self.functions == ["Relu"]
        known = relu or self.functions == _DEFAULTS[self.op]
        turned = self.op == "GRU" and not self.said["linear_before_reset"]
        special = self.said.get("clip") or self.said.get("input_forget") or self.peepholes is not None or turned
        if known and not special and lengths is None:
            w, r, given, added = (v and self._in_order(v) for v in (self.w, self.r, self.given, self.added))
            gates = self.t.emit("FusedMatMul", x, w, given, transB=1)
            said: dict[str, Any] = {"reverse": int(backwards)} | ({"relu": 1} if relu else {})
            return list(self.t.emit(_CELLS[self.op], gates, r, added, *states, outputs=1 + len(states), **said))
        return self._one_by_one(x, states, lengths, backwards)

    def _parts(self, v: Val, n: int) -> list[Val]:
        """Equal ones along the last dim of a step's values, or the only one of a bias."""
        each = int(v.dims[-1]) // n
        return [v] if n == 1 else list(self.t.emit("Split", v, self.t.const([each] * n), outputs=n, axis=v.rank - 1))

    def _in_order(self, v: Val) -> Val:
        if self.gates == 1:
            return v
        each = int(v.dims[0]) // self.gates
        parts = self.t.emit("Split", v, self.t.const([each] * self.gates), outputs=self.gates, axis=0)
        return self.t.emit("Concat", *[parts[i] for i in GATES[self.op]], axis=0)

    def _one_by_one(self, x: Val, states: list[Val], lengths: Val | None, backwards: bool) -> list[Val]:
        t, n = self.t, int(x.dims[0])
        gates = t.emit("FusedMatMul", x, self.w, self.given, transB=1)
        step: Step = {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self.op]
        outputs: list[Val] = []
        for s in reversed(range(n)) if backwards else range(n):
            new = step(t.emit("Gather", gates, t.const(s), axis=0), states)
            y = new[0]
            if lengths is not None:
                within = t.emit("Unsqueeze", t.emit("Less", t.like(lengths, s), lengths), t.const([1]))
                y = t.emit("Where", within, y, t.like(y, 0))
                new = [t.emit("Where", within, a, b) for a, b in zip(new, states, strict=True)]
            states = new
            outputs.append(y)
        if not outputs:
            raise Unsupported("a sequence without elements")
        return [stacked(t, outputs[::-1] if backwards else outputs, 0), *states]

    def _plus(self, first: Val, *others: Val | None) -> Val:
        for v in others:
            first = first if v is None else self.t.emit("Add", first, v)
        return first

    def _function(self, i: int, v: Val) -> Val:
        t, clip = self.t, self.said.get("clip")
        if clip:
            v = t.emit("Clip", v, t.like(v, -clip), t.like(v, clip))
        name = self.functions[i]
        if name in ("Sigmoid", "Tanh", "Relu"):
            return t.emit(name, v)
        raise Unsupported(f"function {name}")

    def _one_less(self, v: Val) -> Val:
        return self.t.emit("Sub", self.t.like(v, 1), v)

    def _lstm(self, x: Val, states: list[Val]) -> list[Val]:
        t, (h, c) = self.t, states
        mul = partial(t.emit, "Mul")
        gates = self._plus(x, t.emit("FusedMatMul", h, self.r, self.added, transB=1))
        i, o, f, g = self._parts(gates, 4)
        pi, po, pf = self._parts(self.peepholes, 3) if self.peepholes is not None else (None, None, None)
        i = self._function(0, self._plus(i, pi and mul(pi, c)))
        f = self._function(0, self._plus(f, pf and mul(pf, c)))
        f = self._one_less(i) if self.said.get("input_forget") else f
        c = t.emit("Add", mul(f, c), mul(i, self._function(1, g)))
        o = self._function(0, self._plus(o, po and mul(po, c)))
        return [mul(o, self._function(2, c)), c]

    def _gru(self, x: Val, states: list[Val]) -> list[Val]:
        t, (h,) = self.t, states
        mul = partial(t.emit, "Mul")
        xz, xr, xg = self._parts(x, 3)
        rz, rr, rg = t.emit("Split", self.r, t.const([int(h.dims[1])] * 3), outputs=3, axis=0)
        bz, br, bg = self._parts(self.added, 3) if self.added is not None else (None, None, None)
        z = self._function(0, self._plus(xz, t.emit("FusedMatMul", h, rz, bz, transB=1)))
        r = self._function(0, self._plus(xr, t.emit("FusedMatMul", h, rr, br, transB=1)))
        if self.said["linear_before_reset"]:
            part = mul(r, t.emit("FusedMatMul", h, rg, bg, transB=1))
        else:
            part = t.emit("FusedMatMul", mul(r, h), rg, bg, transB=1)
        g = self._function(1, self._plus(xg, part))
        return [t.emit("Add", mul(self._one_less(z), g), mul(z, h))]

    def _rnn(self, x: Val, states: list[Val]) -> list[Val]:
        part = self.t.emit("FusedMatMul", states[0], self.r, self.added, transB=1)
        return [self._function(0, self._plus(x, part))]
