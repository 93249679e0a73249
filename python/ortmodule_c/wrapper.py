"""A module around a module: hooks, signature, attributes and registries are those of what is wrapped."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .arguments import are_same, sources_of
from .bytecode import code_of
from .methods import ITSELF, called_on_self, looks_into_self
from .process import tracing

# What nn.Module defines for one call of one object, or to list the modules, of which the wrapper is one: its own. All
# else is done to its module.
_OF_A_CALL = frozenset(
    (
        "_call_impl",
        "_get_backward_hooks",
        "_get_backward_pre_hooks",
        "_maybe_warn_non_full_backward_hook",
        "_slow_forward",
        "_wrapped_call_impl",
        "modules",
        "register_backward_hook",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    )
)
SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set",
)
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name and name not in SHARED)
OWN_PREFIX = "_ort_"


class _Forward:
    """`forward` as any class has it; taken from a wrapper it has the signature of its module's."""

    def __get__(self, wrapper: Wrapper | None, _cls: type | None = None) -> Callable[..., Any]:
        if wrapper is None:
            return _forward
        if torch.compiler._is_exporting_flag and torch.compiler.is_dynamo_compiling():  # Dynamo knows no MethodType
            return wrapper._ort_module.forward
        return types.MethodType(wrapper._ort_signed(), wrapper)


class Wrapper(nn.Module):
    """A module around a module, which behaves as that one does but for running it, which is up to a subclass.

    It is an instance of the module's class too, as `isinstance` and ``__class__`` tell it; `type` tells it apart.

    Parameters
    ----------
    module
        What is wrapped. Its parameters, buffers and submodules stay its own, under the same names.
    """

    _ort_added: frozenset[str]  # names that a module has not

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        public = {name for name in dir(cls) if not name.startswith("_")}
        cls._ort_added = frozenset(public - {*dir(nn.Module), "training"})

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["_ort_module"] = module
        super().__init__()
        self._ort_forward: tuple[Sequence[Any], Callable[..., Any]] = ((), _forward)
        for registry in SHARED:
            self.__dict__[registry] = getattr(module, registry)
        self._ort_ready = True

    def _ort_state(self) -> dict[str, Any]:
        """What is the wrapper's and not its module's, but for what runs it: hooks, and methods that it was given."""
        return {n: v for n, v in self.__dict__.items() if n not in SHARED and not n.startswith(OWN_PREFIX)}

    def _ort_take_over(self, wrapper: Wrapper) -> None:
        """Have what another wrapper of the module has: the same hooks, so that who has registered one can remove it."""
        for name, value in wrapper._ort_state().items():
            bound = isinstance(value, types.MethodType) and value.__self__ is wrapper
            self.__dict__[name] = types.MethodType(value.__func__, self) if bound else value

    def _ort_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward."""
        raise NotImplementedError

    forward = _Forward()

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hooks of the wrapper around its forward. Where all modules have hooks, the module runs all."""
        if not _has_any_global_hook():
            return super()._call_impl(*args, **kwargs)
        own = {name: self.__dict__[name] for name in _HOOKS if self.__dict__[name]}
        if not own:
            return self.forward(*args, **kwargs)
        with tracing:
            if not _has_any_global_hook():  # it was another thread's trace that had them
                return super()._call_impl(*args, **kwargs)
            module = self._ort_module.__dict__
            before = {name: module[name] for name in own}
            module.update({name: OrderedDict([*before[name].items(), *hooks.items()]) for name, hooks in own.items()})
            try:
                return self.forward(*args, **kwargs)
            finally:
                module.update(before)

    def _ort_signed(self) -> Callable[..., Any]:
        """`_forward` with the signature of the module's forward as it is now."""
        users = self._ort_module.forward
        sources = sources_of(users)
        if not are_same(sources, self._ort_forward[0]):
            self._ort_forward = sources, _with_signature(users)
        return self._ort_forward[1]

    # The wrapped module seen through the wrapper

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._ort_module

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the user's module: code that asks `isinstance` treats the wrapper as it treats the module."""
        module = self.__dict__.get("_ort_module")
        # Dynamo takes it for the type, and would find the module's forward where ours is.
        if module is None or sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo"):
            return type(self)
        return module.__class__

    @property
    def training(self) -> bool:
        """The mode of the user's module."""
        return self._ort_module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_ort_ready" in self.__dict__:
            self._ort_module.training = mode

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The user's submodules under their names, with the wrapper in place of the module itself."""
        for name, module in self._ort_module.named_modules(*args, **kwargs):
            yield name, self if module is self._ort_module else module

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Call a function with every module, the wrapper in place of the module; the user's own is as it is."""
        module = self._ort_module
        if getattr(module.apply, "__func__", None) is nn.Module.apply:
            return super().apply(*args, **kwargs)
        result = module.apply(*args, **kwargs)
        return self if result is module else result

    def __getattr__(self, name: str) -> Any:
        module: nn.Module = self.__dict__["_ort_module"]
        value = getattr(module, name)
        function = getattr(module.__class__, name, None)
        if not isinstance(function, types.FunctionType) or getattr(value, "__self__", None) is not module:
            return value
        # A method that calls self(...) then runs here, unless it would find something of the wrapper for its own.
        code = code_of(function)
        places = (module.__dict__, module._modules, module._buffers, module._parameters)
        shadows = [n for n in self._ort_added if hasattr(module.__class__, n) or any(n in p for p in places)]
        its_own = bool(shadows) or looks_into_self(code)
        this = module if its_own else self
        called = frozenset() if hasattr(function, "__wrapped__") else called_on_self(code)
        causes = {part: f"it calls self.{part}(...), past the wrapper" for part in called & module._modules.keys()}
        if its_own and ITSELF in called:
            why = f"the wrapper has a {shadows[0]!r} too" if shadows else "it asks for the type or __dict__ of self"
            causes[ITSELF] = f"{why}, so that its self(...) is the module"
        method = self._ort_telling(name, function, causes) if causes else function
        return types.MethodType(method, this) if causes or not its_own else value

    def _ort_telling(self, name: str, function: Callable[..., Any], causes: dict[str, str]) -> Callable[..., Any]:
        """A method that tells, where it trains, that parts of the module, or all, do so in PyTorch, and why."""

        @functools.wraps(function)
        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and self.training and not torch.compiler.is_compiling():
                for part, cause in sorted(causes.items()):
                    if part == ITSELF or _trains(self._ort_module._modules[part]):
                        self._ort_tell_of(name, cause)
            return function(this, *args, **kwargs)

        return method

    def _ort_tell_of(self, method: str, cause: str) -> None:
        """Tell that a method of the module's trains in PyTorch, and why."""

    def __setattr__(self, name: str, value: Any) -> None:
        bound = isinstance(value, types.MethodType) and value.__self__ is self  # a module does not hold its wrapper
        own = bound or self._ort_owns(name) or "_ort_ready" not in self.__dict__
        if own:
            object.__setattr__(self, name, value)
        if not own or (name in SHARED and "_ort_ready" in self.__dict__):
            setattr(self._ort_module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._ort_owns(name):
            object.__delattr__(self, name)
        else:
            delattr(self._ort_module, name)

    def _ort_owns(self, name: str) -> bool:
        return name.startswith(OWN_PREFIX) or name == "forward" or name in self.__dict__

    def __getitem__(self, key: Any) -> Any:
        return self._ort_module[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ort_module[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._ort_module[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._ort_module

    def __iter__(self) -> Any:
        return iter(self._ort_module)

    def __len__(self) -> int:
        return len(self._ort_module)

    def __bool__(self) -> bool:
        return bool(self._ort_module)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._ort_module)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ort_module!r})"


def _trains(part: nn.Module | None) -> bool:
    """Whether a part of a module has something to learn and no wrapper of its own."""
    return part is not None and not isinstance(part, Wrapper) and any(p.requires_grad for p in part.parameters())


def _delegate(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(nn.Module, name))
    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._ort_module, name)(*args, **kwargs)
        return self if result is self._ort_module else result

    return method


for _name, _value in vars(nn.Module).items():
    _special = _name.startswith("__") or _name in _OF_A_CALL or _name in vars(Wrapper)
    if isinstance(_value, types.FunctionType) and not _special:
        setattr(Wrapper, _name, _delegate(_name))


def _is_exported() -> bool:
    """Whether the module is traced for somebody else's graph, which can hold no call of ours."""
    # The flag of an export is seen by all threads, the mode that traces by its own only.
    exported = torch.compiler._is_exporting_flag and (
        torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
    )
    return exported or torch._C._is_tracing()


# As torch.compiler.disable, but that imports Dynamo at once.
@torch._disable_dynamo
def _run(wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapper._ort_run(args, kwargs)


def _forward(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
    """Run the module's forward."""
    return self._ort_module(*args, **kwargs) if _is_exported() else _run(self, args, kwargs)


def _with_signature(users: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`_forward` as a function that has the signature and the words of the user's.

    There is no ``__wrapped__``: who takes wrappers off must stop here.
    """
    function = types.FunctionType(_forward.__code__, _forward.__globals__, "forward")
    function.__doc__ = users.__doc__
    try:
        signature = inspect.signature(users)
    except (TypeError, ValueError):
        return function
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[this, *signature.parameters.values()]
    )
    return function
