"""Builds an ONNX graph node by node, checking that each node has a kernel.

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

from .. import _C
from ..errors import NeedsStatic, Unsupported
from .draft import ONNX_TYPES, OVER, OWN_DOMAIN, Draft, Size, Val, dtype_text, same_size, static

_OPS = _C.ops()

# Ops whose operands are all of one dtype; in all others but TorchCall the floating ones are.
_UNIFORM = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow", "Max", "Min", "And", "Or", "Xor", "Concat", "MatMul"}
_UNIFORM |= {"Equal", "NotEqual", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
_WIDE_PARAMETERS = {"LayerNormalization", "BatchNorm"}  # may be float32 though the input is not

# What PyTorch computes of sizes, by the names of its and sympy's functions.
_OF_SIZES = {"Add": "Add", "Mul": "Mul", "FloorDiv": "FloorDiv", "CleanDiv": "FloorDiv"}
_OF_SIZES |= {"Mod": "Mod", "PythonMod": "Mod", "Max": "Max", "Min": "Min"}
_OF_REALS = {"Add": "Add", "Mul": "Mul", "FloatTrueDiv": "Div", "IntTrueDiv": "Div", "FloatPow": "Pow"}
_OF_REALS |= {"Max": "Max", "Min": "Min"}
_ROUNDED = {"FloorToInt": "Floor", "CeilToInt": "Ceil", "RoundToInt": "Round"}  # from real to integer


def _number(value: Any) -> Any:
    """An attribute, which cannot depend on sizes."""
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

    Attributes
    ----------
    overwritten
        Arguments that the node changes, unseen by autograd, and what to.
    """

    def __init__(self, draft: Draft, source: str = "", op: OpOverload | None = None, result: Any = None) -> None:
        self.draft = draft
        self.source = source
        self._op = op
        self.result = result
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

    def emit(self, op: str, *inputs: Val | None, outputs: Sequence[torch.dtype | None] = (), **attributes: Any) -> Any:
        """Add a node.

        Parameters
        ----------
        op
            Op name; our own domain is chosen by the name.
        inputs
            Operands, None for one left out.
        outputs
            Element type of each output, None for one left out; by default one of the first input's type.
        attributes
            Attributes; those that are None are left out.

        Returns
        -------
        Val or tuple of Val
            One output, or as many as `outputs` has entries.
        """
        given = [v for v in inputs if v is not None]
        dtypes = list(outputs) or [given[0].dtype]
        self._check_kernel(op, [v.dtype for v in given], [d for d in dtypes if d is not None])
        grad = 0 if op == "Detach" else reduce(or_, [v.grad for v in given], 0)
        stem = f"{self.source.rsplit('/', 1)[-1]}.{op}" if self.source else op
        results = [
            None if d is None else self.draft.value(stem, d, None, grad if d.is_floating_point else 0) for d in dtypes
        ]
        node = ir.Node(
            OWN_DOMAIN if op not in _OPS or not _OPS[op][1] else "",
            op,
            [v.ir if v is not None else None for v in inputs],
            [ir.convenience.convert_attribute(k, _number(v)) for k, v in attributes.items() if v is not None],
            outputs=[r.ir if r is not None else ir.Value(name="") for r in results],
            name=self.source or None,
        )
        self.draft.graph.append(node)
        return results[0] if len(results) == 1 else tuple(results)

    def _check_kernel(self, op: str, inputs: list[torch.dtype], outputs: list[torch.dtype]) -> None:
        if op == "TorchCall":
            return
        mixed = len({d for d in inputs if d.is_floating_point}) > 1 and op not in _WIDE_PARAMETERS
        if mixed or (op in _UNIFORM and len(set(inputs)) > 1):
            raise Unsupported(f"{op} of {', '.join(map(str, inputs))}")
        floats = [d for d in (*inputs, *outputs) if d.is_floating_point]
        chooses = (floats or inputs or outputs)[0]
        if op not in _OPS or not _C.supports(op, dtype_text(chooses)):
            raise Unsupported(f"no kernel of {op} for {dtype_text(chooses)}")

    # Sizes

    def size(self, size: Size) -> Val:
        """A size as an int64 scalar."""
        if isinstance(size, int):
            return self.const(size, torch.int64)
        return self._expr(size.node.expr)

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
            known[expr].shape = ()
        return known[expr]

    def _compute(self, expr: sympy.Expr) -> Val:
        if expr.is_Symbol:
            if expr not in self.draft.symbols:
                raise NeedsStatic(f"size {expr} is not that of an input")
            val, axis = self.draft.symbols[expr]
            shape = self.emit("Shape", val, outputs=[torch.int64], start=axis, end=axis + 1)
            return self.emit("Squeeze", shape, self.const([0], torch.int64))
        kind = type(expr).__name__
        if kind == "TruncToInt":
            return self.cast(self._real(expr.args[0]), torch.int64)
        if kind in _ROUNDED:
            return self.cast(self.emit(_ROUNDED[kind], self._real(expr.args[0])), torch.int64)
        if kind == "Pow" and expr.args[1].is_Integer and expr.args[1] > 0:
            return self._fold("Mul", [self._expr(expr.args[0])] * int(expr.args[1]))
        if kind not in _OF_SIZES:
            raise NeedsStatic(f"size {expr} cannot be computed in the graph")
        return self._fold(_OF_SIZES[kind], [self._expr(a) for a in expr.args])

    def _compute_real(self, expr: sympy.Expr) -> Val:
        kind = type(expr).__name__
        if kind == "ToFloat":
            return self._real(expr.args[0])
        if kind == "OpaqueUnaryFn_sqrt":
            return self.emit("Sqrt", self._real(expr.args[0]))
        if kind not in _OF_REALS:
            raise NeedsStatic(f"{expr} cannot be computed in the graph")
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
        return parts[0] if len(parts) == 1 else self.emit("Concat", *parts, axis=0)

    # What most translations need

    def scalar(self, value: Any, dtype: torch.dtype) -> Val:
        """A number, a symbolic size or a Val as a Val of that dtype."""
        if isinstance(value, Val):
            return self.cast(value, dtype)
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
        out: Val = self.emit("Cast", x, outputs=[dtype], to=int(ONNX_TYPES[dtype]))
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
        out: Val = self.emit("Reshape", x, target, allowzero=1 if 0 in shape else None)
        out.shape = tuple(shape)
        return out

    def unsqueeze(self, x: Val, *axes: int) -> Val:
        """New dims of one element, at non-negative positions of the result."""
        out: Val = self.emit("Unsqueeze", x, self.const(list(axes), torch.int64))
        if x.shape is not None:
            shape = list(x.shape)
            for axis in sorted(axes):
                shape.insert(axis, 1)
            out.shape = tuple(shape)
        return out

    def squeeze(self, x: Val, *axes: int) -> Val:
        """Without the given dims of one element, at non-negative positions."""
        out: Val = self.emit("Squeeze", x, self.const(list(axes), torch.int64))
        if x.shape is not None:
            out.shape = tuple(s for i, s in enumerate(x.shape) if i not in axes)
        return out

    def transpose(self, x: Val, perm: Sequence[int]) -> Val:
        """Dims in the order `perm`."""
        if list(perm) == list(range(len(perm))):
            return x
        out: Val = self.emit("Transpose", x, perm=list(perm))
        if x.shape is not None:
            out.shape = tuple(x.shape[p] for p in perm)
        return out

    def expand(self, x: Val, shape: Sequence[Size]) -> Val:
        """`x` repeated to a shape it broadcasts to."""
        if x.shape is not None and len(x.shape) == len(shape) and all(map(same_size, x.shape, shape)):
            return x
        out: Val = self.emit("Expand", x, self.ints(shape))
        out.shape = tuple(shape)
        return out

    def full(self, shape: Sequence[Size], value: Any, dtype: torch.dtype) -> Val:
        """A tensor of one repeated value."""
        out = self.expand(self.scalar(value, dtype), shape)
        out.shape = tuple(shape)
        return out

    def slice(self, x: Val, axis: int, start: Size, end: Size, step: int = 1) -> Val:
        """Part of one dim."""
        out: Val = self.emit("Slice", x, self.ints([start]), self.ints([end]), self.ints([axis]), self.ints([step]))
        return out

    def detached(self, x: Val) -> Val:
        """`x` without gradients."""
        if not x.grad:
            return x
        out: Val = self.emit("Detach", x)
        out.shape = x.shape
        return out

    def with_gradient_of(self, x: Val, like: Val) -> Val:
        """The elements of `x`, differentiated as if they were those of `like`, which has its shape."""
        out: Val = self.emit("WithGradientOf", self.detached(x), like)
        out.shape = x.shape
        return out

    def overwrite(self, x: Val, value: Val) -> None:
        """Say that the op being translated changes its argument `x`, unseen by autograd, to `value`."""
        self.overwritten.append((x, self.detached(value)))

    def output_over(self, value: Val, given: Val) -> None:
        """Add an output that is written over the input `given`."""
        own = value.ir
        if own.producer() is None or own in self.draft.graph.outputs:  # what marks it is the value's
            own = self.emit("Identity", value).ir
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
