"""Keeps each custom `torch.autograd.Function` one node during capture, so that its own backward is used.

Tracing would see only what its forward does. While :func:`kept_whole` is active in the capturing
thread, `Function.apply` becomes one call of the op `ortmodule_c::python_call`.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_library = torch.library.Library("ortmodule_c", "FRAGMENT")
_library.define("python_call(Tensor[] tensors, int index) -> Tensor[]")
_original: Any = torch.autograd.Function.__dict__["apply"]
_calls: "weakref.WeakValueDictionary[int, PythonCall]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class PythonCall:
    """One `Function.apply` met in a capture: the class and its arguments, tensors left open."""

    def __init__(self, cls: type, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.cls = cls
        self._leaves = [None if isinstance(v, Tensor) else v for v in leaves]
        self._is_tensor = [isinstance(v, Tensor) for v in leaves]
        self._spec = spec
        self.out_spec: pytree.TreeSpec | None = None
        self.out_leaves: list[Any] = []

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply the function; the tensors it returns, in order."""
        given = iter(tensors)
        leaves = [next(given) if is_tensor else v for is_tensor, v in zip(self._is_tensor, self._leaves, strict=True)]
        out = _original.__func__(self.cls, *pytree.tree_unflatten(leaves, self._spec))
        out_leaves, self.out_spec = pytree.tree_flatten(out)
        self.out_leaves = [None if isinstance(v, Tensor) else v for v in out_leaves]
        return [v for v in out_leaves if isinstance(v, Tensor)]


def python_call(index: int) -> PythonCall:
    """The call that a `python_call` node stands for."""
    return _calls[index]


def op() -> Any:
    """The op that stands for such calls in a captured graph."""
    return torch.ops.ortmodule_c.python_call.default


@torch.library.register_fake("ortmodule_c::python_call", lib=_library)
def _fake(tensors: list[Tensor], index: int) -> list[Tensor]:
    return [t.clone() if any(t is x for x in tensors) else t for t in _calls[index](tensors)]


def _replacement(thread: int, kept: list[PythonCall]) -> Callable[..., Any]:
    def apply(cls: type, *args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        tensors = [v for v in leaves if isinstance(v, Tensor)]
        if threading.get_ident() != thread or not tensors or cls.__module__.split(".")[0] == "torch":
            return _original.__func__(cls, *args)
        call = PythonCall(cls, leaves, spec)
        kept.append(call)
        number = next(_numbers)
        _calls[number] = call
        results = iter(torch.ops.ortmodule_c.python_call(tensors, number))
        assert call.out_spec is not None
        return pytree.tree_unflatten([next(results) if v is None else v for v in call.out_leaves], call.out_spec)

    return apply


@contextlib.contextmanager
def kept_whole() -> Iterator[list[PythonCall]]:
    """Within it, custom functions applied by this thread are captured as one node each.

    Gives the list of the calls met; each is forgotten when the last reference to it goes.
    """
    kept: list[PythonCall] = []
    torch.autograd.Function.apply = classmethod(_replacement(threading.get_ident(), kept))  # type: ignore[method-assign, assignment]
    try:
        yield kept
    finally:
        torch.autograd.Function.apply = _original  # type: ignore[method-assign]
