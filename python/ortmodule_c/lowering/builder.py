"""Builds an ONNX graph node by node, asking the C core what each node gives.

Sizes may be symbolic: they become int64 scalars computed from the shapes of the graph's inputs, which fold to
constants once the C core binds the graph to concrete shapes.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .. import _C
from ..capture.autocast_region import Region
from ..capture.numbers import is_number, term_within
from ..dtypes import BY_TEXT
from ..errors import NeedsStatic, Unsupported, first_lines
from .draft import (
    ONNX_TYPES,
    OVER,
    OWN_DOMAIN,
    Carried,
    Draft,
    Size,
    Type,
    Val,
    dtype_text,
    example,
    same_size,
    static,
)

_OPS = _C.ops()

# What PyTorch computes of sizes, by the names of its and sympy's functions.
_OF_SIZES = {"Add": "Add", "Mul": "Mul", "FloorDiv": "FloorDiv", "CleanDiv": "FloorDiv"}
_OF_SIZES |= {"Mod": "Mod", "PythonMod": "Mod", "Max": "Max", "Min": "Min"}
_OF_REALS = {"Add": "Add", "Mul": "Mul", "FloatTrueDiv": "Div", "IntTrueDiv": "Div", "FloatPow": "Pow"}
_OF_REALS |= {"Max": "Max", "Min": "Min"}
_ROUNDED = {"FloorToInt": "Floor", "CeilToInt": "Ceil", "RoundToInt": "Round"}  # from real to integer


def _plain(value: Any) -> Any:
    """An attribute, which cannot depend on sizes."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, torch.SymFloat):
        return float(value)
    return static(value) if isinstance(value, torch.SymInt) else value


class Builder:
    """Adds nodes to a draft in the name of one ATen node.

    Parameters
    ----------
    draft
        The graph under construction.
    source
        Where that node comes from: what is added says so too.
    op
        Its op; none for what no ATen node stands for.
    result
        What PyTorch says that it returns.
    region
        The region of autocast that it is in, where the graph does not say what that makes of it.

    Attributes
    ----------
    overwritten
        Arguments that the node changes, unseen by autograd, and what to.
    """

    def __init__(
        self,
        draft: Draft,
        source: str = "",
        op: OpOverload | None = None,
        result: Any = None,
        region: Region = (),
    ) -> None:
        self.draft = draft
        self.source = source
        self._op = op
        self.result = result
        self.region = region
        self.overwritten: list[tuple[Val, Val]] = []

    def of_part(self, op: OpOverload, result: Any) -> "Builder":
        """For a part of its node, which changes what that changes."""
        part = Builder(self.draft, self.source, op, result)
        part.overwritten = self.overwritten
        return part

    @property
    def op(self) -> OpOverload:
        """The op of its node."""
        assert self._op is not None
        return self._op

    @property
    def aten_name(self) -> str:
        """The name of the op without its namespace and overload."""
        return self.op._schema.name.split("::")[1]

    # Nodes

    def emit(self, op: str, *inputs: Val | None, outputs: int | None = None, **attributes: Any) -> Val:
        """Add a node, as :meth:`emit_all` does, and give its first output."""
        return self.emit_all(op, *inputs, outputs=outputs, **attributes)[0]

    def emit_all(self, op: str, *inputs: Val | None, outputs: int | None = None, **attributes: Any) -> list[Val]:
        """Add a node, of which the C core says what it gives.

        Parameters
        ----------
        op
            Op name; our own domain is chosen by the name.
        inputs
            Operands, None for one left out.
        outputs
            How many there are; by default all that the op has.
        attributes
            Attributes; those that are None are left out.

        Raises
        ------
        Unsupported
            If the core refuses it; the message is the core's.
        """
        carried = next((v for v in inputs if isinstance(v, Carried)), None)
        if carried is not None:
            raise Unsupported(f"{op} of {carried.dtype}")
        plain = {k: _plain(v) for k, v in attributes.items() if v is not None}
        types = [None if v is None else v.type for v in inputs]
        elements = {i: v.elements for i, v in enumerate(inputs) if v is not None and v.elements is not None}
        try:
            results = _C.infer(op, types, plain, elements, outputs, self.draft.provider)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise Unsupported(first_lines(error)) from error
        return self._node(op, inputs, results, plain)

    def call_torch(self, index: int, inputs: Sequence[Val], types: Sequence[Type]) -> list[Val]:
        """Add the node that runs op number `index` in PyTorch, and gives values of these types."""
        return self._node("TorchCall", inputs, types, {"index": index})

    def _node(
        self, op: str, inputs: Sequence[Val | None], types: Sequence[Type], attributes: dict[str, Any]
    ) -> list[Val]:
        grad = 0 if op == "Detach" else reduce(or_, [v.grad for v in inputs if v is not None], 0)
        stem = f"{self.source.rsplit('/', 1)[-1]}.{op}" if self.source else op
        results = [self.draft.value(stem, BY_TEXT[dtype], shape, None if shape else (), grad) for dtype, shape in types]
        node = ir.Node(
            "" if _OPS[op][1] else OWN_DOMAIN,
            op,
            [v.ir if v is not None else None for v in inputs],
            [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()],
            outputs=[r.ir for r in results],
            name=self.source or None,
        )
        self.draft.graph.append(node)
        return results

    # Sizes

    def size(self, size: Size) -> Val:
        """A size as an int64 scalar."""
        if isinstance(size, int):
            return self.const(size, torch.int64)
        val = self._expr(size.node.expr)
        val.elements = torch.tensor(example(size))
        return val

    def real(self, value: float | Size | torch.SymFloat) -> Val:
        """A number that may depend on sizes as a float64 scalar."""
        if isinstance(value, (int, float)):
            return self.const(float(value), torch.float64)
        return self._real(value.node.expr)

    def _expr(self, expr: sympy.Expr) -> Val:
        if expr.is_Integer:
            return self.const(int(expr), torch.int64)
        return self._known(expr, self._compute)

    def _real(self, expr: sympy.Expr) -> Val:
        if expr.is_number:
            return self.const(float(expr), torch.float64)
        if expr.is_integer:
            return self.cast(self._expr(expr), torch.float64)
        return self._known(expr, self._compute_real)

    def _known(self, expr: sympy.Expr, compute: Callable[[sympy.Expr], Val]) -> Val:
        known = self.draft.sizes
        if expr not in known:
            known[expr] = compute(expr)
        return known[expr]

    def _compute(self, expr: sympy.Expr) -> Val:
        if expr.is_Symbol:
            if expr not in self.draft.symbols:
                raise NeedsStatic(f"{_told(expr)} is not the size of an input")
            val, axis = self.draft.symbols[expr]
            shape = self.emit("Shape", val, start=axis, end=axis + 1)
            return self.emit("Squeeze", shape, self.const([0], torch.int64))
        kind = type(expr).__name__
        if kind == "TruncToInt":
            return self.cast(self._real(expr.args[0]), torch.int64)
        if kind in _ROUNDED:
            return self.cast(self.emit(_ROUNDED[kind], self._real(expr.args[0])), torch.int64)
        if kind == "Pow" and expr.args[1].is_Integer and expr.args[1] > 0:
            return self._fold("Mul", [self._expr(expr.args[0])] * int(expr.args[1]))
        if kind not in _OF_SIZES:
            raise NeedsStatic(f"{_told(expr)} cannot be computed in the graph")
        return self._fold(_OF_SIZES[kind], [self._expr(a) for a in expr.args])

    def _compute_real(self, expr: sympy.Expr) -> Val:
        kind = type(expr).__name__
        if kind == "ToFloat":
            return self._real(expr.args[0])
        if kind == "OpaqueUnaryFn_sqrt":
            return self.emit("Sqrt", self._real(expr.args[0]))
        if kind not in _OF_REALS:
            raise NeedsStatic(f"{_told(expr)} cannot be computed in the graph")
        return self._fold(_OF_REALS[kind], [self._real(a) for a in expr.args])

    def _fold(self, op: str, terms: list[Val]) -> Val:
        total = terms[0]
        for term in terms[1:]:
            total = self.emit(op, total, term)
        return total

    def ints(self, sizes: Sequence[Size]) -> Val:
        """Sizes as an int64 vector."""
        if all(isinstance(s, int) for s in sizes):
            return self.const(list(sizes), torch.int64)
        axis = self.const([0], torch.int64)
        parts = [
            self.const([s], torch.int64) if isinstance(s, int) else self.emit("Unsqueeze", self.size(s), axis)
            for s in sizes
        ]
        val = parts[0] if len(parts) == 1 else self.emit("Concat", *parts, axis=0)
        val.elements = torch.tensor([example(s) for s in sizes])
        return val

    # What most translations need

    def scalar(self, value: Any, dtype: torch.dtype) -> Val:
        """A number, a symbolic size or a Val as a Val of that dtype."""
        if isinstance(value, Val):
            return self.cast(value, dtype)
        if is_number(value):
            return self.cast(self.draft.number(term_within(value, dtype)), dtype)
        if isinstance(value, torch.SymInt):
            return self.cast(self.size(value), dtype)
        if isinstance(value, torch.SymFloat):
            return self.cast(self.real(value), dtype)
        if isinstance(value, torch.SymBool):
            raise NeedsStatic(f"{value} has to be known at export")
        return self.const(value, dtype)

    def cast(self, x: Val, dtype: torch.dtype) -> Val:
        """`x` as another dtype; itself if it has it already."""
        if x.dtype == dtype:
            return x
        dtype_text(dtype)
        out = self.emit("Cast", x, to=int(ONNX_TYPES[dtype]))
        out.shape = x.shape
        return out

    def reshape(self, x: Val, shape: Sequence[Size]) -> Val:
        """`x` with another shape; one symbolic size is left to be inferred."""
        if x.shape is not None and len(x.shape) == len(shape) and all(map(same_size, x.shape, shape)):
            return x
        symbolic = [i for i, s in enumerate(shape) if not isinstance(s, int)]
        if len(symbolic) == 1 and 0 not in shape:
            target = self.ints([-1 if i == symbolic[0] else s for i, s in enumerate(shape)])
        else:
            target = self.ints(shape)
        out = self.emit("Reshape", x, target, allowzero=1 if 0 in shape else None)
        out.shape = tuple(shape)
        return out

    def unsqueeze(self, x: Val, *axes: int) -> Val:
        """New dims of one element, at non-negative positions of the result."""
        out = self.emit("Unsqueeze", x, self.const(list(axes), torch.int64))
        if x.shape is not None:
            shape = list(x.shape)
            for axis in sorted(axes):
                shape.insert(axis, 1)
            out.shape = tuple(shape)
        return out

    def squeeze(self, x: Val, *axes: int) -> Val:
        """Without the given dims of one element, at non-negative positions."""
        out = self.emit("Squeeze", x, self.const(list(axes), torch.int64))
        if x.shape is not None:
            out.shape = tuple(s for i, s in enumerate(x.shape) if i not in axes)
        return out

    def transpose(self, x: Val, perm: Sequence[int]) -> Val:
        """Dims in the order `perm`."""
        if list(perm) == list(range(len(perm))):
            return x
        out = self.emit("Transpose", x, perm=list(perm))
        if x.shape is not None:
            out.shape = tuple(x.shape[p] for p in perm)
        return out

    def expand(self, x: Val, shape: Sequence[Size]) -> Val:
        """`x` repeated to a shape it broadcasts to."""
        if x.shape is not None and len(x.shape) == len(shape) and all(map(same_size, x.shape, shape)):
            return x
        out = self.emit("Expand", x, self.ints(shape))
        out.shape = tuple(shape)
        return out

    def full(self, shape: Sequence[Size], value: Any, dtype: torch.dtype) -> Val:
        """A tensor of one repeated value."""
        out = self.expand(self.scalar(value, dtype), shape)
        out.shape = tuple(shape)
        return out

    def slice(self, x: Val, axis: int, start: Size, end: Size, step: int = 1) -> Val:
        """Part of one dim."""
        return self.emit("Slice", x, self.ints([start]), self.ints([end]), self.ints([axis]), self.ints([step]))

    def detached(self, x: Val) -> Val:
        """`x` without gradients."""
        if not x.grad:
            return x
        if isinstance(x, Carried):
            return Carried(self.detached(x.carrier), x.dtype)
        out = self.emit("Detach", x)
        out.shape = x.shape
        return out

    def with_gradient_of(self, x: Val, like: Val) -> Val:
        """The elements of `x`, differentiated as if they were those of `like`, which has its shape."""
        out = self.emit("WithGradientOf", self.detached(x), like)
        out.shape = x.shape
        return out

    def overwrite(self, x: Val, value: Val) -> None:
        """Say that the op being translated changes its argument `x`, unseen by autograd, to `value`."""
        self.overwritten.append((x, self.detached(value)))

    def output_over(self, value: Val, given: Val) -> None:
        """Add an output that is written over the input `given`."""
        own = value.ir
        if own.producer() is None or own in self.draft.graph.outputs:  # what marks it is the value's
            own = self.emit("Identity", value.carrier if isinstance(value, Carried) else value).ir
            own.shape = value.ir.shape
        assert given.ir.name is not None
        own.metadata_props[OVER] = given.ir.name
        self.draft.graph.outputs.append(own)

    # Of the whole graph

    def tensor(self, data: Tensor, name: str = "const") -> Val:
        """A constant with the elements of a tensor, which is kept and must not change."""
        return self.draft.tensor(data, name)

    def const(self, data: Any, dtype: torch.dtype) -> Val:
        """A small constant: a number or a (nested) list of numbers."""
        return self.draft.const(data, dtype)

    def subsequence(self) -> int:
        """A number no other random node of the graph has."""
        return self.draft.subsequence()


def _told(expr: sympy.Expr) -> str:
    return "a number that depends on the values of a tensor" if free_unbacked_symbols(expr) else f"size {expr}"
