"""Nested inputs and outputs as a list of tensors and a description of the rest.

The description (:class:`Spec` is a nested tuple) is hashable, compares by value, and rebuilds the
nest around other tensors. It is the part of a call's signature that is not about tensors.
"""

import enum
import functools
import pickle
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

Spec = tuple[Any, ...]

_TENSOR: Spec = ("tensor",)
_ANY = torch.empty(0)
_PLAIN = (
    bool,
    int,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type,
    enum.Enum,
)
_NUMBERS = (float, complex, numpy.generic)
_CONTAINERS = frozenset({list, tuple, dict})
_OF_PYTHON = 1 << 9  # of a class's flags: made by a `class` statement
_OPAQUE = (torch.nn.Module, torch.Generator, types.ModuleType)
_LEAVES = ("tensor", "size", "real")
_OPENED = {"plain": int, "packed": float}  # numbers that a graph may leave open


class StandIn:
    """What stands for a number of Python's in a trace, so that a graph may take another one.

    Attributes
    ----------
    kind
        How it is described.
    """

    kind: str


def flatten(value: Any) -> tuple[list[Tensor], Spec]:
    """Split a nest of containers into its tensors, in order, and the description of the nest.

    Raises
    ------
    TypeError
        For an object that is neither a container nor plain, and for a nest that contains itself.
    """
    leaves: list[Any] = []
    return leaves, _describe(value, leaves, ())


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Spec]:
    """:func:`flatten` of the arguments of a call, most of which are tensors."""
    values = [*args, *kwargs.values()]
    if {*map(type, values)} <= {Tensor} and {*map(type, kwargs)} <= {str}:
        return values, _of_tensors(len(args), tuple(kwargs))
    return flatten((args, kwargs))


@functools.lru_cache(maxsize=1024)
def _of_tensors(n: int, names: tuple[str, ...]) -> Spec:
    """The description of a call that is given nothing but tensors: so many, and some by these names."""
    return flatten(((_ANY,) * n, dict.fromkeys(names, _ANY)))[1]


def unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    """Rebuild a nest around `leaves`."""
    return _BUILD[spec[0]](spec, leaves)


def leaf_paths(spec: Spec, path: str = "") -> list[str]:
    """Where each tensor lies in the nest, such as ``['labels'][0]``, for messages."""
    if spec[0] in _LEAVES:
        return [path]
    return [p for inner, child in _children(spec, path) for p in leaf_paths(child, inner)]


def numbers_by_path(spec: Spec, path: str = "") -> list[tuple[str, Any]]:
    """Where the numbers lie in the nest, and which they are."""
    if spec[1:2] == (_OPENED.get(spec[0]),):
        return [(path, pickle.loads(spec[2]) if spec[0] == "packed" else spec[2])]
    children = _children(spec, path) if spec[0] != "sequence" or spec[1] not in (slice, range) else []
    return [n for inner, child in children for n in numbers_by_path(child, inner)]


def with_numbers(spec: Spec, values: Iterator[Any]) -> Spec:
    """The description with its numbers left open where the next value is ``...``, or another object in their place.

    None leaves one as it is.
    """
    kind, *rest = spec
    if spec[1:2] == (_OPENED.get(kind),) or kind == "number":
        value = next(values)
        return spec if value is None else ("number", rest[0]) if value is ... else ("plain", type(value), value)
    if kind not in ("sequence", "mapping", "object") or rest[0] in (slice, range):
        return spec
    return (*spec[:-1], tuple([with_numbers(child, values) for child in rest[-1]]))


def plain_leaves(spec: Spec) -> list[Any]:
    """What is no tensor and no container in a described nest, and the classes of its objects."""
    kind, *rest = spec
    if kind == "plain":
        return [rest[-1]]
    if kind in (*_LEAVES, "packed", "number"):
        return []
    return [rest[0], *[leaf for child in rest[-1] for leaf in plain_leaves(child)]]


def first_difference(a: Spec, b: Spec, path: str = "") -> str | None:
    """Where two descriptions first differ, as :func:`leaf_paths` writes it; None if they are equal."""
    if a == b:
        return None
    inside, others = _children(a, path), _children(b, path)
    if not inside or a[:-1] != b[:-1] or len(inside) != len(others):
        return path
    differences = (first_difference(x, y, inner) for (inner, x), (_, y) in zip(inside, others, strict=True))
    return next(d for d in differences if d is not None)


def _children(spec: Spec, path: str) -> list[tuple[str, Spec]]:
    """What is nested in it, each with where it lies."""
    kind, *rest = spec
    if kind in (*_LEAVES, "plain", "packed", "number"):
        return []
    *_, names, children = rest
    form = ".{}" if kind == "object" else "[{!r}]"
    keys = names if names is not None else range(len(children))
    return [(path + form.format(k), c) for k, c in zip(keys, children, strict=True)]


def _describe(value: Any, leaves: list[Any], parents: tuple[int, ...]) -> Spec:
    if isinstance(value, Tensor):
        leaves.append(value)
        return _TENSOR
    cls = type(value)
    if cls not in _CONTAINERS:
        if isinstance(value, StandIn):
            leaves.append(value)
            return (value.kind,)
        if isinstance(value, torch.SymInt):
            leaves.append(value)
            return ("size",)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise TypeError("a number that depends on the elements of a tensor leaves the forward")
        if isinstance(value, _NUMBERS):  # NaN must equal itself and -0.0 must differ from 0.0
            return ("packed", cls, pickle.dumps(value), repr(value))
        if isinstance(value, _PLAIN):
            return ("plain", cls, value)
    if id(value) in parents:
        raise TypeError(f"an argument of type {type(value).__name__} contains itself")
    parents = (*parents, id(value))
    if cls not in _CONTAINERS and isinstance(value, (list, tuple, dict)) and _has_attributes(value):
        raise TypeError(f"a {cls.__name__} that has attributes cannot be given to a graph")
    if isinstance(value, (list, tuple)):
        return ("sequence", cls, None, tuple([_describe(v, leaves, parents) for v in value]))
    if isinstance(value, dict):
        return (
            "mapping",
            cls,
            (getattr(value, "default_factory", None), _exact(value)),
            tuple(value),
            tuple([_describe(v, leaves, parents) for v in value.values()]),
        )
    if isinstance(value, (slice, range)):
        return (
            "sequence",
            cls,
            None,
            tuple([_describe(v, leaves, parents) for v in (value.start, value.stop, value.step)]),
        )
    if isinstance(value, (set, frozenset)):
        return ("plain", cls, _exact(value), frozenset(value) if isinstance(value, set) else value)
    if callable(value) and not isinstance(value, _OPAQUE) and _compares_as_itself(cls):
        return ("plain", cls, value)
    fields = fields_of(value)
    if fields is None:
        raise TypeError(f"objects of type {cls.__module__}.{cls.__qualname__} cannot be given to a graph")
    return ("object", cls, tuple(fields), tuple([_describe(v, leaves, parents) for v in fields.values()]))


def fields_of(value: Any) -> dict[str, Any] | None:
    """What an object is made of, if that is its dictionary alone."""
    fields: dict[str, Any] | None = getattr(value, "__dict__", None)
    if fields is None or isinstance(value, _OPAQUE) or callable(value) or not _has_dict_only(type(value)):
        return None
    return fields


def _exact(values: Any) -> Any:
    """What tells hashable values apart that are equal; nothing for strings, which most keys are."""
    if set(map(type, values)) <= {str}:
        return None
    exact = [(type(v), _exact(v) if isinstance(v, (tuple, frozenset)) else _written(v)) for v in values]
    if any(not isinstance(v, (*_PLAIN, *_NUMBERS)) and not _compares_as_itself(type(v)) for v in values):
        raise TypeError("keys or elements that may be equal without being the same cannot be given to a graph")
    return frozenset(exact) if isinstance(values, (set, frozenset)) else tuple(exact)


def _written(value: Any) -> str | None:
    return repr(value) if isinstance(value, (int, *_NUMBERS)) else None


def _compares_as_itself(cls: type) -> bool:
    return cls.__eq__ is object.__eq__ or cls.__module__ in ("builtins", "functools", "types")


def _has_dict_only(cls: type) -> bool:
    """Whether its instances are made of their dictionary alone."""
    return all(c is object or (not vars(c).get("__slots__") and c.__flags__ & _OF_PYTHON) for c in cls.__mro__)


def _has_attributes(container: Any) -> bool:
    """Whether a container has attributes, other than those of a dataclass that are its items too."""
    attributes = getattr(container, "__dict__", None)
    return bool(attributes) and not hasattr(type(container), "__dataclass_fields__")


def _plain(spec: Spec, _leaves: Iterator[Any]) -> Any:
    return set(spec[-1]) if spec[1] is set else spec[-1]


def _sequence(spec: Any, leaves: Iterator[Any]) -> Any:
    _, cls, _, children = spec
    values = [unflatten(c, leaves) for c in children]
    if hasattr(cls, "_make"):
        return cls._make(values)
    if cls in (slice, range):
        return cls(*values)
    return values if cls is list else cls(values)


def _mapping(spec: Any, leaves: Iterator[Any]) -> Any:
    _, cls, (factory, _), names, children = spec
    items = {n: unflatten(c, leaves) for n, c in zip(names, children, strict=True)}
    if cls is dict:
        return items
    if issubclass(cls, defaultdict):
        return cls(factory, items)
    # Hugging Face's ModelOutput is a dataclass, others take a mapping.
    return cls(**items) if hasattr(cls, "__dataclass_fields__") else cls(items)


def _object(spec: Any, leaves: Iterator[Any]) -> Any:
    _, cls, names, children = spec
    value = cls.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(value, name, unflatten(child, leaves))
    return value


_BUILD: dict[str, Callable[[Any, Iterator[Any]], Any]] = {
    "tensor": lambda _spec, leaves: next(leaves),
    "size": lambda _spec, leaves: int(next(leaves)),
    "real": lambda _spec, leaves: float(next(leaves)),
    "plain": _plain,
    "packed": lambda spec, _leaves: pickle.loads(spec[2]),
    "sequence": _sequence,
    "mapping": _mapping,
    "object": _object,
}
