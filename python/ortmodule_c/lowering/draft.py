"""The graph under construction: inputs, constants, nodes, names.

A :class:`Val` is a value of that graph together with what translations ask of it. Sizes may be
symbolic: they are `torch.SymInt`.
"""

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy
import torch
from torch import Tensor

from ..capture.numbers import Term
from ..dtypes import CARRIERS, DTYPES, encoded
from ..errors import NeedsStatic, Unsupported
from ..symbolic import hint

OWN_DOMAIN = "ai.ortmodule_c"
OPSET = 20
OWN_OPSET = 1
MAX_RANK = 8
GRAD = "ortmodule_c.grad"  # metadata of inputs whose gradient may be asked for
OVER = "ortmodule_c.over"  # of outputs that are written over an input: its name

Size = int | torch.SymInt
Shape = tuple[Size, ...]
Type = tuple[str, tuple[int, ...]]  # as the C core has it

ONNX_TYPES = {dtype: ir.DataType[name] for dtype, (_, name) in DTYPES.items()}
TORCH_DTYPES = {onnx: dtype for dtype, onnx in ONNX_TYPES.items()}


def dtype_text(dtype: torch.dtype) -> str:
    """``"f32"`` for ``torch.float32``; Unsupported if the core has no such dtype."""
    if dtype not in DTYPES:
        raise Unsupported(f"dtype {dtype} is not known to the C core")
    return DTYPES[dtype][0]


class Val:
    """A value of the graph.

    Parameters
    ----------
    value
        The value in the ONNX graph.
    dtype
        Its element type.
    example
        Its shape in the call that is exported for, which the C core has found or PyTorch has told.
    shape
        Its shape in any call, where PyTorch or a translation has told; else None.
    grad
        What autograd would go through from it, see :mod:`.ancestry`; 0 if it does not require grad.

    Attributes
    ----------
    elements
        Those of integers in the call that is exported for, where they are known.
    """

    __slots__ = ("_shape", "dtype", "elements", "example", "grad", "ir")

    def __init__(
        self, value: ir.Value, dtype: torch.dtype, example: tuple[int, ...], shape: Shape | None = None, grad: int = 0
    ) -> None:
        self.ir = value
        self.dtype = dtype
        self.example = example
        self.elements: Tensor | None = None
        self.grad = grad
        self.shape = shape

    @property
    def shape(self) -> Shape | None:
        """The shape in any call, if it is known."""
        return self._shape

    @shape.setter
    def shape(self, shape: Shape | None) -> None:
        self._shape = shape
        if shape is not None:
            held = carried_as(self.dtype, shape)[1]
            self.ir.shape = ir.Shape([d if isinstance(d, int) else str(d.node.expr) for d in held])

    @property
    def dims(self) -> Shape:
        """The shape, where it must be known."""
        assert self.shape is not None, f"the sizes of {self.ir.name} are not known"
        return self.shape

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.example)

    @property
    def type(self) -> Type:
        """As the C core is asked about it."""
        dtype, sizes = carried_as(self.dtype, self.example)
        return dtype_text(dtype), sizes

    def with_grad(self, grad: int) -> "Val":
        """The same value, from which autograd would go elsewhere."""
        val = Val(self.ir, self.dtype, self.example, self.shape, grad)
        val.elements = self.elements
        return val


class Carried(Val):
    """A value of a dtype that the core holds as another: of complex numbers the pairs, along a dim behind all others.

    To move its elements is to move those of its carrier; what computes with it is written for that, or runs in PyTorch.

    Parameters
    ----------
    carrier
        The value that the core has.
    dtype
        Its own dtype.
    """

    __slots__ = ()

    def __init__(self, carrier: Val, dtype: torch.dtype) -> None:
        n = carrier.rank - dtype.is_complex
        shape = None if carrier.shape is None else carrier.shape[:n]
        super().__init__(carrier.ir, dtype, carrier.example[:n], shape, carrier.grad)

    @property
    def carrier(self) -> Val:
        """The value that the core has."""
        dtype, sizes = carried_as(self.dtype, self.example)
        shape = None if self.shape is None else carried_as(self.dtype, self.shape)[1]
        return Val(self.ir, dtype, sizes, shape, self.grad)

    def with_grad(self, grad: int) -> "Carried":
        """The same value, from which autograd would go elsewhere."""
        return Carried(self.carrier.with_grad(grad), self.dtype)


def carried_as(dtype: torch.dtype, shape: tuple[Any, ...]) -> tuple[torch.dtype, tuple[Any, ...]]:
    """The dtype and shape of what the core has for a tensor."""
    return CARRIERS.get(dtype, dtype), (*shape, 2) if dtype.is_complex else tuple(shape)


def static(size: Size) -> int:
    """A size that has to be a number at export."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        if not expr.is_Integer:
            raise NeedsStatic(f"size {expr} has to be known at export")
        return int(expr)
    return int(size)


def example(size: Size) -> int:
    """A size in the call that is exported for."""
    number = hint(size)
    if number is None:
        raise NeedsStatic(f"size {size} depends on values")
    return int(number)


def type_of(t: Tensor) -> Type:
    """What PyTorch says of a tensor, in the call that is exported for, as the core has it."""
    dtype, sizes = carried_as(t.dtype, tuple(t.shape))
    return dtype_text(dtype), tuple(map(example, sizes))


def check_sizes(result: Any, expected: Any) -> None:
    """Assert that the results of a translation have the sizes that PyTorch says."""
    if isinstance(result, Val) and isinstance(expected, Tensor):
        _, given = result.type
        _, sizes = type_of(expected)
        assert given == sizes, f"it gives sizes {given}, and PyTorch {sizes}"
    elif isinstance(result, (list, tuple)) and isinstance(expected, (list, tuple)):
        for r, e in zip(result, expected, strict=True):
            check_sizes(r, e)


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every binding of the symbols; adds no guard."""
    return sympy.sympify(getattr(getattr(a, "node", None), "expr", a)) == sympy.sympify(
        getattr(getattr(b, "node", None), "expr", b)
    )


class Draft:
    """Graph under construction.

    Attributes
    ----------
    symbols
        Where a symbolic size can be read: an input and one of its axes.
    sizes
        What was computed of sizes so far.
    numbers
        What it is given of numbers of Python's.
    """

    def __init__(self, provider: str = "cpu") -> None:
        self.provider = provider
        self.graph = ir.Graph([], [], nodes=[], name="main", opset_imports={"": OPSET, OWN_DOMAIN: OWN_OPSET})
        self.symbols: dict[sympy.Symbol, tuple[Val, int]] = {}
        self.sizes: dict[sympy.Expr, Val] = {}
        self.numbers: dict[Term, Val] = {}
        self._names: set[str] = set()
        self._constants: dict[tuple[Any, ...], Val] = {}
        self._subsequences = 0

    def name(self, wanted: str) -> str:
        """A unique name of allowed characters."""
        base = re.sub(r"[^A-Za-z0-9_.:/-]", "_", wanted) or "v"
        name, n = base, 1
        while name in self._names:
            name, n = f"{base}_{n}", n + 1
        self._names.add(name)
        return name

    def value(
        self, name: str, dtype: torch.dtype, example: tuple[int, ...], shape: Shape | None = None, grad: int = 0
    ) -> Val:
        """A value without a producer so far."""
        if dtype in CARRIERS:
            carrier, sizes = carried_as(dtype, example)
            held = None if shape is None else carried_as(dtype, shape)[1]
            return Carried(self.value(name, carrier, sizes, held, grad), dtype)
        dtype_text(dtype)
        value = ir.Value(name=self.name(name), type=ir.TensorType(ONNX_TYPES[dtype]))
        if len(example) > MAX_RANK:
            raise Unsupported(f"rank {len(example)} is above {MAX_RANK}")
        return Val(value, dtype, example, shape, grad if dtype.is_floating_point else 0)

    def input(self, name: str, dtype: torch.dtype, shape: Shape, grad: bool) -> Val:
        """Add a graph input; its symbolic dims become known sizes."""
        val = self.value(name, dtype, tuple(map(example, shape)), shape, grad << len(self.graph.inputs))
        if grad:
            val.ir.metadata_props[GRAD] = "1"
        self.graph.inputs.append(val.ir)
        for axis, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self.symbols.setdefault(size.node.expr, (val, axis))
        return val

    def number(self, term: Term) -> Val:
        """What Python computes of numbers, an input after all others."""
        if term not in self.numbers:
            dtype = torch.float64 if type(term.value) is float else torch.int64
            self.numbers[term] = self.input("number", dtype, (), False)
        return self.numbers[term]

    def tensor(self, data: Tensor, name: str = "const") -> Val:
        """A constant with the elements of a tensor, which is kept and must not change."""
        val = self.value(name, data.dtype, tuple(data.shape), tuple(data.shape))
        data = encoded(data.detach()).contiguous()
        val.ir.const_value = ir.tensor_adapters.TorchTensor(data, name=val.ir.name)
        val.elements = data if data.dtype == torch.int64 and data.dim() <= 1 else None
        self.graph.initializers.add(val.ir)
        return val

    def const(self, data: Any, dtype: torch.dtype) -> Val:
        """A small constant: a number or a (nested) list of numbers; equal ones are shared.

        Unsupported if it has no such element: what PyTorch makes of that depends on the op.
        """
        key = (np.asarray(data).tobytes(), np.shape(data), np.asarray(data).dtype.str, dtype)
        if key not in self._constants:
            try:
                elements = torch.tensor(data, dtype=dtype)
            except (RuntimeError, OverflowError) as error:
                raise Unsupported(f"{data} is not within the range of {dtype}") from error
            self._constants[key] = self.tensor(elements, "c")
        return self._constants[key]

    def mark(self) -> int:
        """A point to which :meth:`rollback` can return."""
        return len(self.graph)

    def rollback(self, mark: int) -> None:
        """Take back the nodes added since `mark`."""
        nodes = list(self.graph)[mark:]
        for node in reversed(nodes):
            self.graph.remove(node, safe=True)
        gone = {id(v) for node in nodes for v in node.outputs}
        self.sizes = {k: v for k, v in self.sizes.items() if id(v.ir) not in gone}

    def subsequence(self) -> int:
        """A number no other random node of the graph has."""
        self._subsequences += 1
        return self._subsequences
