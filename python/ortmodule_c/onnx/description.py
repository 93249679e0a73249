"""Graphs of the C core as plain objects."""

from collections.abc import Sequence
from typing import Any, NamedTuple

Type = tuple[str, tuple[int, ...]]  # such as ("f32", (2, -1)), -1 for a dim left open

# What `_C.describe` gives: the fields of a Description, its nodes and their attributes being plain tuples too.
Raw = tuple[
    list[tuple[str, Type | None, bool]],
    list[tuple[str, Type | None, int]],
    list[tuple[str, Type, bytes]],
    list[
        tuple[
            str,
            str | None,
            int,
            list[str | None],
            list[tuple[str, Type | None] | None],
            list[tuple[str, str, Any]],
        ]
    ],
    list[str],
    list[str | None],
    list[str | None],
]


class Attribute(NamedTuple):
    """Name, kind as ONNX calls it, such as ``"INTS"``, and value."""

    name: str
    kind: str
    value: Any


class Node(NamedTuple):
    """A node.

    Attributes
    ----------
    op, name
        What it is, and where it came from, if that is known.
    phase
        0 for forward, else one more than the number of the backward it belongs to.
    inputs
        Names of values, None where one is left out.
    outputs
        Names and types, None where one is left out; a type is None as long as it is not known.
    attributes
        Those given.
    """

    op: str
    name: str | None
    phase: int
    inputs: list[str | None]
    outputs: list[tuple[str, Type | None] | None]
    attributes: Sequence[Attribute]


class Description(NamedTuple):
    """A graph.

    Attributes
    ----------
    inputs
        Name, type, whether the caller may ask for its gradient.
    grads
        Of the gradients that the caller gives: name, type, number of the output.
    constants
        Name, type, the elements in row-major order.
    nodes
        In the order in which they run.
    outputs, over
        Names of the results, and for each the input that it is written over, None for the others.
    gradients
        Names. Of gradients there is one for each input, for each backward, None for one without.
    """

    inputs: list[tuple[str, Type | None, bool]]
    grads: list[tuple[str, Type | None, int]]
    constants: list[tuple[str, Type, bytes]]
    nodes: list[Node]
    outputs: list[str]
    over: list[str | None]
    gradients: list[str | None]


def described(raw: Raw) -> Description:
    """With names for what :func:`_C.describe` gives."""
    inputs, grads, constants, nodes, outputs, over, gradients = raw
    named = [
        Node(op, name, phase, taken, given, [Attribute(a, kind.upper(), value) for a, kind, value in said])
        for op, name, phase, taken, given, said in nodes
    ]
    return Description(inputs, grads, constants, named, outputs, over, gradients)


def type_text(kind: Type) -> str:
    """A type in the text form: ``"f32[2,?]"``."""
    dtype, dims = kind
    return f"{dtype}[{','.join('?' if d < 0 else str(d) for d in dims)}]"
