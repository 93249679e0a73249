"""What TorchDynamo's guards do not tell apart of a call's arguments."""

import pickle
import types
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy
from torch.utils._pytree import tree_leaves

from ..flatten import Spec, flatten, plain_leaves
from .anatomy import has_negative_zero, is_taken_for_its_base
from .held import BY_VALUE

_SEEN = {("packed", cls) for cls in (float, *numpy.sctypeDict.values())}  # but for the sign of zero
_PLAIN = BY_VALUE - {types.MethodType}
_NESTS = ("sequence", "mapping", "object")


class Given(NamedTuple):
    """The arguments of a call, but for tensors and what Dynamo compares as it is.

    Attributes
    ----------
    key
        Different for calls that Dynamo takes for alike, though they may not be.
    objects
        What is in them that is told apart by identity, and classes; what these lead to has to be held.
    missed
        What is in them that Dynamo takes for something else, or nothing.
    """

    key: tuple[Hashable, ...]
    objects: list[Any]
    missed: str


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """Look at the arguments of a call."""
    key: list[Hashable] = []
    objects: list[Any] = []
    missed = ""
    for value in (*args, *kwargs.values()):
        if holds_array(value):  # which for it is a tensor
            missed = "an argument is an array of NumPy"
            continue
        try:
            leaves, spec = flatten(value)
        except TypeError:  # nothing describes it
            key.append(id(value))
            objects.append(value)
            continue
        # Of a tensor's attributes Dynamo does not guard that one is not there, if that is met as an error.
        carried = [  # but for Dynamo's own
            (i, *sorted(n for n in t.__dict__ if "_dynamo" not in n)) for i, t in enumerate(leaves) if t.__dict__
        ]
        key += [part for part in carried if len(part) > 1]
        objects += [leaf for leaf in plain_leaves(spec) if type(leaf) not in _PLAIN]
        parts = [*_told_apart(spec)]
        key += [part for part in parts if part[:2] not in _SEEN]
        for cls in _classes(spec):
            if is_taken_for_its_base(cls):
                missed = f"an argument is a {cls.__qualname__}, which does not compute as its base does"
        if any(part[0] == "packed" and has_negative_zero(pickle.loads(part[2])) for part in parts):
            missed = "an argument is -0.0"
    return Given(tuple(key), objects, missed)


def holds_array(arguments: Any) -> bool:
    """Whether an array of NumPy is among them."""
    return any(isinstance(leaf, numpy.ndarray) for leaf in tree_leaves(arguments))


def _classes(spec: Spec) -> Iterator[Any]:
    """Those of what a described argument consists of, but for some that have no others."""
    kind, *rest = spec
    if kind == "packed" or kind in _NESTS:
        if rest[0] not in _PLAIN:
            yield rest[0]
        for child in rest[-1] if kind in _NESTS else ():
            yield from _classes(child)


def _told_apart(spec: Spec) -> Iterator[Spec]:
    """The parts of a described argument that Dynamo compares by `==`, not as deep, or by parts only."""
    kind, cls, *rest = (*spec, None)
    if kind == "packed" or (kind == "plain" and cls not in _PLAIN) or cls in (slice, range):
        yield spec
    elif kind in _NESTS:
        if kind == "mapping":
            yield ("keys", rest[0])
        for child in spec[-1]:
            yield from _told_apart(child)
