"""What a trace would lose of a forward: refused, by name, while the forward runs."""

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import NotExportable, NotRunnable
from ..guards.policy import ASKED_OF_TENSORS
from ..guards.watch import Watch
from ..stack import is_users
from .history import VIEWS_OR_COPIES
from .numbers import tensor_of_number

# Dropouts, and how they call the flag of training.
_KINDS = ("dropout", "alpha_dropout", "feature_alpha_dropout")
_DROPOUTS: dict[Any, str] = {
    **{getattr(torch, n + in_place): "train" for n in (*_KINDS, "feature_dropout") for in_place in ("", "_")},
    **{getattr(F, n): "training" for n in (*_KINDS, "dropout1d", "dropout2d", "dropout3d")},
}
# What autograd and Python's side know of a tensor, which is not that of the one that stands for it in a trace.
_UNKNOWN = {
    **dict.fromkeys(("grad", "_version", "output_nr"), NotExportable),
    **dict.fromkeys(ASKED_OF_TENSORS, NotRunnable),
}
# What else than a tensor may be asked of one: it is so for all that a graph is for, or cannot be known of a trace.
_KNOWN = frozenset(
    {
        *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "is_same_size"),
        *("dtype", "element_size", "itemsize", "nbytes", "type", "result_type", "is_floating_point", "is_complex"),
        *("is_signed", "device", "get_device", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "layout"),
        *("is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested", "requires_grad"),
        *("is_contiguous", "stride", "equal", "allclose", "is_nonzero", "item", "tolist", "numpy", "__array__"),
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "data_ptr"),
        *("__setitem__", "backward", "__set__", "__delete__", "_assert"),
    }
)
_GRAD: Any = Tensor.grad
_EFFECTS = {
    **{
        hook: "registers a hook on a tensor"
        for hook in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
    },
    Tensor.retain_grad: "retains the gradient of a tensor",
    _GRAD.__set__: "sets the gradient of a tensor",
    _GRAD.__delete__: "deletes the gradient of a tensor",
}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_LAYOUT = (Tensor.is_contiguous, Tensor.stride)
_VIEWS_OR_COPIES = frozenset(
    getattr(space, name) for space in (Tensor, torch) for name in VIEWS_OR_COPIES if hasattr(space, name)
)
_BY_MEMORY = frozenset(
    getattr(space, name)
    for space in (Tensor, torch)
    for name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
    if hasattr(space, name)
)
_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
SETS_REQUIRES_GRAD = "the forward sets requires_grad of a tensor"
_LEAVES = frozenset({bool, int, float, str, torch.dtype, torch.device, slice, type(Ellipsis)})

_SEEN_BY_PYTORCH = frozenset({"requires_grad", "data", "grad"})  # setters that are functions of PyTorch


@contextlib.contextmanager
def nothing_lost(watch: Watch, arguments: Sequence[Tensor]) -> Iterator[None]:
    """Refuses what the forward that runs within it does besides computing with its arguments and its own tensors."""
    with (
        _RefuseStrangers(watch, arguments),
        _no_seeding(watch),
        _no_graph_of_gradients(watch),
        _no_saving_hooks(watch),
        _no_attributes(watch),
    ):
        yield


class _Generator:
    """PyTorch's generator for what is traced: it may be drawn from but not set, which no graph would do."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name == "initial_seed":
            self._refuse()
        return getattr(torch.default_generator, name)

    def manual_seed(self, seed: int) -> Any:
        self._refuse()
        return torch.default_generator.manual_seed(seed)

    def seed(self) -> int:
        self._refuse()
        return torch.default_generator.seed()

    def set_state(self, state: Tensor) -> Any:
        # PyTorch's tracer itself puts back a state that is unchanged, as nothing is drawn while it traces.
        forked = sys._getframe(2).f_code.co_name == "fork_rng"
        if forked or not torch.equal(state, torch.default_generator.get_state()):
            self._refuse()
        return torch.default_generator.set_state(state)

    def _refuse(self) -> None:
        if threading.get_ident() == self._thread:
            self._watch.refuse(
                "the forward seeds PyTorch's random numbers, asks for their seed or puts back their state"
            )


@contextlib.contextmanager
def _no_seeding(watch: Watch) -> Iterator[None]:
    generator = torch.random.default_generator
    torch.random.default_generator = _Generator(watch)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = generator


def leaves_alone(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is a dropout that gives back its first argument in eager; a trace would have a copy."""
    if function not in _DROPOUTS or not args:
        return False
    given = {**dict(zip(("input", "p", _DROPOUTS[function]), args, strict=False)), **kwargs}
    p, training = given.get("p", 0.5), given.get(_DROPOUTS[function], True)
    return bool(p == 0 or (not training and 0 < p <= 1))


@contextlib.contextmanager
def _no_graph_of_gradients(watch: Watch) -> Iterator[None]:
    """Within it a forward does not ask for gradients that are differentiated again: no part of a graph can be."""
    run, thread = torch.autograd._engine_run_backward, threading.get_ident()

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and args[3]:
            watch.refuse("the forward asks for gradients with create_graph=True", NotRunnable)
        return run(*args, **kwargs)

    torch.autograd._engine_run_backward = refusing
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run


@contextlib.contextmanager
def _no_saving_hooks(watch: Watch) -> Iterator[None]:
    """Refuses that this thread sets hooks on what autograd saves: a graph would save what it needs without them."""
    enter, thread = saved_tensors_hooks.__enter__, threading.get_ident()

    def refuse(hooks: saved_tensors_hooks) -> None:
        if threading.get_ident() == thread:
            watch.refuse("the forward sets hooks on saved tensors, as a checkpoint does")
        enter(hooks)

    saved_tensors_hooks.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


@contextlib.contextmanager
def _no_attributes(watch: Watch) -> Iterator[None]:
    """Within it a forward sets no attributes of tensors, which stand-ins would have."""
    plain, thread = object.__setattr__, threading.get_ident()

    def write(owner: Tensor, name: str, value: Any) -> None:
        ours = threading.get_ident() == thread and is_users(sys._getframe(1))
        if ours and name not in _SEEN_BY_PYTORCH:
            watch.refuse(f"the forward sets attribute {name} of a tensor")
        plain(owner, name, value)

    type.__setattr__(Tensor, "__setattr__", write)
    try:
        yield
    finally:
        type.__delattr__(Tensor, "__setattr__")


class _RefuseStrangers(TorchFunctionMode):
    """Refuses what a trace would lose: tensors made outside the module that require grad, hooks, inference mode."""

    def __init__(self, watch: Watch, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self._watch = watch
        self._memory = {t.untyped_storage()._cdata for t in arguments}
        self._made: dict[int, Tensor] = {}  # from what is held
        self._inference = torch.is_inference_mode_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA:
            return args[0].detach()
        if leaves_alone(func, args, kwargs or {}):
            return args[0]
        made = tensor_of_number(func, args, kwargs or {})
        if made is not None:
            return made
        self._watch.asks_layout |= func in _LAYOUT or func in _BY_MEMORY
        if func in _BY_MEMORY and isinstance(args[0], Tensor) and args[0].untyped_storage()._cdata in self._memory:
            self._watch.refuse("the forward asks by as_strided where an argument lies in memory", NotRunnable)
        if func in _VIEWS_OR_COPIES and args and isinstance(args[0], Tensor):
            self._watch.asks_looseness |= args[0].untyped_storage()._cdata in self._memory
        if func in _EFFECTS:
            self._watch.refuse(f"the forward {_EFFECTS[func]}")
        if torch.is_inference_mode_enabled() != self._inference:
            self._watch.refuse("the forward enters inference mode")
        if func in (Tensor.requires_grad_, _REQUIRES_GRAD) and args[0].requires_grad != (*args, True)[1]:
            if type(args[0]) in (Tensor, nn.Parameter):  # no stand-in
                self._watch.refuse(SETS_REQUIRES_GRAD)
            self._watch.asked[args[0].untyped_storage()._cdata] = args[0]
        if self._watch.asked and torch.is_grad_enabled():
            self._watch.refuse(SETS_REQUIRES_GRAD)
        called = any(map(callable, args))  # it may call the user's code
        watching = not called and self._watch.frames.pause()
        try:
            result = self._run(func, args, kwargs or {})
        finally:
            if watching:
                self._watch.frames.resume()
        if result is (*args, None)[0] and (func is Tensor.contiguous or "memory_format" in (kwargs or {})):
            self._watch.not_copied.add(result.untyped_storage()._cdata)
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        known = name in _KNOWN or (name not in _UNKNOWN and any(isinstance(t, Tensor) for t in _tensors(result)))
        if not known and is_users(_caller(sys._getframe(1))):
            self._watch.refuse(f"the forward asks for {name} of a tensor", _UNKNOWN.get(name, NotExportable))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        outside = [t for t in _tensors((args, kwargs)) if type(t) in (Tensor, nn.Parameter)]
        name = getattr(func, "__name__", "")
        for t in outside:
            if t.requires_grad and name != "__get__":
                self._watch.refuse(
                    f"the forward uses a tensor of shape {tuple(t.shape)} that requires grad "
                    "and is neither an argument nor a registered parameter"
                )
            if id(t) not in self._watch.tensors and id(t) not in self._made:
                self._watch.refuse(f"it is not known where the forward has a tensor of shape {tuple(t.shape)} from")
        changes = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__setitem__"))
        if outside and id((*args, None)[0]) in {id(t) for t in outside if changes}:
            self._watch.refuse(f"the forward changes a tensor of shape {tuple(args[0].shape)}, no buffer, in place")
        result = func(*args, **kwargs)
        if not outside:
            return result
        results = [t for t in _tensors(result) if isinstance(t, Tensor)]
        made = {id(t): t for t in results if type(t) in (Tensor, nn.Parameter)}
        if made or not results:
            for t in outside:
                self._watch.hold_value(t)
        self._made.update(made)
        return result


def _caller(frame: FrameType) -> FrameType:
    """Who calls a function of PyTorch's, which may be one of Python that asks for this first."""
    if frame.f_code.co_name == "handle_torch_function" and frame.f_back is not None and frame.f_back.f_back is not None:
        return frame.f_back.f_back
    return frame


def _tensors(value: Any) -> list[Tensor]:
    """Those in a nest; most calls have none but their arguments."""
    if type(value) in (tuple, list):
        return [t for v in value for t in _tensors(v)]
    if type(value) is dict:
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, Tensor):
        return [value]
    if value is None or type(value) in _LEAVES:
        return []
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def check_attributes(watch: Watch, given: Sequence[Tensor], made: Any) -> None:
    """What Python knows of a tensor is not known of the one that stands for it, and lost if it is set."""
    for t in [*given, *watch.tensors.values()]:
        for name in vars(t).keys() & watch.names:
            raise NotExportable(f"the forward may ask for attribute {name} of a tensor of shape {tuple(t.shape)}")
    for t in pytree.tree_leaves(made):
        for name in vars(t).keys() & watch.stored if isinstance(t, Tensor) else ():
            raise NotExportable(f"the forward sets attribute {name} of a tensor of shape {tuple(t.shape)}")
