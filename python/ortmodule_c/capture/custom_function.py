"""Keeps each custom `torch.autograd.Function` one node during capture, so that its own backward is used.

Tracing would see only what its forward does. While :func:`kept_whole` is active in the capturing
thread, the forward of such a function is replaced by one call of the op `ortmodule_c::python_call`.
PyTorch makes the context of a call just before it looks up the forward, however `apply` was reached:
that is where the forward is exchanged.
"""

import contextlib
import itertools
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from ..errors import NotExportable, NotRunnable
from ..guards.anatomy import of_cell
from .autocast_region import around, within
from .numbers import is_number
from .reach import among, saved_tensors

_library = torch.library.Library("ortmodule_c", "FRAGMENT")
_library.define("python_call(Tensor[] tensors, int index) -> Tensor[]")
_calls: "weakref.WeakValueDictionary[int, PythonCall]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_apply: Any = Function.__dict__["apply"]


class PythonCall:
    """One application of a function met in a capture: the class and its arguments, tensors and open numbers left open.

    Attributes
    ----------
    cls
        The class of the function.
    numbers
        What stands for the numbers among the arguments that are open.
    differentiable
        Which of its results have gradients.
    saves
        Whether it saves tensors for its backward.
    saved
        Positions of the arguments, and after them of the results, that it saves.
    """

    def __init__(self, cls: Any, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.cls = cls
        self.numbers = [v for v in leaves if is_number(v)]
        self.differentiable: list[bool] = []
        self.saves = False
        self.saved: frozenset[int] = frozenset()
        self._nest = _Nest(leaves, spec)
        self._results: _Nest | None = None
        self._region = around()

    @property
    def name(self) -> str:
        """The name of the class."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[Any] | None = None) -> list[Tensor]:
        """Apply the function in the region of autocast that it was met in; the tensors it returns, in order.

        The numbers are those of the capture if not given.
        """
        traced = numbers is None
        if numbers is None:
            numbers = [v.node.term.value for v in self.numbers]
        given = self._nest.around(tensors, numbers)
        staying = _containers_stay(self.name, given) if traced else contextlib.nullcontext()
        with _exchange.suspended(), within(self._region), staying:
            leaves, spec = pytree.tree_flatten(_apply.__get__(None, self.cls)(*given))
        if not all(isinstance(v, Tensor) for v in leaves):
            for number in self.numbers:
                number.node.ask()  # as what is no tensor may follow from it
        self._results = _Nest(leaves, spec)
        results = [v for v in leaves if isinstance(v, Tensor)]
        if traced:  # in a run hooks of saved tensors may be active, which mind that one is looked at
            saved = [s for t in results if t.grad_fn is not None for s in saved_tensors(t.grad_fn)]
            self.saves |= bool(saved)
            self.saved |= among(saved, [*tensors, *results])
        return results

    def results(self, tensors: Sequence[Tensor]) -> Any:
        """What the function returned the last time, around these tensors."""
        assert self._results is not None
        return self._results.around(tensors)


class _Nest:
    """Nested values whose tensors and open numbers are left open."""

    def __init__(self, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self._plain = [None if isinstance(v, Tensor) else v for v in leaves]
        self._open = [isinstance(v, Tensor) for v in leaves]
        self._spec = spec

    def around(self, tensors: Sequence[Tensor], numbers: Sequence[Any] = ()) -> Any:
        """The values with these tensors and numbers."""
        rest, others = iter(tensors), iter(numbers)
        leaves = [
            next(rest) if is_open else next(others) if is_number(v) else v
            for is_open, v in zip(self._open, self._plain, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._spec)


def python_call(index: int) -> PythonCall:
    """The call that a `python_call` node stands for."""
    return _calls[index]


def op() -> Any:
    """The op that stands for such calls in a captured graph."""
    return torch.ops.ortmodule_c.python_call.default


@torch.library.register_fake("ortmodule_c::python_call", lib=_library)
def _fake(tensors: list[Tensor], index: int) -> list[Tensor]:
    call = _calls[index]
    with _RefuseChanges(call.name, tensors):
        results = call(tensors)
    return [t.clone() if any(t is x for x in tensors) else t for t in results]


class _RefuseChanges(TorchDispatchMode):
    """Refuses ops that change one of the tensors in place: a fake kernel sees no versions."""

    def __init__(self, name: str, tensors: list[Tensor]) -> None:
        super().__init__()
        self._name = name
        self._memory = {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else (kwargs or {}).get(argument.name)
                written = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
                if any(t.untyped_storage()._cdata in self._memory for t in written):
                    # TorchDynamo computes other gradients of it, without a word.
                    raise NotRunnable(f"{self._name} changes an argument in place")
        return func(*args, **(kwargs or {}))


class _Exchange(threading.local):
    """Exchanges, in one thread, the forwards of the functions that are applied."""

    def __init__(self) -> None:
        self.calls: list[PythonCall] | None = None  # while there is a capture
        self._grad = True  # whether gradients are wanted of the function being applied
        self._exchanged: tuple[Any, Any] | None = None  # the class whose forward is another now, and its own

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Within it functions do what they do, and their results tell which of them have gradients."""
        calls, self.calls = self.calls, None
        try:
            if calls is None:
                yield
            else:
                with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self._grad):
                    yield
        finally:
            self.calls = calls

    def starts(self, context: Any) -> None:
        """A function is being applied: it has its context, its forward is looked up next."""
        cls = context._forward_cls
        if self.calls is None:
            return
        if cls is not CheckpointFunction and cls.__module__.split(".")[0] == "torch":
            return
        self.put_back()
        self._grad = torch.is_grad_enabled()
        thread, original = threading.get_ident(), cls.forward

        def forward(*args: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args)
            self.put_back()
            if cls is CheckpointFunction:
                _refuse_reentrant(args)
            given = args[1:] if args and args[0] is context else args
            leaves, spec = pytree.tree_flatten(given, is_leaf=_is_whole)
            tensors = [v for v in leaves if isinstance(v, Tensor)]
            if any(t.requires_grad and t.is_leaf for t in tensors) and _reaches_weights(leaves):
                name = f"{cls.__module__}.{cls.__qualname__}"
                raise NotExportable(f"{name} is given weights, and an object by which its backward may find them")
            return self._call(context, PythonCall(cls, leaves, spec), tensors) if tensors else original(*args)

        self._exchanged = cls, cls.__dict__.get("forward")
        cls.forward = staticmethod(forward)

    def put_back(self) -> None:
        """Give the function being applied its own forward again."""
        if self._exchanged is not None:
            (cls, own), self._exchanged = self._exchanged, None
            if own is None:
                del cls.forward
            else:
                cls.forward = own

    def _call(self, context: Any, call: PythonCall, tensors: list[Tensor]) -> Any:
        assert self.calls is not None
        self.calls.append(call)
        number = next(_numbers)
        _calls[number] = call
        results = torch.ops.ortmodule_c.python_call(tensors, number)
        call.differentiable = [t.requires_grad for t in results]
        context.mark_non_differentiable(*[t for t in results if not t.requires_grad])
        return call.results(results)


@contextlib.contextmanager
def _containers_stay(name: str, given: Any) -> Iterator[None]:
    """Refuses a forward within it that changes a container that it is given; that is as it was, then."""
    before = [(v, v.copy()) for v in given if isinstance(v, (list, dict))]
    yield
    changed = [(v, contents) for v, contents in before if not _is_same(v, contents)]
    for container, contents in changed:
        container.clear()
        (container.update if isinstance(container, dict) else container.extend)(contents)
    if changed:
        raise NotExportable(f"{name} changes what it is given")


def _is_same(a: Any, b: Any) -> bool:
    """Whether two lists, or two dicts, hold the same objects in the same order."""
    if isinstance(a, dict):
        a, b = [*a, *a.values()], [*b, *b.values()]
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _is_whole(value: Any) -> bool:
    """Whether an argument stays the object it is: a container of neither tensors nor open numbers."""
    return isinstance(value, (list, dict)) and not any(
        isinstance(v, Tensor) or is_number(v) for v in pytree.tree_leaves(value)
    )


def _reaches_weights(arguments: Sequence[Any]) -> bool:
    """Whether a tensor that requires grad is found within what is no tensor itself, as a backward may find it."""
    seen: set[int] = set()
    waiting = [v for v in arguments if not isinstance(v, Tensor)]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        else:
            waiting += map(of_cell, getattr(value, "__closure__", None) or ())
            waiting.append(getattr(value, "__self__", None))
            with contextlib.suppress(AttributeError):  # not by `getattr`: no guard is to hold all that an object has
                waiting += object.__getattribute__(value, "__dict__").values()
    return False


def _refuse_reentrant(args: Sequence[Any]) -> None:
    """A reentrant checkpoint is not exported; nothing inside is trained if its arguments want no gradient."""
    what = "the forward uses torch.utils.checkpoint with use_reentrant=True"
    if any(isinstance(v, Tensor) and v.requires_grad for v in args):
        raise NotExportable(what)
    raise NotRunnable(f"{what} on tensors that require no gradient")


_exchange = _Exchange()


@contextlib.contextmanager
def kept_whole() -> Iterator[list[PythonCall]]:
    """Within it, custom functions applied by this thread are captured as one node each.

    Gives the list of the calls met; each is forgotten when the last reference to it goes.
    """
    inherited: Any = BackwardCFunction.__init__

    def init(context: Any, *args: Any, **kwargs: Any) -> None:
        inherited(context, *args, **kwargs)
        _exchange.starts(context)

    calls: list[PythonCall] = []
    _exchange.calls = calls
    BackwardCFunction.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        del BackwardCFunction.__init__
        _exchange.put_back()
        _exchange.calls = None
